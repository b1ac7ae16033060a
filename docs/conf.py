"""How Sphinx builds the site. The repository's root is its source, so that links hold there and here."""

import sys
from pathlib import Path

import squeezebox

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]

project = "Squeezebox"
author = copyright = "The Squeezebox developers"
version = release = squeezebox.__version__

extensions = ["directives", "myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
root_doc = "docs/index"
include_patterns = ["*.md", "docs/**.md", "benchmarks/reports/*.md"]
exclude_patterns = [".*", "build", "dist", "site", "src", "tests"]
myst_enable_extensions = ["deflist"]
myst_heading_anchors = 3
suppress_warnings = ["myst.header"]  # a report's parts may begin at any level

autodoc_member_order = "bysource"
autodoc_mock_imports = ["accelerate", "lightning", "transformers"]  # extras, whose classes are only named
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented_params"
napoleon_numpy_docstring = False

# Every reference must lead somewhere; those to other libraries lead nowhere, as the site stands alone.
nitpicky = True
_TYPE_VARIABLES = r"squeezebox\..*\._\w+\.(Blocks|Model|Result|T)"
nitpick_ignore_regex = [("py:.*", r"(?!squeezebox).*"), ("py:class", _TYPE_VARIABLES)]

html_theme = "furo"
html_title = f"Squeezebox {version}"
html_copy_source = False
html_additional_pages = {"index": "forward.html"}  # to the root document
templates_path = ["templates"]

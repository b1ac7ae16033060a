"""Package metadata that need the repository's address: README with absolute links, and project URLs.

The release's workflow has the address in GITHUB_SERVER_URL and GITHUB_REPOSITORY. Without them, as in a
clone, links stay as they are, and there are no URLs.
"""

import os
import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

_LINK = re.compile(r"(!?\[[^]]*\]\()(?!\w+:|#)([^)]+)\)")


class RepositoryMetadata(MetadataHookInterface):
    """Fills in ``readme`` and ``urls``."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Called by hatchling as it builds."""
        text = Path(self.root, "README.md").read_text(encoding="utf-8")
        names = [os.environ.get(f"GITHUB_{name}", "") for name in ("SERVER_URL", "REPOSITORY")]
        if all(names):
            address = "/".join(names)
            text = absolute(text, address, os.environ.get("GITHUB_REF_NAME", "main"))
            metadata["urls"] = urls(address)
        metadata["readme"] = {"content-type": "text/markdown", "text": text}


def absolute(text: str, address: str, ref: str) -> str:
    """Links of a page at the repository's root as links to ``ref``; pictures as their files."""

    def link(found: re.Match[str]) -> str:
        kind = "raw" if found[1].startswith("!") else "blob"
        return f"{found[1]}{address}/{kind}/{ref}/{found[2]})"

    return _LINK.sub(link, text)


def urls(address: str) -> dict[str, str]:
    """What a package index shows beside the page."""
    return {
        "Homepage": address,
        "Documentation": f"{address}/blob/main/docs/index.md",
        "Changelog": f"{address}/blob/main/CHANGELOG.md",
        "Issues": f"{address}/issues",
    }

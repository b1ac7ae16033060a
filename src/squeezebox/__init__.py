"""Squeezebox trains PyTorch networks in less memory by packing what autograd saves, within error bounds.

In: a model and its optimizer, the training loop unchanged. Out: a session with a report.
This door exports its names lazily: ``import squeezebox`` loads no torch, no numba and no command line.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from squeezebox.schema import (
    AttachError,
    BudgetError,
    CaptureError,
    CaptureWarning,
    CodecError,
    DatasetError,
    FormatError,
    MemoryGrowthWarning,
    OptionError,
    OutOfMemoryError,
    OutputError,
    PipelineError,
    PlanError,
    SqueezeboxError,
    UnsupportedModelError,
)

__version__ = "0.1.0"

__all__ = [
    "AttachError",
    "BudgetError",
    "CaptureError",
    "CaptureWarning",
    "CodecError",
    "DatasetError",
    "FormatError",
    "MemoryGrowthWarning",
    "OptionError",
    "OutOfMemoryError",
    "OutputError",
    "PipelineError",
    "PlanError",
    "SqueezeboxError",
    "UnsupportedModelError",
    "__version__",
    "attach",
    "attach_stages",
    "audit",
    "bounds",
    "check_environment",
    "check_step",
    "codecs",
    "compile",
    "estimate",
    "explain_out_of_memory",
    "find_batch",
    "load_pipeline_plan",
    "load_plan",
    "max_batch",
    "memory",
    "pipeline",
    "plan",
    "plan_pipeline",
    "schedules",
    "schema",
    "streaming",
]

_OF_SESSION = (
    "attach",
    "attach_stages",
    "audit",
    "check_environment",
    "check_step",
    "compile",
    "estimate",
    "explain_out_of_memory",
    "find_batch",
    "max_batch",
    "plan",
    "plan_pipeline",
)

if TYPE_CHECKING:
    from squeezebox import bounds, codecs, memory, pipeline, schedules, schema, streaming
    from squeezebox.reports import load_pipeline_plan, load_plan
    from squeezebox.session import (
        attach,
        attach_stages,
        audit,
        check_environment,
        check_step,
        estimate,
        explain_out_of_memory,
        find_batch,
        max_batch,
        plan_pipeline,
    )
    from squeezebox.session import compile_model as compile
    from squeezebox.session import make_plan as plan
else:
    # Hidden from type checkers, who would take any name for an attribute.
    def __getattr__(name: str) -> object:
        """Import the room or the function called ``name`` on its first use (PEP 562)."""
        if name in ("bounds", "codecs", "memory", "pipeline", "schedules", "schema", "streaming"):
            return importlib.import_module(f"squeezebox.{name}")
        if name in _OF_SESSION:
            own = {"compile": "compile_model", "plan": "make_plan"}.get(name, name)
            return getattr(importlib.import_module("squeezebox.session"), own)
        if name in ("load_pipeline_plan", "load_plan"):
            return getattr(importlib.import_module("squeezebox.reports"), name)
        raise AttributeError(f"module 'squeezebox' has no attribute {name!r}")


def __dir__() -> list[str]:
    """Return the public names, loaded or not."""
    return __all__

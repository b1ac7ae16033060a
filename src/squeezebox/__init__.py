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
    RankError,
    SqueezeboxError,
    UnsupportedModelError,
    __version__,
)

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
    "RankError",
    "SqueezeboxError",
    "UnsupportedModelError",
    "__version__",
    "attach",
    "attach_stages",
    "audit",
    "bounds",
    "calibrate",
    "check_environment",
    "check_ranges",
    "check_step",
    "codecs",
    "compile",
    "compile_kernels",
    "compress_gradients",
    "estimate",
    "explain_out_of_memory",
    "feasibility",
    "find_batch",
    "gradients",
    "layers",
    "load_embedding_plan",
    "load_pipeline_plan",
    "load_plan",
    "load_pruned",
    "load_rewrites",
    "max_batch",
    "memory",
    "parity",
    "pipeline",
    "plan",
    "plan_embeddings",
    "plan_pipeline",
    "prune",
    "rewrite",
    "schedules",
    "schema",
    "streaming",
]

if TYPE_CHECKING:
    from squeezebox import bounds, codecs, gradients, layers, memory, pipeline, schedules, schema, streaming
    from squeezebox.auditing import audit, calibrate
    from squeezebox.codecs import compile_kernels
    from squeezebox.comparing import parity
    from squeezebox.compiling import compile_model as compile
    from squeezebox.doctor import check_environment, check_ranges, check_step
    from squeezebox.gradients import compress_gradients
    from squeezebox.layers import plan_embeddings
    from squeezebox.planning import (
        attach,
        attach_stages,
        estimate,
        explain_out_of_memory,
        feasibility,
        find_batch,
        max_batch,
        plan_pipeline,
    )
    from squeezebox.planning import make_plan as plan
    from squeezebox.pruning import load_pruned, prune
    from squeezebox.reports import load_embedding_plan, load_pipeline_plan, load_plan, load_rewrites
    from squeezebox.rewriting import rewrite
else:
    _DATA = ("bounds", "codecs", "memory", "schedules", "schema")
    _ROOMS = (*_DATA, "gradients", "layers", "pipeline", "streaming")
    _FUNCTIONS = {
        "attach": "planning",
        "attach_stages": "planning",
        "audit": "auditing",
        "calibrate": "auditing",
        "check_environment": "doctor",
        "check_ranges": "doctor",
        "check_step": "doctor",
        "compile": "compiling",
        "compile_kernels": "codecs",
        "compress_gradients": "gradients",
        "estimate": "planning",
        "explain_out_of_memory": "planning",
        "feasibility": "planning",
        "find_batch": "planning",
        "load_embedding_plan": "reports",
        "load_pipeline_plan": "reports",
        "load_plan": "reports",
        "load_pruned": "pruning",
        "load_rewrites": "reports",
        "max_batch": "planning",
        "parity": "comparing",
        "plan": "planning",
        "plan_embeddings": "layers",
        "prune": "pruning",
        "rewrite": "rewriting",
        "plan_pipeline": "planning",
    }
    _OWN_NAMES = {"compile": "compile_model", "plan": "make_plan"}

    # Hidden from type checkers, who would take any name for an attribute.
    def __getattr__(name: str) -> object:
        """Import the room or the function called ``name`` on its first use (PEP 562)."""
        if name in _ROOMS:
            return importlib.import_module(f"squeezebox.{name}")
        if name in _FUNCTIONS:
            room = importlib.import_module(f"squeezebox.{_FUNCTIONS[name]}")
            return getattr(room, _OWN_NAMES.get(name, name))
        raise AttributeError(f"module 'squeezebox' has no attribute {name!r}")


def __dir__() -> list[str]:
    """Return the public names, loaded or not."""
    return __all__

"""The one place that knows all rooms: attach to a model, train, report; plan, compile, estimate, audit.

In: models, samples and options. Out: sessions, plans and compiled steps. Attaching hooks the model's forward;
everything else leaves the model as it was.
The door exports lazily: attaching loads none of the other products.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

__all__ = [
    "AuditRun",
    "Factor",
    "Outcome",
    "Session",
    "attach",
    "attach_stages",
    "audit",
    "check_environment",
    "check_step",
    "compile_model",
    "estimate",
    "explain_out_of_memory",
    "explanation",
    "find_batch",
    "make_plan",
    "max_batch",
    "peak_meter",
    "plan_pipeline",
]

if TYPE_CHECKING:
    from squeezebox.session._attach import attach
    from squeezebox.session._audit import audit
    from squeezebox.session._audit_run import AuditRun, Factor, Outcome
    from squeezebox.session._compile import compile_model
    from squeezebox.session._doctor import check_step
    from squeezebox.session._environment import check_environment
    from squeezebox.session._estimate import estimate
    from squeezebox.session._find import find_batch
    from squeezebox.session._max_batch import max_batch
    from squeezebox.session._out_of_memory import explain_out_of_memory, explanation
    from squeezebox.session._pipelines import attach_stages, peak_meter, plan_pipeline
    from squeezebox.session._plans import make_plan
    from squeezebox.session._session import Session
else:
    # Hidden from type checkers, who would take any name for an attribute.
    _FILES = {
        "attach": "_attach",
        "audit": "_audit",
        "AuditRun": "_audit_run",
        "Factor": "_audit_run",
        "Outcome": "_audit_run",
        "compile_model": "_compile",
        "check_step": "_doctor",
        "check_environment": "_environment",
        "estimate": "_estimate",
        "find_batch": "_find",
        "explain_out_of_memory": "_out_of_memory",
        "explanation": "_out_of_memory",
        "attach_stages": "_pipelines",
        "peak_meter": "_pipelines",
        "plan_pipeline": "_pipelines",
        "make_plan": "_plans",
        "max_batch": "_max_batch",
        "Session": "_session",
    }

    def __getattr__(name: str) -> object:
        """Import the function or class called ``name`` on its first use (PEP 562)."""
        if name not in _FILES:
            raise AttributeError(f"module 'squeezebox.session' has no attribute {name!r}")
        return getattr(importlib.import_module(f"squeezebox.session.{_FILES[name]}"), name)

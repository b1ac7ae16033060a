"""The one place that knows all rooms: attach to a model, train, report; plan, compile, estimate, audit.

In: models, samples and options. Out: sessions, plans and compiled steps. Attaching hooks the model's forward;
everything else leaves the model as it was.
"""

from squeezebox.session._attach import attach
from squeezebox.session._audit import audit
from squeezebox.session._audit_run import AuditRun, Factor, Outcome
from squeezebox.session._compile import compile_model
from squeezebox.session._doctor import check_step
from squeezebox.session._environment import check_environment
from squeezebox.session._estimate import estimate
from squeezebox.session._find import find_batch
from squeezebox.session._out_of_memory import explain_out_of_memory, explanation
from squeezebox.session._pipelines import attach_stages, peak_meter, plan_pipeline
from squeezebox.session._plans import make_plan, max_batch
from squeezebox.session._session import Session

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

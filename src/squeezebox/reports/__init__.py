"""Turn step records into what people and programs read.

In: schema's StepRecord, or an estimate's figures. Out: text tables, and JSON files written whole or not
at all.
May touch: files it is told to write; no torch.
"""

from squeezebox.reports._batch import MaxBatch
from squeezebox.reports._compiled import CompiledReport, CompiledTensor
from squeezebox.reports._estimate import Estimate
from squeezebox.reports._plan import PlannedTensor, StepPlan, load_plan
from squeezebox.reports._report import Report, human_bytes, require_writable, write_whole
from squeezebox.reports._shortage import exact_bytes, explain, explain_floor

__all__ = [
    "CompiledReport",
    "CompiledTensor",
    "Estimate",
    "MaxBatch",
    "PlannedTensor",
    "Report",
    "StepPlan",
    "exact_bytes",
    "explain",
    "explain_floor",
    "human_bytes",
    "load_plan",
    "require_writable",
    "write_whole",
]

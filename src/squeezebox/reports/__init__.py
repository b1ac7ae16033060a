"""Turn step records into what people and programs read.

In: schema's StepRecord, or an estimate's figures. Out: text tables, and JSON files written whole or not
at all.
May touch: files it is told to write; no torch.
"""

from squeezebox.reports._compiled import CompiledReport, CompiledTensor
from squeezebox.reports._estimate import Estimate
from squeezebox.reports._plan import PlannedTensor, StepPlan, load_plan
from squeezebox.reports._report import Report, human_bytes, require_writable, write_whole

__all__ = [
    "CompiledReport",
    "CompiledTensor",
    "Estimate",
    "PlannedTensor",
    "Report",
    "StepPlan",
    "human_bytes",
    "load_plan",
    "require_writable",
    "write_whole",
]

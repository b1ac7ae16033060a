"""Turn step records into what people and programs read.

In: schema's StepRecord, or the figures of an estimate or a pipeline. Out: text tables, drawings and traces,
and JSON files written whole or not at all.
May touch: files whose paths callers pass; no torch.
"""

from squeezebox.reports._audit import (
    CONTROL,
    EVERYTHING,
    ArmComparison,
    Audit,
    AuditedOperator,
    ControlPair,
    SeriesSpread,
    StepCost,
    analyse,
)
from squeezebox.reports._audit_statistics import (
    LEVEL,
    AuditRecord,
    Equivalence,
    deviation_uncertainty,
    equivalence,
    paired_limit,
    t_quantile,
)
from squeezebox.reports._calibration import (
    CalibratedLevel,
    Calibration,
    calibrated_level,
    level_name,
    pairs_needed,
)
from squeezebox.reports._doctor import EnvironmentCheck, RangeCheck, StepCheck
from squeezebox.reports._embeddings import load_embedding_plan
from squeezebox.reports._estimate import BatchPoint, Estimate, FoundBatch, MaxBatch
from squeezebox.reports._exchange import ExchangeArm, ExchangeWay, MeasuredExchange
from squeezebox.reports._feasibility import DeviceFit, Feasibility, JobFit, Scenario, SharedDevice
from squeezebox.reports._page import timeline_html
from squeezebox.reports._parity import Parity, wilson
from squeezebox.reports._pipeline import (
    PipelineRank,
    PipelineReport,
    load_pipeline_plan,
    pipeline_plan_line,
    pipeline_plan_text,
    trace_events,
)
from squeezebox.reports._plan import (
    PlannedTensor,
    StepPlan,
    exact_bytes,
    explain,
    explain_floor,
    load_plan,
    output_held,
)
from squeezebox.reports._pruning import PruningReport
from squeezebox.reports._report import CompiledReport, CompiledTensor, Report
from squeezebox.reports._rewrites import Rewrite, Rewrites, load_rewrites
from squeezebox.reports._selection import Selection, select
from squeezebox.reports._svg import ChartKind, ChartSpan, PipelineChart, draw_svg
from squeezebox.reports._timeline import Timeline, timeline_events
from squeezebox.schema import BYTE_UNITS, human_bytes, parse_size, require_writable, write_whole

__all__ = [
    "BYTE_UNITS",
    "CONTROL",
    "EVERYTHING",
    "LEVEL",
    "ArmComparison",
    "Audit",
    "AuditRecord",
    "AuditedOperator",
    "CalibratedLevel",
    "Calibration",
    "ChartKind",
    "ChartSpan",
    "CompiledReport",
    "CompiledTensor",
    "ControlPair",
    "DeviceFit",
    "EnvironmentCheck",
    "Equivalence",
    "Estimate",
    "BatchPoint",
    "ExchangeArm",
    "ExchangeWay",
    "Feasibility",
    "FoundBatch",
    "JobFit",
    "MaxBatch",
    "MeasuredExchange",
    "Parity",
    "PipelineChart",
    "PipelineRank",
    "PipelineReport",
    "PlannedTensor",
    "PruningReport",
    "RangeCheck",
    "Report",
    "Rewrite",
    "Rewrites",
    "Selection",
    "Scenario",
    "SeriesSpread",
    "SharedDevice",
    "StepCheck",
    "StepCost",
    "StepPlan",
    "Timeline",
    "analyse",
    "calibrated_level",
    "deviation_uncertainty",
    "draw_svg",
    "equivalence",
    "exact_bytes",
    "explain",
    "explain_floor",
    "human_bytes",
    "level_name",
    "load_embedding_plan",
    "load_pipeline_plan",
    "load_plan",
    "load_rewrites",
    "paired_limit",
    "pairs_needed",
    "output_held",
    "parse_size",
    "pipeline_plan_line",
    "pipeline_plan_text",
    "require_writable",
    "select",
    "t_quantile",
    "timeline_events",
    "timeline_html",
    "trace_events",
    "wilson",
    "write_whole",
]

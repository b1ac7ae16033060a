"""Chooses how to hold every saved tensor, how to cut a pipeline, how gradients go together, and among plans.

In: a Profile (positions, tensors, measured options) and a Budget, or PipelineProfiles, ranks, their memory
and their Link, or Gradients and Ways, or seconds of steps, or Work and Jobs for Devices, or TableSamples.
Out: a Plan, PipelinePlans, a FusionPlan, Placements or a choice, or why there is none; seconds and scores.
May touch: squeezebox.schedules, squeezebox.schema, numpy, and scipy for the optimum; no torch.
"""

from squeezebox.planner._balance import Balance
from squeezebox.planner._batches import at_batch, free_slices, in_slices, largest_batch, slicings
from squeezebox.planner._devices import plan_on_devices
from squeezebox.planner._fusion import FusionPlan, Gradient, Group, Line, Way, evaluate_fusion, plan_fusion
from squeezebox.planner._greedy import first_fit, peak, solve
from squeezebox.planner._jobs import jobs_peak, run_jobs, score_jobs
from squeezebox.planner._known import KNOWN_DEVICES
from squeezebox.planner._milp import optimum
from squeezebox.planner._pipeline import plan_pipeline, preference
from squeezebox.planner._replicated import with_replicas
from squeezebox.planner._roofline import roofline_seconds
from squeezebox.planner._shortage import floor, over_step, planned_peak, shortage, smallest
from squeezebox.planner._split import (
    ReplicatedSplit,
    ReplicatedStage,
    all_reduce_seconds,
    others_bytes,
    pipedream_split,
)
from squeezebox.planner._stages import stage_memory
from squeezebox.planner._tables import Placement, TableSample, TableSearch

__all__ = [
    "KNOWN_DEVICES",
    "Balance",
    "FusionPlan",
    "Gradient",
    "Group",
    "Line",
    "Placement",
    "TableSample",
    "TableSearch",
    "Way",
    "evaluate_fusion",
    "plan_fusion",
    "plan_on_devices",
    "all_reduce_seconds",
    "ReplicatedSplit",
    "ReplicatedStage",
    "at_batch",
    "first_fit",
    "floor",
    "free_slices",
    "in_slices",
    "jobs_peak",
    "largest_batch",
    "optimum",
    "others_bytes",
    "over_step",
    "peak",
    "planned_peak",
    "pipedream_split",
    "plan_pipeline",
    "preference",
    "roofline_seconds",
    "run_jobs",
    "score_jobs",
    "shortage",
    "slicings",
    "smallest",
    "solve",
    "stage_memory",
    "with_replicas",
]

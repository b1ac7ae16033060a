"""Measure what a step really costs on this machine.

In: a running step, or a model and an input's shape. Out: profiles; peaks in bytes, measured or simulated.
May touch: torch's profiler, allocator counters, fake tensors, and a folder of profiles; never the model.
"""

from squeezebox.memory import Peak, PeakMeter, free_at_peak, free_bytes, live_bytes
from squeezebox.profiling._cache import load_profile, profile_key, store_profile
from squeezebox.profiling._chain import PartCosts, measure_parts
from squeezebox.profiling._closure import record_closure
from squeezebox.profiling._figures import rated
from squeezebox.profiling._gains import Gain, GainProfiler
from squeezebox.profiling._ledgers import Marks, measure_marks, now
from squeezebox.profiling._load import Load, at_balanced_load, loads_named, routed
from squeezebox.profiling._optimizer import (
    ParameterNeeds,
    optimizer_named,
    parameter_needs,
    state_bytes,
    transient_bytes,
)
from squeezebox.profiling._options import StepProfiler
from squeezebox.profiling._record import Modules, StepMarks, own_casts, record_step
from squeezebox.profiling._redundancy import check_redundancy
from squeezebox.profiling._simulate import Simulation, fake_like, simulate
from squeezebox.profiling._speed import measure_speed
from squeezebox.profiling._transfer import transfer_of

__all__ = [
    "Gain",
    "GainProfiler",
    "Load",
    "Marks",
    "Modules",
    "ParameterNeeds",
    "PartCosts",
    "Peak",
    "PeakMeter",
    "Simulation",
    "StepMarks",
    "StepProfiler",
    "at_balanced_load",
    "check_redundancy",
    "fake_like",
    "free_at_peak",
    "free_bytes",
    "live_bytes",
    "load_profile",
    "loads_named",
    "measure_marks",
    "measure_parts",
    "measure_speed",
    "now",
    "optimizer_named",
    "own_casts",
    "parameter_needs",
    "profile_key",
    "rated",
    "record_closure",
    "record_step",
    "routed",
    "simulate",
    "state_bytes",
    "store_profile",
    "transfer_of",
    "transient_bytes",
]

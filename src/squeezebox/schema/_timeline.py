"""One profiled training step: phase by module, memory over time, and what was predicted of it."""

from __future__ import annotations

from dataclasses import dataclass

from squeezebox.schema._saved import StepRecord
from squeezebox.schema._trace import Activity, Kind


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """A time in which one module, in one phase, was busy with one activity."""

    began_seconds: float
    seconds: float
    phase: str
    module: str
    activity: Activity


@dataclass(frozen=True, kw_only=True, slots=True)
class TimelineCell:
    """What one phase spent on one module ("": the model itself, or none).

    ``seconds`` are all its time, the four kinds of seconds after it included. ``peak_bytes`` are live at the
    step's peak and were made here (phase "before": they were there before the step); ``highest_bytes`` is
    the most that was live while this ran, wherever it was made. ``saved_bytes`` is what plain PyTorch would
    hold of what was saved here, ``packed_bytes`` what is held instead, ``offloaded_bytes`` the part of
    ``saved_bytes`` that left the memory, ``recomputed_bytes`` what was recomputed here.
    """

    phase: str
    module: str
    seconds: float = 0.0
    packing_seconds: float = 0.0
    unpacking_seconds: float = 0.0
    recomputing_seconds: float = 0.0
    waiting_seconds: float = 0.0
    peak_bytes: int = 0
    highest_bytes: int = 0
    saved_bytes: int = 0
    packed_bytes: int = 0
    recomputed_bytes: int = 0
    offloaded_bytes: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class LiveSample:
    """The most that was live while one operator ran; ``nbytes`` has one entry for each kind, in order."""

    seconds: float
    phase: str
    module: str
    operator: str
    nbytes: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class BoundRecord:
    """The absolute error bounds that one step's lossy tensors had, by their keys."""

    step: int
    bounds: dict[str, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class Forecast:
    """A figure that was predicted, and what was measured; ``unit`` is "bytes", "seconds" or "" (a ratio)."""

    name: str
    unit: str
    estimated: float
    measured: float


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTimeline:
    """One profiled step.

    ``record`` is its report; its ``peak_bytes`` is this step's. ``seconds`` is the profiled step's length,
    the sum of all spans and of all cells; ``unprofiled_seconds`` that of the step before it, run without a
    profiler. ``kinds`` name the entries of every sample's bytes; ``samples`` are thinned, but never lose the
    highest of their neighbours, so that the greatest is the step's peak, at ``peak``. ``history`` has the
    bounds of the steps that refreshed them, and of this one. ``planned_bytes`` is what the plan, if there is
    one, wanted to hold of each tensor.
    """

    model: str
    record: StepRecord
    seconds: float
    unprofiled_seconds: float
    spans: tuple[Span, ...]
    cells: tuple[TimelineCell, ...]
    kinds: tuple[Kind, ...]
    samples: tuple[LiveSample, ...]
    peak: LiveSample
    history: tuple[BoundRecord, ...] = ()
    forecasts: tuple[Forecast, ...] = ()
    planned_bytes: dict[str, int] | None = None

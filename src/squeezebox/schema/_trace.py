"""What one training step allocates, when, for whom and for how long, and where buffers lie in one block."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from squeezebox.schema._saved import StepRecord


@dataclass(frozen=True, kw_only=True, slots=True)
class Buffer:
    """Bytes that nobody else may touch during [lower, upper), counted in steps of time."""

    name: str
    lower: int
    upper: int
    nbytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """Where buffers lie in an arena of ``nbytes``.

    ``offsets`` are in the order of the buffers, in bytes from the arena's start, each a multiple of
    ``alignment``. No arrangement with that alignment needs fewer than ``lower_bound_bytes``: so much must be
    there at the same time. ``packer`` names the algorithm that found the offsets.
    """

    offsets: tuple[int, ...]
    nbytes: int
    lower_bound_bytes: int
    alignment: int
    packer: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Operator:
    """What is issued to a stream: the names of the tensors it reads and writes.

    It runs after the operator issued before it to the same stream, after those that first write what it
    reads or writes, and after those called ``waits``, as by an event recorded behind each of these. It may
    run at the same time as any other.
    """

    name: str
    stream: str
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    waits: tuple[str, ...] = ()


class Kind(Enum):
    """What a storage is for.

    ``SAVED`` are those made in forward or loss that are still there when backward begins, ``PACKED`` those
    among them that packing made; ``TEMPORARY`` is all that is none of the others.
    """

    PARAMETER = "parameters"
    GRADIENT = "gradients"
    BUFFER = "buffers"
    STATE = "optimizer state"
    INPUT = "input"
    SAVED = "saved tensors"
    PACKED = "packed tensors"
    TEMPORARY = "temporaries"


class Activity(Enum):
    """What time is spent on: the model's own work, or holding its saved tensors in another way.

    ``WAITING`` is for a tensor on its way out of memory or back.
    """

    COMPUTING = "computing"
    PACKING = "packing"
    UNPACKING = "unpacking"
    RECOMPUTING = "recomputing"
    WAITING = "waiting"


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """An operator that ran.

    ``module`` is the path of the module whose forward made it, or made what it is the backward of ("": the
    model itself, or none). ``phase`` is "forward", "loss", "backward" or "optimizer". It began at the time
    ``began_at``, and the next one begins later or at once. ``began_seconds`` is the clock's time since the
    first one (0 where nothing is computed).
    """

    operator: str
    phase: str
    module: str
    began_at: int
    began_seconds: float = 0.0
    activity: Activity = Activity.COMPUTING


@dataclass(frozen=True, kw_only=True, slots=True)
class Storage:
    """One piece of memory. It lives from ``allocated_at`` until before ``freed_at``.

    ``call`` is the number of the operator that made it, None for what was there before the step. ``streams``
    are those on which operators touch it, by their numbers (0: the default one, and a CPU's).
    """

    nbytes: int
    kind: Kind
    allocated_at: int
    freed_at: int
    call: int | None = None
    streams: tuple[int, ...] = (0,)


@dataclass(frozen=True, kw_only=True, slots=True)
class Peak:
    """A step's highest moment: bytes of each kind, which add up to ``nbytes``, and what was running."""

    nbytes: int
    by_kind: dict[Kind, int]
    time: int
    call: Call | None


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTrace:
    """One training step's storages and operators.

    Time counts allocations and frees: each has a time of its own, in their order, and what is there before
    the step has the time 0. What the step leaves behind is freed at ``end``. ``seconds`` are the clock's,
    from the first operator to the end (0 where nobody looked at it).
    """

    storages: tuple[Storage, ...]
    calls: tuple[Call, ...]
    end: int
    seconds: float = 0.0

    def peak(self) -> Peak:
        """The first moment at which most bytes are live."""
        changes = self._changes()
        live, highest, time = 0, 0, 0
        for now, change in enumerate(changes):
            live += change
            if live > highest:
                highest, time = live, now
        by_kind = Counter(dict.fromkeys(Kind, 0))
        for storage in self.living(time):
            by_kind[storage.kind] += storage.nbytes
        return Peak(nbytes=highest, by_kind=dict(by_kind), time=time, call=self.call_at(time))

    def buffers(self, *kinds: Kind) -> tuple[Buffer, ...]:
        """The storages of these kinds (default: all), as what :func:`squeezebox.memory.layout` places."""
        return tuple(
            Buffer(
                name=f"{number} {self._maker(storage)}",
                lower=storage.allocated_at,
                upper=storage.freed_at,
                nbytes=storage.nbytes,
            )
            for number, storage in enumerate(self.storages)
            if not kinds or storage.kind in kinds
        )

    def living(self, time: int) -> Iterator[Storage]:
        """The storages that are live then."""
        return (storage for storage in self.storages if storage.allocated_at <= time < storage.freed_at)

    def call_at(self, time: int) -> Call | None:
        """The last operator that had begun by then."""
        begun = [call for call in self.calls if call.began_at <= time]
        return begun[-1] if begun else None

    def _maker(self, storage: Storage) -> str:
        if storage.call is None:
            return storage.kind.value
        call = self.calls[storage.call]
        return f"{call.phase} {call.module} {call.operator}"

    def _changes(self) -> list[int]:
        changes = [0] * (self.end + 1)
        for storage in self.storages:
            changes[storage.allocated_at] += storage.nbytes
            changes[storage.freed_at] -= storage.nbytes
        return changes


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
    one, wanted to hold of each tensor. ``trace`` is all of it: every storage and operator.
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
    trace: StepTrace
    history: tuple[BoundRecord, ...] = ()
    forecasts: tuple[Forecast, ...] = ()
    planned_bytes: dict[str, int] | None = None

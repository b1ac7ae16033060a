"""On which devices a training step fits, how long it takes there, and how well several jobs share one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from squeezebox.reports._saved import Saved
from squeezebox.schema import human_bytes

_HOUR = 3600.0
_UNMEASURED = "* by rates of a file or a data sheet, and by how far from its own rates this machine is"


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceFit:
    """A training step on one device; sizes are bytes.

    ``fits`` is "plain", "exact plan", "noise 0.001 plan" or "" (it does not). ``peak_bytes`` is the peak of
    what fits, or of the plain step; ``plain_batch`` and ``batch`` are the largest ones plain and at all.
    ``time_ratio`` is the plan's time over a plain step's. ``seconds`` of a step are the least, the likeliest
    and the most. ``measured``: steps of networks were run on such a device; else the device's rates are the
    file's, and steps are as far from these as on this machine.
    """

    device: str
    memory_bytes: int
    fits: str
    peak_bytes: int
    plain_batch: int
    batch: int
    time_ratio: float
    seconds: tuple[float, float, float]
    measured: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Feasibility(Saved):
    """A step of ``batch`` samples on each device. ``str()`` is a table.

    ``reserve`` says what stays free of memories. ``steps`` are those of the training, 0 where nobody said.
    ``why_unplanned`` says why no plans were tried, "" where they were.
    """

    KIND, AGAIN = "table of devices", "squeezebox.feasibility(...).save(path)"

    model: str
    batch: int
    reserve: str
    steps: int
    devices: tuple[DeviceFit, ...]
    why_unplanned: str = ""

    @property
    def go(self) -> bool:
        """Whether any of the devices can train this."""
        return any(each.fits for each in self.devices)

    def __str__(self) -> str:
        head = ["device", "memory", "fits", "peak", "batch: plain", "at most", "s a step", "from - to"]
        head += [f"hours for {self.steps:,} steps"] if self.steps else []
        rows = [head, *(self._row(each) for each in self.devices)]
        lines = [f"{self.model}, batch {self.batch}; {self.reserve} stay free.", *_table(rows)]
        if any(not each.measured for each in self.devices):
            lines.append(_UNMEASURED)
        if self.why_unplanned:
            lines.append(f"No plan was tried: {self.why_unplanned}")
        return "\n".join(lines)

    def _row(self, each: DeviceFit) -> list[str]:
        row = [each.device, human_bytes(each.memory_bytes), each.fits or "no", human_bytes(each.peak_bytes)]
        row += [str(each.plain_batch), str(each.batch)]
        if not each.fits:
            return [*row, "-", "-", *(["-"] if self.steps else [])]
        least, likely, most = each.seconds
        row += [f"{likely:.3g}{'' if each.measured else '*'}", f"{least:.2g} - {most:.2g}"]
        hours = f"{least * self.steps / _HOUR:.2g} - {most * self.steps / _HOUR:.2g}"
        return [*row, *([hours] if self.steps else [])]


@dataclass(frozen=True, kw_only=True, slots=True)
class JobFit:
    """A job among others on a device: its frames, those that were completed and those in time, its score."""

    job: str
    kind: str
    frames: int
    completed: int
    in_time: int
    seconds: float
    peak_bytes: int
    score: float


@dataclass(frozen=True, kw_only=True, slots=True)
class SharedDevice:
    """Jobs together on one device; ``score`` is the mean of theirs, from 0 to 1.

    ``room_bytes`` of the memory are for tensors; the rest stays free, as :func:`feasibility` has it.
    """

    device: str
    memory_bytes: int
    room_bytes: int
    peak_bytes: int
    score: float
    jobs: tuple[JobFit, ...]

    @property
    def fits(self) -> bool:
        """Whether all jobs together do."""
        return self.peak_bytes <= self.room_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Scenario(Saved):
    """The same jobs on each device. ``str()`` is a table for each."""

    KIND, AGAIN = "result of jobs", "squeezebox.planning.shared(...).save(path)"

    devices: tuple[SharedDevice, ...]

    @property
    def go(self) -> bool:
        """Whether any device holds all jobs, and completes some of each."""
        return any(each.fits and all(job.completed for job in each.jobs) for each in self.devices)

    def __str__(self) -> str:
        return "\n\n".join(map(_shared, self.devices))


def _shared(device: SharedDevice) -> str:
    fits = "fit" if device.fits else "do not fit"
    head = (
        f"{device.device}: the jobs {fits}, {human_bytes(device.peak_bytes)} of "
        f"{human_bytes(device.room_bytes)}, memory {human_bytes(device.memory_bytes)}; "
        f"score {device.score:.3f}"
    )
    rows = [("job", "kind", "completed", "in time", "s a frame", "peak", "score")]
    rows += [
        (
            each.job,
            each.kind,
            f"{each.completed} of {each.frames}",
            str(each.in_time),
            f"{each.seconds:.3g}",
            human_bytes(each.peak_bytes),
            f"{each.score:.3f}",
        )
        for each in device.jobs
    ]
    return "\n".join([head, *_table(rows)])


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(f"{text:<{width}}" for text, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]

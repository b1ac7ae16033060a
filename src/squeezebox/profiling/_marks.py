"""What is there, and how long it takes, between marks that running code sets."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch

from squeezebox.memory import Recording
from squeezebox.profiling._clock import now
from squeezebox.schema import CaptureError

_MARK = "squeezebox.mark."

Mark = Callable[[int], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Marks:
    """Bytes at each mark beyond those before the first; the most from it, and seconds, to the next one."""

    live: list[int]
    highest: list[int]
    seconds: list[float]


def measure_marks(
    run: Callable[[Mark], None], last: int, device: torch.device, repeats: int, *, warm: bool = False
) -> Marks:
    """Run once to begin with, once for bytes, and ``repeats`` times for seconds, of which medians count.

    Args:
        run: calls what it is given with 0 to ``last``. A mark may be left out: nothing is there then.
        last: the last mark.
        device: where the run's tensors are.
        repeats: from 1.
        warm: the run was made before, and need not be to begin with.

    Raises:
        CaptureError: another profiler is running.
    """
    if not warm:
        run(lambda number: None)  # what first calls allocate stays
    live, highest = (_on_device if device.type == "cuda" else _on_host)(run, device)
    for number in range(1, last + 1):
        live.setdefault(number, live[number - 1])
    timed = [_seconds(run, device) for _ in range(repeats)]
    return Marks(
        live=[live[number] for number in range(last + 1)],
        highest=[highest.get(number, 0) for number in range(last + 1)],
        seconds=[statistics.median(times.get(number, 0.0) for times in timed) for number in range(last)],
    )


def _seconds(run: Callable[[Mark], None], device: torch.device) -> dict[int, float]:
    """Seconds from each mark to the next one that comes."""
    times: dict[int, float] = {}
    run(lambda number: times.update({number: now(device)}))
    return {number: times[after] - times[number] for number, after in pairwise(sorted(times))}


def _on_host(run: Callable[[Mark], None], device: torch.device) -> tuple[dict[int, int], dict[int, int]]:
    recording = Recording(device)
    if not recording.start():
        raise CaptureError("another profiler is running, so memory cannot be measured. End it first.")

    def mark(number: int) -> None:
        with torch.profiler.record_function(f"{_MARK}{number}"):
            pass

    try:
        run(mark)
    finally:
        recording.close()
    live, highest = dict[int, int](), dict[int, int]()
    allocated: dict[int, int] = {}
    total, number = 0, 0
    for name, address, nbytes in recording.events():
        if name.startswith(_MARK):
            number = int(name.removeprefix(_MARK))
            live[number] = highest[number] = total
        elif nbytes > 0:
            total += nbytes - allocated.pop(address, 0)
            allocated[address] = nbytes
            highest[number] = max(highest.get(number, total), total)
        elif nbytes < 0:
            total -= allocated.pop(address, 0)
    return live, highest


def _on_device(run: Callable[[Mark], None], device: torch.device) -> tuple[dict[int, int], dict[int, int]]:
    live, highest, last = dict[int, int](), dict[int, int](), [0]
    base = torch.cuda.memory_allocated(device)

    def mark(number: int) -> None:
        highest[last[0]] = torch.cuda.max_memory_allocated(device) - base
        torch.cuda.reset_peak_memory_stats(device)
        live[number] = torch.cuda.memory_allocated(device) - base
        last[0] = number

    run(mark)
    return live, highest

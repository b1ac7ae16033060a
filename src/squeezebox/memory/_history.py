"""What a device's allocator was asked for: torch's own history, with marks between its events."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import torch

_MOST_EVENTS = 1 << 20
_BLOCK = 512  # bytes: the allocator rounds up to as many


class History:
    """The allocations and frees on one CUDA device from :meth:`start` to :meth:`close`.

    Torch's profiler does not see those outside of an operator, which are most frees. The allocator counts
    both; so a mark between two events knows its place without a clock.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._marks: list[tuple[int, int, str]] = []  # events before it, nanoseconds, name
        self._before: int | None = None  # events when it began
        self._trace: list[Any] | None = None

    def start(self) -> bool:
        """Begin; False if somebody records a history already."""
        if torch._C._cuda_isHistoryEnabled():
            return False
        torch.cuda.memory._record_memory_history(
            "all", context=None, stacks="python", max_entries=_MOST_EVENTS, clear_history=True
        )
        self._before = self._count()
        return True

    def mark(self, name: str) -> None:
        """Note that all events until now were before this; nothing before :meth:`start`."""
        if self._before is not None:
            self._marks.append((self._count() - self._before, time.time_ns(), name))

    def close(self) -> None:
        """End; safe to call twice."""
        if self._trace is None:
            traces = torch.cuda.memory._snapshot()["device_traces"]
            torch.cuda.memory._record_memory_history(None)
            found = traces[self._number()] if traces else []
            self._trace = [event for event in found if event["action"] in ("alloc", "free_requested")]

    def events(self) -> list[tuple[int, str, int, int]]:
        """End, and give (nanoseconds, name, address, signed bytes) in order; allocations have no name."""
        self.close()
        return [*self._ordered()]

    def _ordered(self) -> Iterator[tuple[int, str, int, int]]:
        marks = iter(self._marks)
        mark = next(marks, None)
        for number, event in enumerate(self._trace or ()):
            while mark is not None and mark[0] <= number:
                yield mark[1], mark[2], 0, 0
                mark = next(marks, None)
            nbytes = -(-event["size"] // _BLOCK) * _BLOCK
            signed = nbytes if event["action"] == "alloc" else -nbytes
            yield 1000 * event["time_us"], "", event["addr"], signed
        while mark is not None:
            yield mark[1], mark[2], 0, 0
            mark = next(marks, None)

    def _count(self) -> int:
        counted = torch.cuda.memory_stats_as_nested_dict(self._number())["allocation"]["all"]
        return int(counted["allocated"] + counted["freed"])

    def _number(self) -> int:
        return torch.cuda.current_device() if self._device.index is None else self._device.index

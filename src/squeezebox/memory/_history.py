"""What a device's allocator was asked for: torch's own history, with marks between its events."""

from __future__ import annotations

import sys
import time
from collections import deque
from typing import Any, NamedTuple

import torch

_MOST_EVENTS = 1 << 20
_BLOCK = 512  # bytes: the allocator rounds up to as many


class _Mark(NamedTuple):
    events: int  # before it, ever
    live_bytes: int
    nanoseconds: int
    name: str


class History:
    """The allocations and frees on one CUDA device from :meth:`start` to :meth:`close`.

    Torch's profiler does not see those outside of an operator, which are most frees. The allocator counts
    both; so a mark between two events knows its place without a clock.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._marks: list[_Mark] = []
        self._begun: _Mark | None = None
        self._trace: list[Any] | None = None

    def start(self) -> bool:
        """Begin; False if somebody records a history already."""
        if torch._C._cuda_isHistoryEnabled():
            return False
        torch.cuda.memory._record_memory_history(
            "all", context=None, stacks="python", max_entries=_MOST_EVENTS, clear_history=True
        )
        self._begun = self._now("")
        return True

    def mark(self, name: str) -> None:
        """Note that all events until now were before this; nothing before :meth:`start`."""
        if self._begun is not None:
            self._marks.append(self._now(name))

    def close(self) -> None:
        """End; safe to call twice, and where nothing began."""
        if self._begun is not None and self._trace is None:
            traces = torch.cuda.memory._snapshot()["device_traces"]
            torch.cuda.memory._record_memory_history(None)
            found = traces[self._number()] if traces else []
            self._trace = [event for event in found if event["action"] in ("alloc", "free_requested")]

    def events(self) -> list[tuple[int, str, int, int]]:
        """End, and give (nanoseconds, name, address, signed bytes) in order; allocations have no name.

        A block may be larger than what was asked for. The most that all blocks together were so at a mark is
        the first allocation, of no tensor's address.
        """
        self.close()
        begun = self._begun
        if begun is None:
            return []
        found, live, most = list[tuple[int, str, int, int]](), 0, 0
        marks = deque(self._marks)

        def put_marks(number: int) -> None:
            nonlocal most
            while marks and marks[0].events - begun.events <= number:
                mark = marks.popleft()
                most = max(most, mark.live_bytes - begun.live_bytes - live)
                found.append((mark.nanoseconds, mark.name, 0, 0))

        for number, event in enumerate(self._trace or ()):
            put_marks(number)
            signed = -(-event["size"] // _BLOCK) * _BLOCK * (1 if event["action"] == "alloc" else -1)
            live += signed
            found.append((1000 * event["time_us"], "", event["addr"], signed))
        put_marks(sys.maxsize)
        return [(begun.nanoseconds, "", -1, most), *found] if most else found

    def _now(self, name: str) -> _Mark:
        counted = torch.cuda.memory_stats_as_nested_dict(self._number())
        events = counted["allocation"]["all"]
        live = int(counted["allocated_bytes"]["all"]["current"])
        return _Mark(int(events["allocated"] + events["freed"]), live, time.time_ns(), name)

    def _number(self) -> int:
        return torch.cuda.current_device() if self._device.index is None else self._device.index

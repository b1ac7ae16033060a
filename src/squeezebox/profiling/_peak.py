"""The highest sum of live allocations during a step, from the allocator's own events."""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, kw_only=True, slots=True)
class Peak:
    """Bytes above what lived when the meter started.

    ``activation_bytes`` leaves out the tensors named when the meter stopped (gradients, optimizer
    state), from their allocation on.
    """

    total_bytes: int
    activation_bytes: int


class PeakMeter:
    """Measures one step on the CPU with torch's profiler, on CUDA with the allocator's counters.

    Not to be nested in another profiler: :meth:`start` then answers False and measures nothing. The
    profiler greets on standard error whenever it starts; unless ``KINETO_LOG_LEVEL`` is set, the first
    start on a CPU sets it to 9 to keep it quiet.

    Only what goes through torch's allocator is seen: codecs' scratch in numpy is not, and neither are
    pages that the C library keeps after a free. A block that was allocated while no meter ran is not
    seen to be freed.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._profiler: Any = None
        self._end: weakref.finalize[..., Any] | None = None
        self._baseline = 0
        self._living: dict[int, int] = {}

    @property
    def running(self) -> bool:
        """Whether a measurement is under way."""
        return self._profiler is not None

    def start(self, living: Iterable[torch.Tensor] = ()) -> bool:
        """Begin; False if another profiler is active.

        ``living`` are tensors that may be freed meanwhile (the last step's gradients): the peak then
        counts them as freed.
        """
        if torch.autograd.profiler._is_profiler_enabled:
            return False
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
            self._baseline = torch.cuda.memory_allocated(self._device)
            self._profiler = "cuda"
            return True
        os.environ.setdefault("KINETO_LOG_LEVEL", "9")  # there is no other switch
        storages = (tensor.untyped_storage() for tensor in living)
        self._living = {storage.data_ptr(): storage.nbytes() for storage in storages}
        self._profiler = torch.autograd.profiler.profile(profile_memory=True, use_kineto=True)
        self._profiler.__enter__()
        # A profiler still on when the interpreter ends would crash it.
        self._end = weakref.finalize(self, self._profiler.__exit__, None, None, None)
        return True

    def abandon(self) -> None:
        """End a running measurement without reading it."""
        self._profiler = None
        if self._end is not None:
            self._end()

    def stop(self, apart: Iterable[torch.Tensor]) -> Peak:
        """End, and read the peak; ``apart`` are the tensors that activation_bytes leaves out."""
        profiler, self._profiler = self._profiler, None
        if self._device.type == "cuda":
            total = torch.cuda.max_memory_allocated(self._device) - self._baseline
            return Peak(total_bytes=total, activation_bytes=total)
        if self._end is not None:
            self._end()
        addresses = {tensor.untyped_storage().data_ptr() for tensor in apart}
        return _integrate(_allocations(profiler), self._living, addresses)


def events_of(profiler: Any) -> Iterator[tuple[str, int, int]]:
    """(name, address, signed bytes) in order of time; only allocations have an address and bytes."""
    events: list[tuple[int, str, int, int]] = []
    stack = list(profiler.kineto_results.experimental_event_tree())
    while stack:
        event = stack.pop()
        stack.extend(event.children)
        if event.tag == torch._C._profiler._EventType.Allocation:
            fields = event.extra_fields
            events.append((event.start_time_ns, "", fields.ptr, fields.alloc_size))
        else:
            events.append((event.start_time_ns, event.name, 0, 0))
    for _, *event in sorted(events, key=lambda event: event[0]):
        yield tuple(event)


def _allocations(profiler: Any) -> Iterator[tuple[int, int]]:
    """(address, signed bytes) in order of time."""
    return ((address, nbytes) for _, address, nbytes in events_of(profiler) if nbytes)


def _integrate(allocations: Iterable[tuple[int, int]], living: dict[int, int], apart: set[int]) -> Peak:
    """Follow the events; frees of addresses nobody told of are none of this step's business."""
    events = list(allocations)
    last = {address: number for number, (address, nbytes) in enumerate(events) if nbytes > 0}
    excluded = {last[address] for address in apart if address in last}
    before = dict(living)
    now: dict[int, tuple[int, int]] = {}  # address -> bytes, of which activations
    total = activations = highest = highest_activations = 0
    for number, (address, nbytes) in enumerate(events):
        if nbytes > 0:
            freed, of_them = now.pop(address, (0, 0))  # where no profiler saw it
            total, activations = total - freed, activations - of_them
            now[address] = (nbytes, 0 if number in excluded else nbytes)
            total, activations = total + nbytes, activations + now[address][1]
        elif address in now:
            freed, of_them = now.pop(address)
            total, activations = total - freed, activations - of_them
        else:
            total -= before.pop(address, 0)
        highest, highest_activations = max(highest, total), max(highest_activations, activations)
    return Peak(total_bytes=highest, activation_bytes=highest_activations)

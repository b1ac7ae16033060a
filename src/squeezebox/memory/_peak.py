"""The highest sum of live allocations during a step, from the allocator's own events."""

from __future__ import annotations

import contextlib
import gc
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from squeezebox.memory._history import History
from squeezebox.memory._staging import is_capturing


@dataclass(frozen=True, kw_only=True, slots=True)
class Peak:
    """Bytes above what lived when the meter started; of that, only what :meth:`PeakMeter.given` names counts.

    ``activation_bytes`` leaves out the tensors named when the meter stopped (gradients, optimizer
    state), from their allocation on. ``split_bytes`` lay idle in parts of a device allocator's blocks, at
    most: what is left over between tensors of other sizes. ``left_bytes`` still live when the meter stops.
    """

    total_bytes: int
    activation_bytes: int
    left_bytes: int
    split_bytes: int | None = None


@dataclass(eq=False, slots=True)
class Operator:
    """One that ran: the shapes of its tensors, and how many changes of memory were before and by its end."""

    name: str
    shapes: tuple[tuple[int, ...], ...]
    begun: int = 0
    ended: int = 0


@dataclass(frozen=True, slots=True)
class Ran:
    """The operators of a recording in order of time, and the bytes that lived after each change of memory."""

    operators: list[Operator]
    live_bytes: list[int]

    def most(self, first: int, last: int) -> int:
        """The most bytes that lived from after change ``first`` to after change ``last``."""
        return max(self.live_bytes[first : last + 1])

    def freed(self, number: int) -> int:
        """The last of the frees that follow a change at once, or that change."""
        while number + 1 < len(self.live_bytes) and self.live_bytes[number + 1] < self.live_bytes[number]:
            number += 1
        return number


class _Profiler(torch.autograd.profiler.profile):
    """Torch's profiler without its events of operators, which are many times as many as those of memory.

    ``scope`` is what else it sees. Messages between ranks are USER_SCOPE, as ``record_function`` is; those
    that end after the profiler would write to what it has freed.
    """

    def __init__(self, scope: Any, *, record_shapes: bool = False) -> None:
        super().__init__(profile_memory=True, use_kineto=True, record_shapes=record_shapes)
        self._scope = scope

    def _start_trace(self) -> None:
        torch.autograd.profiler._run_on_profiler_start()
        self.profiling_start_time_ns = time.perf_counter_ns()
        profiler: Any = torch._C._autograd  # whose stub does not know of scopes
        config = super().config(create_trace_id=False)  # type: ignore[no-untyped-call]
        profiler._enable_profiler(config, self.kineto_activities, {self._scope})


_switching = threading.RLock()  # a recording may be collected while another one begins


def _end(profiler: _Profiler) -> None:
    with _switching:
        profiler.__exit__(None, None, None)  # type: ignore[no-untyped-call]


_left: dict[int, Recording] = {}  # by thread: those that another thread could not end


def _end_left() -> None:
    """End those of this thread, and of threads that are gone."""
    for thread in [*_left]:
        if thread == threading.get_ident() or not _is_alive(thread):
            _left.pop(thread).close()


def _is_alive(thread: int) -> bool:
    return any(each.ident == thread for each in threading.enumerate())


def _is_profiled() -> bool:
    """Whether a profiler is on, other than one that was left."""
    _end_left()
    return torch.autograd.profiler._is_profiler_enabled


class Recording:
    """Allocations and frees on one device from :meth:`start` to :meth:`close`, and marks between them.

    Those of a CPU are seen by torch's profiler, those of a CUDA device in its allocator's history. Without
    ``marks`` no :meth:`mark` is made; messages between ranks may be under way then. With ``operators`` it
    sees these instead, for :meth:`operators`.

    The profiler greets on standard error whenever it starts; unless ``KINETO_LOG_LEVEL`` is set, the first
    start sets it to 9 to keep it quiet.
    """

    def __init__(self, device: torch.device, *, marks: bool = True, operators: bool = False) -> None:
        scopes = torch._C._profiler.RecordScope
        self._scope = scopes.USER_SCOPE if marks else scopes.LITE_INTERPRETER  # which nothing here has
        if operators:
            self._scope = scopes.FUNCTION
        self._operators = operators
        self._device = device
        self._history = None if device.type == "cpu" else History(device)
        self._profiler: Any = None
        self._end: weakref.finalize[..., Any] | None = None
        self._thread = 0

    @property
    def is_elsewhere(self) -> bool:
        """Whether another thread than this began it: torch's profiler is that thread's own."""
        return self._profiler is not None and self._thread != threading.get_ident()

    def start(self) -> bool:
        """Begin; False if another profiler is active, or a device's history is recorded already."""
        if _is_profiled():
            return False
        if self._history is not None:
            if not self._operators:
                _free_workspaces(self._device)
            if not self._history.start():
                return False
            if not self._operators:
                _take_workspaces(self._device)
                return True
        os.environ.setdefault("KINETO_LOG_LEVEL", "9")  # there is no other switch
        profiler = _Profiler(self._scope, record_shapes=self._operators)
        with _switching:
            if _is_profiled():  # another thread was first
                return False
            profiler.__enter__()  # type: ignore[no-untyped-call]
        self._profiler, self._thread = profiler, threading.get_ident()
        # A profiler still on when the interpreter ends would crash it.
        self._end = weakref.finalize(self, _end, profiler)
        return True

    def mark(self, name: str) -> None:
        """Put a name between the events so far and those to come."""
        if self._history is not None:
            self._history.mark(name)
            return
        with torch.autograd.profiler.record_function(name):
            pass

    def close(self) -> None:
        """End, or have the thread that began it end it at its next start; safe to call twice."""
        if self._history is not None:
            self._history.close()
        if self._end is not None and self._end.alive and self.is_elsewhere and _is_alive(self._thread):
            _left[self._thread] = self
        elif self._end is not None:
            self._end()

    def events(self) -> list[tuple[str, int, int]]:
        """End, and give (name, address, signed bytes) in order of time; allocations have no name."""
        return [event[1:] for event in self.timed_events()]

    def timed_events(self) -> list[tuple[int, str, int, int]]:
        """The same, each after its nanoseconds on one clock."""
        self.close()
        if self._history is not None:
            return self._history.events()
        found: list[tuple[int, str, int, int]] = []
        alone = not torch.accelerator.is_available()  # reading a field takes up to a microsecond
        stack = list(self._profiler.kineto_results.experimental_event_tree())
        with _uncollected():
            while stack:
                event = stack.pop()
                stack.extend(event.children)
                fields = event.extra_fields
                if type(fields) is torch._C._profiler._ExtraFields_Allocation:
                    if alone or fields.device.type == "cpu":
                        found.append((event.start_time_ns, "", fields.ptr, fields.alloc_size))
                else:
                    found.append((event.start_time_ns, event.name, 0, 0))
        found.sort(key=lambda event: event[0])
        return found

    def operators(self) -> Ran:
        """End, and give the operators that ran."""
        self.close()
        found = list[tuple[int, int, Any]]()
        if self._history is not None:
            found = [(when, 1, nbytes) for when, _, _, nbytes in self._history.events()]
        stack = list(self._profiler.kineto_results.experimental_event_tree())
        while stack:
            event = stack.pop()
            stack.extend(event.children)
            fields = event.extra_fields
            if type(fields) is torch._C._profiler._ExtraFields_Allocation:
                if self._history is None and fields.device.type == "cpu":
                    found.append((event.start_time_ns, 1, fields.alloc_size))
            elif type(fields) is torch._C._profiler._ExtraFields_TorchOp:
                inputs: Any = fields.inputs
                shapes = tuple(tuple(each.sizes) for each in inputs if hasattr(each, "sizes"))
                ran = Operator(event.name, shapes)
                found += [(event.start_time_ns, 0, ran), (event.end_time_ns, 2, ran)]
        return _ran(sorted(found, key=lambda each: each[:2]))


def _ran(changes: Iterable[tuple[int, int, Any]]) -> Ran:
    """By when operators begin (0), bytes change (1), and operators end (2)."""
    found = Ran([], [0])
    for _, kind, change in changes:
        if kind == 1:
            found.live_bytes.append(found.live_bytes[-1] + change)
        elif kind == 0:
            change.begun = len(found.live_bytes) - 1
            found.operators.append(change)
        else:
            change.ended = len(found.live_bytes) - 1
    return found


@contextlib.contextmanager
def _uncollected() -> Iterator[None]:
    """Many objects are made that all stay: looking for garbage among them would take as long again."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def _free_workspaces(device: torch.device) -> None:
    """Have cuBLAS give its workspaces back: it keeps them from the first product on.

    Not while a graph is captured, which goes on using them.
    """
    if device.type == "cuda" and not is_capturing(device):
        torch._C._cuda_clearCublasWorkspaces()


def _take_workspaces(device: torch.device) -> None:
    """Have it take them again, for the threads of forward and of backward, before the step does."""
    if device.type == "cuda" and not is_capturing(device):
        with torch.enable_grad(), torch._C.DisableTorchFunction():  # a session may watch already
            one = torch.ones(1, 1, device=device, requires_grad=True)
            torch.autograd.grad(_Square.apply(one), one)  # type: ignore[no-untyped-call]


class _Square(torch.autograd.Function):
    """A product in each thread, of which nothing is saved."""

    @staticmethod
    def forward(ctx: Any, one: torch.Tensor) -> torch.Tensor:
        return one @ one

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient @ gradient


class PeakMeter:
    """Measures one step on the CPU with torch's profiler, on CUDA with the allocator's counters.

    On CUDA the workspaces that cuBLAS keeps between steps belong to the step.

    Not to be nested in another profiler: :meth:`start` then answers False and measures nothing.

    Only what goes through torch's allocator is seen: codecs' scratch in numpy is not, and neither are
    pages that the C library keeps after a free. A block that was allocated while no meter ran is not
    seen to be freed.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._recording: Recording | None = None
        self._on_device = False
        self._baseline = self._begun = 0  # bytes before the workspaces are taken again, and after
        self._living: dict[int, int] = {}
        self._given: dict[int, int] = {}

    @property
    def running(self) -> bool:
        """Whether a measurement is under way."""
        return self._recording is not None or self._on_device

    def start(self, living: Iterable[torch.Tensor] = ()) -> bool:
        """Begin; False if another profiler is active.

        ``living`` are tensors that may be freed meanwhile (the last step's gradients): the peak then
        counts them as freed.
        """
        if _is_profiled():
            return False
        self._given = {}
        if self._device.type == "cuda":
            _free_workspaces(self._device)
            self._baseline = torch.cuda.memory_allocated(self._device)
            _take_workspaces(self._device)
            torch.cuda.reset_peak_memory_stats(self._device)
            self._begun = torch.cuda.memory_allocated(self._device)
            self._on_device = True
            return True
        recording = Recording(self._device, marks=False)
        if not recording.start():
            return False
        self._recording = recording
        storages = (tensor.untyped_storage() for tensor in living)
        self._living = {storage.data_ptr(): storage.nbytes() for storage in storages}
        return True

    def given(self, tensors: Iterable[torch.Tensor]) -> None:
        """Name tensors that the step works on; those that lived when the meter started count.

        Of a view of something larger, that is the view.
        """
        sizes: dict[int, int] = {}
        for tensor in tensors:
            storage = tensor.untyped_storage()
            sizes[storage.data_ptr()] = min(
                storage.nbytes(), sizes.get(storage.data_ptr(), 0) + tensor.numel() * tensor.element_size()
            )
        if self._on_device:  # its counters know no addresses
            # What is larger than all that came since must have been there before.
            since = torch.cuda.memory_allocated(self._device) - self._begun
            sizes = {address: nbytes for address, nbytes in sizes.items() if nbytes > since}
        for address, nbytes in sizes.items():
            self._given[address] = max(nbytes, self._given.get(address, 0))

    def abandon(self) -> None:
        """End a running measurement without reading it."""
        recording, self._recording, self._on_device = self._recording, None, False
        if recording is not None:
            recording.close()
        _end_left()

    def end(self, apart: Callable[[], Iterable[torch.Tensor]]) -> Peak | None:
        """As :meth:`stop`; None where nothing is measured, or on another thread, which is abandoned then."""
        if self._recording is not None and self._recording.is_elsewhere:
            self.abandon()
        return self.stop(apart()) if self.running else None

    def stop(self, apart: Iterable[torch.Tensor]) -> Peak:
        """End, and read the peak; ``apart`` are the tensors that activation_bytes leaves out."""
        recording, self._recording, self._on_device = self._recording, None, False
        if recording is None:
            total = torch.cuda.max_memory_allocated(self._device) - self._baseline
            left = torch.cuda.memory_allocated(self._device) - self._baseline
            split = torch.cuda.memory_stats(self._device).get("inactive_split_bytes.all.peak")
            return Peak(
                total_bytes=total + sum(self._given.values()),
                activation_bytes=total,
                left_bytes=left,
                split_bytes=split,
            )
        addresses = {tensor.untyped_storage().data_ptr() for tensor in apart}
        allocations = [(address, nbytes) for _, address, nbytes in recording.events() if nbytes]
        made = {address for address, nbytes in allocations if nbytes > 0}
        given = sum(nbytes for address, nbytes in self._given.items() if address not in made)
        peak = _integrate(allocations, self._living, addresses)
        return replace(peak, total_bytes=peak.total_bytes + given)


def _integrate(allocations: Iterable[tuple[int, int]], living: dict[int, int], apart: set[int]) -> Peak:
    """Follow the events; a free of an address that no event allocated is not this step's."""
    events = list(allocations)
    last = {address: number for number, (address, nbytes) in enumerate(events) if nbytes > 0}
    # An address may be used several times; ``apart`` means the last tensor there.
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
    return Peak(total_bytes=highest, activation_bytes=highest_activations, left_bytes=total)

"""Training steps taken down operator by operator: what each reads, writes and makes."""

from __future__ import annotations

import contextlib
import gc
import sys
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from squeezebox.profiling._redundancy_events import Event, Life, StepEvents, Trait, View
from squeezebox.profiling._redundancy_operators import OperatorFacts, facts_of, tensors_in, waited_bytes
from squeezebox.profiling._redundancy_places import Origin, Places

_LEAVING = {
    torch.Tensor.numpy,
    torch.Tensor.tolist,
    torch.Tensor.data_ptr,
    torch.Tensor.untyped_storage,
    torch.Tensor.storage,
    torch.Tensor.__array__,
    torch.Tensor.__dlpack__,
}
_TO_HOST = {torch.Tensor.tolist, torch.Tensor.cpu}  # numpy() wants cpu() before


def record_redundancy(
    step: Callable[[], object], *, device: torch.device, steps: int = 2, as_device: bool = False
) -> StepEvents:
    """Run ``step`` for ``steps`` steps, and record what its operators do.

    In the first step each operator is timed until the device is done with it; in later ones the device is
    not waited for, so that their syncs take as long as they do in training. Compiled functions run as they
    would uncompiled, since their kernels do not go through torch's dispatcher.

    Args:
        step: one training step.
        device: on which it computes.
        steps: from 1.
        as_device: take every tensor's move to the host for one from a device.
    """
    recorder = _Recorder(device, as_device)
    with recorder.recording(), _uncompiled(), _collecting_quickly():
        for number in range(steps):
            recorder.step = number
            result = step()
            gc.collect()  # what only cycles hold is gone
            recorder.end_step()
            del result
    return recorder.record


@contextlib.contextmanager
def _uncompiled() -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        if "torch._dynamo" in sys.modules:
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        yield


@contextlib.contextmanager
def _collecting_quickly() -> Iterator[None]:
    """Collecting looks at what was made since: a large program's heap takes seconds."""
    frozen = gc.get_freeze_count() > 0
    if not frozen:
        gc.freeze()
    try:
        yield
    finally:
        if not frozen:
            gc.unfreeze()


class _Recorder:
    """What both modes write down."""

    def __init__(self, device: torch.device, as_device: bool) -> None:
        self.record = StepEvents(device=device)
        self.step = 0
        self._as_device = as_device
        self._time = 0
        self._busy = False
        self._numbers: dict[int, int] = {}  # of living storages, by what torch holds for them
        self._ends: list[Any] = []
        self._places = Places()

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        try:
            with self._places, _Leaving(self), _Dispatched(self):
                yield
        finally:
            for end in self._ends:
                end.detach()

    def end_step(self) -> None:
        """What is still there is kept by the user."""
        self._time += 1
        self.record.ends.append(self._time)
        with self._working():
            for module in self._places.modules.known:
                for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
                    view = self._view(tensor)
                    if view is not None:
                        self.record.lives[view.storage].owned = True

    def left(self, func: Any, tensor: torch.Tensor) -> None:
        """Something beyond torch's dispatcher got hold of the tensor."""
        if self._busy:
            return
        with self._working():
            view = self._view(tensor)
            if view is None:
                return
            if func in _LEAVING:
                self.record.lives[view.storage].escaped = True
            if func in _TO_HOST and self._as_device and tensor.device.type == "cpu":
                self._time += 1
                event = self._event(f"Tensor.{func.__name__}", Trait.EFFECT, self._places.origin())
                event.reads, event.waited_bytes = (view,), view.nbytes
                self.record.events.append(event)

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """One operator."""
        with self._working():
            facts = facts_of(func)
            origin = self._places.origin()
            event = self._event(str(func), facts.traits, origin)
            self._describe(event, facts, args, kwargs)
            event.waited_bytes = waited_bytes(
                facts, args, kwargs, self._as_device and not origin.of_optimizer
            )
            self._time += 1
            event.time = self._time
            self.record.events.append(event)
        waits = self.step == 0 and self.record.device.type == "cuda"
        began = _now(waits)
        try:
            out = func(*args, **kwargs)
        except BaseException:  # it may have written some of what it was to write
            event.traits = (event.traits | Trait.EFFECT | Trait.OPAQUE) & ~Trait.OVERWRITES
            event.reads += event.writes
            raise
        event.seconds = _now(waits) - began
        with self._working():
            self._returned(event, out)
        return out

    @contextlib.contextmanager
    def _working(self) -> Iterator[None]:
        """Its own look at tensors is not the step's."""
        self._busy = True
        try:
            yield
        finally:
            self._busy = False

    def _event(self, operator: str, traits: Trait, origin: Origin) -> Event:
        if origin.recomputed:
            traits |= Trait.RECOMPUTED
        if origin.own:
            traits |= Trait.OWN
        return Event(
            time=self._time,
            step=self.step,
            operator=operator,
            place=origin.place,
            phase=origin.phase,
            reads=(),
            writes=(),
            fresh=(),
            arguments=None,
            traits=traits,
        )

    def _describe(
        self, event: Event, facts: OperatorFacts, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        event.arguments = facts.arguments(args, kwargs)
        if facts.is_literal:
            return  # its storage begins here
        written, only_written = facts.written_by(args), Trait.OVERWRITES in event.traits
        given = [*enumerate(args), *kwargs.items()]
        event.writes = self._views(event, (value for key, value in given if key in written))
        event.reads = self._views(
            event, (value for key, value in given if not (only_written and key in written))
        )
        if torch.is_grad_enabled() and any(each.requires_grad for each in tensors_in((args, kwargs))):
            event.traits |= Trait.DIFFERENTIATED

    def _returned(self, event: Event, out: Any) -> None:
        results = list(tensors_in(out))
        others = sum(each is not None for each in tree_leaves(out)) - len(results)
        if others or not (results or event.writes):
            event.traits |= Trait.EFFECT
        new = [each for each in results if _storage_key(each) not in self._numbers]
        event.fresh = self._views(event, new)

    def _views(self, event: Event, values: Iterable[Any]) -> tuple[View, ...]:
        found = []
        for tensor in tensors_in(list(values)):
            view = self._view(tensor)
            if view is None:
                event.traits |= Trait.OPAQUE | Trait.EFFECT
            else:
                found.append(view)
        return tuple(found)

    def _view(self, tensor: torch.Tensor) -> View | None:
        if _storage_key(tensor) is None:
            return None
        storage = tensor.untyped_storage()
        number = self._numbers.get(storage._cdata)
        if number is None:
            number = self._numbers[storage._cdata] = len(self.record.lives)
            self.record.lives.append(Life(nbytes=storage.nbytes(), device=str(storage.device)))
            end = weakref.finalize(storage, self._died, storage._cdata)
            end.atexit = False
            self._ends.append(end)
        sizes, strides = tuple(tensor.shape), tensor.stride()
        return View(number, int(tensor.storage_offset()), sizes, strides, tensor.dtype)

    def _died(self, key: int) -> None:
        number = self._numbers.pop(key)
        self.record.lives[number].died = self._time


class _Dispatched(TorchDispatchMode):
    def __init__(self, recorder: _Recorder) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._recorder = recorder

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._recorder.run(func, args, kwargs or {})


class _Leaving(TorchFunctionMode):
    """Sees what the dispatcher does not: tensors that numpy, Python or an address get hold of."""

    def __init__(self, recorder: _Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _LEAVING or func in _TO_HOST:
            self._recorder.left(func, args[0])
        return func(*args, **(kwargs or {}))


def _storage_key(tensor: torch.Tensor) -> int | None:
    """What torch holds for the storage; None for what has none of its own."""
    if tensor.layout is not torch.strided or type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        return None
    return int(tensor.untyped_storage()._cdata)


def _now(waits: bool) -> float:
    if waits:
        torch.cuda.synchronize()
    return time.perf_counter()

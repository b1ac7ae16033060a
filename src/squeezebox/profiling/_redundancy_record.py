"""Training steps taken down operator by operator: what each reads, writes and makes, and whose line it is."""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import sysconfig
import threading
import time
import weakref
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from squeezebox.profiling._record import Modules
from squeezebox.profiling._redundancy_events import (
    Event,
    Life,
    OperatorFacts,
    Place,
    StepEvents,
    Trait,
    View,
    facts_of,
    tensors_in,
    waited_bytes,
)

_TORCH = os.path.join(os.path.dirname(torch.__file__), "")
_OWN = os.path.join(os.path.dirname(os.path.dirname(__file__)), "")
_STANDARD = sysconfig.get_path("stdlib")
_INSTALLED = (sysconfig.get_path("purelib"), sysconfig.get_path("platlib"))
_RECORDER = os.path.join(_OWN, "profiling", "_redundancy")
_CHECKPOINT = os.path.join(_TORCH, "utils", "checkpoint.py")
_OPTIMIZERS = os.path.join(_TORCH, "optim", "")


class Origin(NamedTuple):
    """Where an operator comes from."""

    place: Place
    phase: str
    recomputed: bool
    own: bool
    of_optimizer: bool  # issued by torch.optim itself


class Places:
    """Finds origins while a step runs; enter it around the step."""

    def __init__(self) -> None:
        self.modules = Modules()
        self._thread = threading.get_ident()
        self._owners: dict[CodeType, str] = {}
        self._numbers: list[int] = []  # each above those of the autograd nodes made at its place
        self._places: list[Place] = []

    def __enter__(self) -> Places:
        self.modules.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self.modules.__exit__(*error)

    def origin(self) -> Origin:
        """Of the operator that is being dispatched."""
        backward = torch._C._current_graph_task_id() != -1
        found, seen, checkpoint = self._innermost(sys._getframe(1), backward)
        if backward and found is None:
            place = self._of_node() or self._caller()
        else:
            place = Place(*(found or ("<unknown>", 0, "")), self.modules.current())
            self._note(place)
        return Origin(
            place,
            "backward" if backward else "forward" if place.module else "",
            recomputed=backward and checkpoint,
            own=_OWN in seen,
            of_optimizer=_OPTIMIZERS in seen,
        )

    def _innermost(
        self, frame: FrameType | None, backward: bool
    ) -> tuple[tuple[str, int, str] | None, set[str], bool]:
        """The user's innermost line, whose frames lie within it, and whether checkpointing is under way.

        In backward only lines that autograd itself called count: of a function's own backward, or a hook.
        """
        found, seen, checkpoint = None, set[str](), False
        for each, owner in self._frames(frame):
            if backward and each.f_code.co_name == "_engine_run_backward":
                break
            checkpoint = checkpoint or each.f_code.co_filename == _CHECKPOINT
            if found is None and not owner:
                found = (each.f_code.co_filename, each.f_lineno, each.f_code.co_name)
            if found is not None and not backward:
                break
            seen.add(owner)
        return found, seen, checkpoint

    def _frames(self, frame: FrameType | None) -> Iterator[tuple[FrameType, str]]:
        while frame is not None:
            owner = self._owners.get(frame.f_code)
            if owner is None:
                owner = self._owners[frame.f_code] = _owner(frame.f_code.co_filename)
            if owner != _RECORDER:
                yield frame, owner
            frame = frame.f_back

    def _of_node(self) -> Place | None:
        """Of the forward that made the node whose backward runs."""
        node: Any = torch._C._current_autograd_node()
        if node is None:
            return None
        at = bisect_right(self._numbers, node._sequence_nr())
        return self._places[at] if at < len(self._places) else None

    def _caller(self) -> Place:
        """Who called backward; a device's nodes run in a thread that has no such line."""
        frame = sys._current_frames().get(self._thread)
        for each, owner in self._frames(frame):
            if not owner:
                return Place(each.f_code.co_filename, each.f_lineno, each.f_code.co_name, "")
        return Place("<unknown>", 0, "", "")

    def _note(self, place: Place) -> None:
        """Autograd's nodes made for this operator have numbers below the next one."""
        number = torch._C._autograd._get_sequence_nr()
        if not self._numbers or number > self._numbers[-1]:
            self._numbers.append(number)
            self._places.append(place)


def _owner(file: str) -> str:
    """Whose file it is; "" for a user's."""
    for known in (_RECORDER, _OWN, _OPTIMIZERS, _TORCH):
        if file.startswith(known):
            return known
    if file.startswith(_STANDARD) and not file.startswith(_INSTALLED):
        return _STANDARD
    return file if file.startswith(("<eval_with_key", "<frozen")) else ""


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

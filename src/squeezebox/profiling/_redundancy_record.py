"""Training steps taken down operator by operator: what each reads, writes and makes."""

from __future__ import annotations

import contextlib
import functools
import gc
import hashlib
import sys
import time
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves

from squeezebox.profiling._redundancy_events import Event, Life, StepEvents, Trait, View
from squeezebox.profiling._redundancy_places import Origin, Places

_OVERWRITING = {
    "aten::zero_",
    "aten::fill_",
    "aten::copy_",
    "aten::_foreach_zero_",
    "aten::_foreach_copy_",
    "aten::normal_",
    "aten::uniform_",
}
_UNINITIALISED = {"aten::empty", "aten::empty_like", "aten::new_empty", "aten::empty_strided"}
_UNINITIALISED |= {"aten::new_empty_strided", "aten::empty_permuted"}
_REBINDING = {
    "aten::set_",
    "aten::resize_",
    "aten::resize_as_",
}  # the same tensor has another storage, or size
_LITERALS = {"aten::lift_fresh", "aten::lift_fresh_copy"}  # what torch.tensor() has made of Python's numbers
_MASKED = {"aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"}
_COPIES = {"aten::_to_copy", "aten::copy_"}
_NORMALISING = {"aten::native_batch_norm", "aten::cudnn_batch_norm", "aten::miopen_batch_norm"}
# Those write to running values, though their schemas do not say so, if argument _TRAINING says so.
_RUNNING: set[int | str] = {3, 4, "running_mean", "running_var"}
_TRAINING = 5
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
    """Run ``step`` so many times, and take down what its operators do.

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


class _Schema(NamedTuple):
    """Of one operator: which arguments it writes to, and what holds for every call."""

    name: str
    written: frozenset[int | str]  # positions and names
    traits: Trait


@functools.cache
def _schema(func: Any) -> _Schema:
    schema, name = func._schema, func._schema.name
    written = set(_RUNNING) if name in _NORMALISING else set[int | str]()
    overwrites = name in _OVERWRITING
    for position, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            written |= {position, argument.name}
            overwrites = overwrites or argument.kwarg_only
    traits = Trait.OVERWRITES if overwrites else Trait.NONE
    drawn = any("Generator" in str(argument.type) for argument in schema.arguments)
    if drawn or torch.Tag.nondeterministic_seeded in func.tags:
        traits |= Trait.RANDOM
    if {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape} & set(func.tags):
        traits |= Trait.EFFECT
    if func.namespace != "aten" or name in _REBINDING:
        traits |= Trait.OPAQUE | Trait.EFFECT
    if name in _UNINITIALISED:
        traits |= Trait.UNINITIALISED
    return _Schema(name, frozenset(written), traits)


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
            schema = _schema(func)
            origin = self._places.origin()
            event = self._event(str(func), schema.traits, origin)
            self._describe(event, schema, args, kwargs)
            event.waited_bytes = _waited(schema, args, kwargs, self._as_device and not origin.of_optimizer)
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

    def _describe(self, event: Event, schema: _Schema, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = [*enumerate(args), *kwargs.items()]
        if schema.name in _LITERALS:
            event.arguments = _digest(args[0])
            return
        evaluates = schema.name in _NORMALISING and not args[_TRAINING]
        written = frozenset[int | str]() if evaluates else schema.written
        event.writes = self._views(event, (value for key, value in given if key in written))
        only_written = Trait.OVERWRITES in event.traits
        event.reads = self._views(
            event, (value for key, value in given if not (only_written and key in written))
        )
        event.arguments = _comparable((args, kwargs))
        if torch.is_grad_enabled() and any(each.requires_grad for each in _tensors((args, kwargs))):
            event.traits |= Trait.DIFFERENTIATED

    def _returned(self, event: Event, out: Any) -> None:
        results = list(_tensors(out))
        others = sum(each is not None for each in tree_leaves(out)) - len(results)
        if others or not (results or event.writes):
            event.traits |= Trait.EFFECT
        new = [each for each in results if _storage_key(each) not in self._numbers]
        event.fresh = self._views(event, new)

    def _views(self, event: Event, values: Iterable[Any]) -> tuple[View, ...]:
        found = []
        for tensor in _tensors(list(values)):
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


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    return (leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor))


def _storage_key(tensor: torch.Tensor) -> int | None:
    """What torch holds for the storage; None for what has none of its own."""
    if tensor.layout is not torch.strided or type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        return None
    return int(tensor.untyped_storage()._cdata)


def _comparable(values: Any) -> Hashable | None:
    """Equal for equal arguments, tensors and generators apart."""
    leaves, spec = tree_flatten(values)
    plain = tuple("tensor" if isinstance(leaf, torch.Tensor) else (type(leaf), leaf) for leaf in leaves)
    found = (str(spec), plain)
    try:
        hash(found)
    except TypeError:
        return None
    return found


def _digest(tensor: torch.Tensor) -> Hashable | None:
    if tensor.is_meta:
        return None
    plain = tensor.detach().contiguous().flatten().view(torch.uint8).cpu()
    return (tensor.shape, tensor.dtype, tensor.device, hashlib.blake2b(plain.numpy().tobytes()).digest())


def _waited(schema: _Schema, args: tuple[Any, ...], kwargs: dict[str, Any], as_device: bool) -> int | None:
    """Bytes that the host waits for; None if it does not."""
    tensors = list(_tensors((args, kwargs)))
    devices = {tensor.device.type for tensor in tensors} | _named_device(kwargs)
    if schema.name in _COPIES:
        waits = len(devices) > 1 and "cpu" in devices and not _is_non_blocking(args, kwargs)
        return tensors[-1].nbytes if waits else None
    if devices <= {"cpu"} and not as_device:
        return None
    if schema.name in _LITERALS:
        return tensors[0].nbytes if devices - {"cpu"} else None  # torch.tensor(..., device=...) has copied it
    if schema.name in _MASKED:
        masks = [each for each in tensors[1:] if each.dtype in (torch.bool, torch.uint8)]
        return 8 if masks else None
    if schema.name == "aten::_local_scalar_dense":
        return tensors[0].element_size()
    return 8 if Trait.EFFECT in schema.traits and Trait.OPAQUE not in schema.traits else None


def _named_device(kwargs: dict[str, Any]) -> set[str]:
    named = kwargs.get("device")
    return set() if named is None else {torch.device(named).type}


def _is_non_blocking(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return bool(kwargs.get("non_blocking", args[2] if len(args) > 2 else False))


def _now(waits: bool) -> float:
    if waits:
        torch.cuda.synchronize()
    return time.perf_counter()

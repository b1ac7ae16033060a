"""Constructing a model without memory: what its initialisers do is noted, and done again tensor by tensor."""

from __future__ import annotations

import contextlib
import mmap
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from squeezebox.schema import UnsupportedModelError

_NOWHERE = torch.device("meta")
_HOST = torch.device("cpu")
_EMPTY = torch.ops.aten.empty_strided.default
_ASKED = {  # and the answer of a tensor on the CPU
    getattr(Tensor, name).__get__: answer
    for name, answer in {"is_meta": False, "is_cpu": True, "device": _HOST}.items()
}
_READ = (Tensor.numpy, Tensor.__array__, Tensor.tolist)
_RESETS = ("reset_parameters", "_reset_parameters")


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a tensor lies in a storage, which has no memory yet."""

    storage: int
    dtype: torch.dtype
    shape: torch.Size
    strides: tuple[int, ...]
    offset: Any  # an int

    def within(self, storage: torch.UntypedStorage) -> Tensor:
        """The same place in memory."""
        empty = torch.empty(0, dtype=self.dtype, device=_HOST)
        return empty.set_(storage, self.offset, self.shape, self.strides)


@dataclass(frozen=True, slots=True)
class _Note:
    """An operator that was called: places stand for its tensors, ``made`` are results with a new storage.

    ``state`` is the generator's, if it draws random numbers.
    """

    function: torch._ops.OpOverload
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    reads: frozenset[int]
    made: tuple[tuple[int, _Place], ...]
    state: Tensor | None

    @property
    def is_empty(self) -> bool:
        """Whether it makes a tensor and gives it no values."""
        return "empty" in self.function.name()


class Construction(TorchDispatchMode):
    """A context in which a model of any size is constructed; its tensors take no memory.

    They are on the meta device. What initialises them is noted, and the runner does it again for those
    tensors that a rank holds. Values are to the bit those of an ordinary construction from the same seed,
    and random numbers drawn afterwards are too. It takes as long as that, and at most the memory of a few
    tensors like the model's largest one.

        with Construction() as construction:
            model = GPT()

    Operators count that run on the CPU. Where Python reads values (``tolist``, ``item``, ``if``), they are
    computed at once; numpy's arrays of them are read-only. Move the model, or change its dtype, inside of
    the context.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._storages: dict[int, tuple[int, torch.UntypedStorage]] = {}
        self._notes: list[_Note] = []
        self._written: dict[int, list[int]] = defaultdict(list)  # storages -> their notes
        self._constants: list[torch.UntypedStorage] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Note an operator, or run it on values."""
        options = dict(kwargs or {})
        tensors = _tensors((args, options))
        device = options.get("device")
        if func is torch.ops.aten.lift_fresh.default and tensors[0].device == _HOST:  # torch.tensor(...)
            return self._noted(torch.ops.aten.clone.default, (tensors[0].clone(),), {})
        makes = not tensors and "device" in options and device in (None, _HOST, _NOWHERE)
        if makes:
            return self._noted(func, args, options)
        if not any(map(self._knows, tensors)):
            self._forbid(_changed(func, args, options))
            return func(*args, **options)
        reads = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}.intersection(func.tags)
        real = [each for each in _changed(func, args, options) if not self._knows(each)]
        if reads or real or device not in (None, _NOWHERE):
            self._forbid(real)
            return func(*self._with_values(args), **self._with_values(options))
        return self._noted(func, args, options)

    def __enter__(self) -> Construction:
        self._asked = contextlib.ExitStack()
        self._asked.enter_context(_OnHost(self._knows, self.value))
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._asked.close()

    def fills(self, tensor: Tensor) -> bool:
        """Whether something in here has given a tensor values."""
        if not self._knows(tensor):
            return False
        notes = [self._notes[number] for number in self._written[self._place(tensor).storage]]
        return not all(note.is_empty for note in notes)

    def value(self, tensor: Tensor) -> Tensor:
        """The values that an ordinary construction would have given a tensor, on the CPU."""
        place = self._place(tensor)
        storages: dict[int, torch.UntypedStorage] = {}
        with torch.no_grad(), _disable_current_modes():  # numpy() and tolist() come here from within
            for number in self._needed(place.storage):
                _repeat(self._notes[number], storages)
            return place.within(storages[place.storage])

    def adopt(self, tensors: Iterable[Tensor]) -> None:
        """Take over tensors that were made on the meta device elsewhere."""
        for tensor in tensors:
            if tensor.device == _NOWHERE and not self._knows(tensor):
                self._written[self._place(tensor).storage].append(len(self._notes))
                args = tensor.shape, tensor.stride()
                options = {"dtype": tensor.dtype, "device": _HOST}
                made = ((0, self._place(tensor)),)
                self._notes.append(_Note(_EMPTY, args, options, frozenset(), made, None))

    def _knows(self, tensor: Tensor) -> bool:
        return tensor.layout is torch.strided and id(tensor.untyped_storage()) in self._storages

    def _place(self, tensor: Tensor) -> _Place:
        storage = tensor.untyped_storage()
        number, _ = self._storages.setdefault(id(storage), (len(self._storages), storage))
        return _Place(number, tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset())

    def _with_values(self, values: Any) -> Any:
        return pytree.tree_map_only(
            Tensor, lambda each: self.value(each) if self._knows(each) else each, values
        )

    def _noted(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run it without memory, and keep what it takes to run it again with."""
        state = self._advanced(function, args, kwargs)
        plain = {name: None if name == "generator" else value for name, value in kwargs.items()}
        if "device" in kwargs:
            plain["device"] = _NOWHERE
        result = function(*_nowhere(args), **_nowhere(plain))
        reads = {self._place(each).storage for each in _tensors((args, kwargs)) if self._knows(each)}
        self._constants += [
            each.untyped_storage() for each in _tensors((args, kwargs)) if not self._knows(each)
        ]
        made = tuple(
            (number, self._place(each))
            for number, each in enumerate(pytree.tree_leaves(result))
            if isinstance(each, Tensor) and not self._knows(each)
        )
        changed = [self._place(each).storage for each in _changed(function, args, kwargs)]
        if not made and not changed:
            return result  # a view
        if "device" in kwargs:
            plain |= {"device": _HOST, "dtype": result.dtype}  # the default may be another one by then
        places, named = self._places((args, plain))
        note = _Note(function, places, named, frozenset(reads), made, state)
        for storage in dict.fromkeys([*changed, *(place.storage for _, place in made)]):
            self._written[storage].append(len(self._notes))
        self._notes.append(note)
        return result

    def _places(self, values: Any) -> Any:
        return pytree.tree_map_only(
            Tensor, lambda each: self._place(each) if self._knows(each) else each, values
        )

    def _advanced(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
        """The state from which it draws random numbers, which are drawn."""
        if torch.Tag.nondeterministic_seeded not in function.tags:
            return None
        state = (kwargs.get("generator") or torch.default_generator).get_state()
        options = {**kwargs, "device": _HOST} if "device" in kwargs else kwargs
        function(*_zeros(args), **_zeros(options))
        return state

    def _needed(self, storage: int) -> list[int]:
        """The notes that make a storage's values, in order."""
        found, todo = set[int](), [(storage, len(self._notes))]
        while todo:
            which, end = todo.pop()
            for number in self._written[which]:
                if number < end and number not in found:
                    found.add(number)
                    todo += [(each, number) for each in self._notes[number].reads]
        return sorted(found)

    def _forbid(self, changed: Sequence[Tensor]) -> None:
        """Refuse to let values change that have been noted by reference."""
        for each in changed:
            if any(each.untyped_storage() is constant for constant in self._constants):
                raise UnsupportedModelError(
                    f"a tensor of shape {tuple(each.shape)} initialises the model and is then written into, "
                    "so what it began with is lost. Give the initialiser a clone() of it."
                )


class _OnHost(TorchFunctionMode):
    """Tensors without memory say that they are on the CPU, and give their values to numpy and to lists."""

    def __init__(self, knows: Callable[[Tensor], bool], value: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self._knows, self._value = knows, value

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _ASKED and self._knows(args[0]):
            return _ASKED[func]
        if func in _READ and self._knows(args[0]):
            found = func(self._value(args[0]), *args[1:], **(kwargs or {}))
            if isinstance(found, np.ndarray):
                found.flags.writeable = False  # what is written there would not reach the tensor
            return found
        return func(*args, **(kwargs or {}))


def reset(model: nn.Module) -> Construction:
    """What ``reset_parameters()`` of all modules does, of children first, to a model on the meta device."""
    construction = Construction()
    construction.adopt([*model.parameters(), *model.buffers()])

    def begin(module: nn.Module) -> None:
        for name in _RESETS:
            if hasattr(module, name):
                getattr(module, name)()
                return

    with construction:
        model.apply(begin)
    return construction


def _repeat(note: _Note, storages: dict[int, torch.UntypedStorage]) -> None:
    """Run an operator with memory; what it makes joins the storages."""
    args, kwargs = pytree.tree_map_only(
        _Place, lambda place: place.within(storages[place.storage]), (note.args, note.kwargs)
    )
    if note.is_empty:
        ((_, place),) = note.made
        results = [_memory(place.shape, place.strides, place.dtype)]
    else:
        with _random_state(note.state):
            results = pytree.tree_leaves(note.function(*args, **kwargs))
    for number, place in note.made:
        made = results[number]
        if (made.stride(), made.storage_offset()) != (place.strides, place.offset):
            values, made = made, _EMPTY(place.shape, place.strides, dtype=place.dtype)
            made.copy_(values)
        storages[place.storage] = made.untyped_storage()


@contextlib.contextmanager
def _random_state(state: Tensor | None) -> Iterator[None]:
    """A context with this state of the host's generator, which is afterwards as before."""
    before = torch.get_rng_state()
    if state is not None:
        torch.set_rng_state(state)
    try:
        yield
    finally:
        torch.set_rng_state(before)


def _tensors(values: Any) -> list[Tensor]:
    return [each for each in pytree.tree_leaves(values) if isinstance(each, Tensor)]


def _nowhere(values: Any) -> Any:
    return pytree.tree_map_only(Tensor, lambda each: each.to(_NOWHERE), values)


def _zeros(values: Any) -> Any:
    return pytree.tree_map_only(Tensor, lambda each: _memory(each.shape, each.stride(), each.dtype), values)


def _memory(shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Zeros in pages of their own. Malloc would keep many a MiB that is given back.

    They have these strides: how many random numbers an operator draws may follow from them.
    """
    extent = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True) if size)
    pages = mmap.mmap(-1, extent * dtype.itemsize)
    return torch.frombuffer(pages, dtype=dtype).as_strided(shape, strides)


def _changed(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """The tensors that an operator writes into."""
    named = dict(zip((each.name for each in function._schema.arguments), args, strict=False)) | kwargs
    return [
        tensor
        for each in function._schema.arguments
        if each.alias_info is not None and each.alias_info.is_write
        for tensor in _tensors(named.get(each.name))
    ]

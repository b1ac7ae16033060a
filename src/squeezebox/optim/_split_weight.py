"""Parameters as the bfloat16 weight that autocast reads, and the 16 bits that it leaves over."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_leaves, tree_map

from squeezebox.memory import (
    CHUNK_BYTES,
    FileTensor,
    StoredTensor,
    TensorFile,
    flat_in_memory,
    is_view,
    movable_weights,
)
from squeezebox.schema import AttachError, CaptureError

_SIZE = CHUNK_BYTES // 4  # elements of a piece


class Halves:
    """Float32 elements in two tensors of 16 bits each, from which they come back to the bit.

    ``code`` is the nearest bfloat16, as a cast makes it. The rest is how far the element's bits, as a number,
    are from those of ``code``. Where that is no signed number of 16 bits (half of the ties, one in 131,072 of
    random elements, and some NaN) the element itself is kept besides.

    Args:
        like: dense; its shape and layout are taken. There are no elements before :meth:`store`.
        file: for the rest; memory without one.
    """

    def __init__(self, like: torch.Tensor, file: TensorFile | None = None) -> None:
        self.code = torch.empty_strided(like.shape, like.stride(), dtype=torch.bfloat16, device="cpu")
        rest = self.code.view(torch.int16)
        self._rest = torch.empty_like(rest) if file is None else FileTensor(rest, file)
        self._besides: dict[int, tuple[torch.Tensor | None, torch.Tensor]] = {}  # by a piece's start
        self._whole: torch.Tensor | None = None

    def parts(self) -> Iterable[torch.Tensor]:
        """What is in memory of it."""
        if self._whole is not None:
            return (self._whole,)
        rest = () if isinstance(self._rest, FileTensor) else (self._rest,)
        kept = (each for pair in self._besides.values() for each in pair if each is not None)
        return (self.code, *rest, *kept)

    @property
    def is_settled(self) -> bool:
        """Whether :meth:`settle` was called."""
        return self._whole is not None

    def cast(self) -> torch.Tensor:
        """The weight in bfloat16, in this memory: it stays as it is when the weight changes."""
        return self.code.detach() if self._whole is None else self._whole.bfloat16()

    def load(self) -> torch.Tensor:
        """The elements, in memory of their own until :meth:`settle`."""
        if self._whole is not None:
            return self._whole
        out = torch.empty_strided(self.code.shape, self.code.stride(), dtype=torch.float32, device="cpu")
        flat = _flat(out)
        for start, stop in pieces(len(flat)):
            self._restore(start, flat[start:stop])
        return out

    def store(self, value: torch.Tensor) -> None:
        """Take these elements, of the same shape and strides."""
        if self._whole is not None:
            if value is not self._whole:
                self._whole.copy_(value)
            return
        flat = _flat(value)
        with self.changing():
            for start, stop in pieces(len(flat)):
                self._split(start, flat[start:stop])

    def settle(self) -> torch.Tensor:
        """The elements are in float32 from now on, in the tensor returned."""
        self._whole = self.load()
        self.code = self._rest = self._whole.new_empty(0)
        self._besides.clear()
        return self._whole

    @contextlib.contextmanager
    def changing(self) -> Iterator[None]:
        """Around changes: a cast of before stays as it was for those that hold it, as if it were a copy."""
        if _holders(self.code) > _ALONE:
            self.code = self.code.clone()
        yield

    @contextlib.contextmanager
    def lent(self, start: int, stop: int) -> Iterator[torch.Tensor]:
        """One of the :func:`pieces` in float32, to be changed in place; within :meth:`changing`."""
        piece = torch.empty(stop - start, dtype=torch.float32, device="cpu")
        self._restore(start, piece)
        yield piece
        self._split(start, piece)

    def _restore(self, start: int, out: torch.Tensor) -> None:
        stop = start + len(out)
        out.copy_(_flat(self.code)[start:stop])
        with self._rest_lent(start, stop, changed=False) as rest:
            out.view(torch.int32).add_(rest)
        if start in self._besides:
            where, values = self._besides[start]
            if where is None:
                out.copy_(values)
            else:
                out[where] = values

    def _split(self, start: int, value: torch.Tensor) -> None:
        stop = start + len(value)
        code = _flat(self.code)[start:stop]
        beyond = code.copy_(value).float().view(torch.int32)
        torch.sub(value.view(torch.int32), beyond, out=beyond)
        with self._rest_lent(start, stop, changed=True) as rest:
            rest.copy_(beyond)
            wrong = np.flatnonzero(beyond.numpy() != rest.numpy())  # where torch is ten times as slow
        where = torch.from_numpy(wrong)
        self._besides.pop(start, None)
        if len(where) > len(value) // 8:  # an index takes twice an element
            self._besides[start] = None, value.clone()
        elif len(where):
            self._besides[start] = where, value[where]

    def _rest_lent(self, start: int, stop: int, *, changed: bool) -> AbstractContextManager[torch.Tensor]:
        if isinstance(self._rest, FileTensor):
            return self._rest.lent(start, stop, changed=changed, filled=not changed)
        return contextlib.nullcontext(_flat(self._rest)[start:stop])


def pieces(numel: int) -> Iterator[tuple[int, int]]:
    """Begin and end of the pieces that a tensor's elements are split in."""
    return ((start, min(start + _SIZE, numel)) for start in range(0, numel, _SIZE))


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.as_strided((tensor.numel(),), (1,))


def _holders(tensor: torch.Tensor) -> int:
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))


_ALONE = _holders(torch.empty(0))


class _Changes:
    """The version that tensors of one counter have if they were only changed as they should be."""

    def __init__(self) -> None:
        self.count = 0


class SplitWeight(StoredTensor):
    """A float32 tensor held as :class:`Halves`: autocast's cast is one of them, all others get float32.

    Args:
        like: its shape and layout are taken.
        halves: its elements.
        changes: of a tensor that it is to be the same as.
    """

    def __init__(self, like: torch.Tensor, halves: Halves, changes: _Changes | None = None) -> None:
        self.halves, self.changes = halves, _Changes() if changes is None else changes

    def parts(self) -> Iterable[torch.Tensor]:
        """What is in memory of the halves."""
        return self.halves.parts()

    def check(self) -> None:
        """CaptureError where elements were changed past the halves."""
        if self._version != self.changes.count and not self.halves.is_settled:
            raise CaptureError(
                "a weight was changed through a view, such as by weight[0].zero_(). This plan holds it as "
                "bfloat16 and a rest, which the change has not reached. Change the weight itself: "
                "weight.copy_(changed), under torch.no_grad()."
            )

    def load(self) -> torch.Tensor:
        """The elements, in memory of their own."""
        self.check()
        return self.halves.load()

    def store(self, value: torch.Tensor) -> None:
        """Take these elements; CaptureError for others than the weight's kind."""
        if value.shape != self.shape or value.dtype != self.dtype:
            raise CaptureError(
                f"a weight of shape {tuple(self.shape)} in {self.dtype} cannot become one of shape "
                f"{tuple(value.shape)} in {value.dtype} under this plan. Call detach() on the session first."
            )
        if value.stride() != self.stride():
            value = flat_in_memory(value, self).as_strided(self.shape, self.stride())
        self.halves.store(value)

    def lent(
        self, start: int, stop: int, *, changed: bool = True, filled: bool = True
    ) -> AbstractContextManager[torch.Tensor]:
        """One of the halves' pieces in float32, to be changed in place."""
        return self.halves.lent(start, stop)

    def updated(self) -> None:
        """The halves were changed."""
        torch._C._increment_version([self])
        self.changes.count = self._version

    data = property(lambda self: self.detach(), lambda self, value: self.store(value.detach()))

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        if id(self) not in memo:
            memo[id(self)] = self._copy()
        copied: torch.Tensor = memo[id(self)]
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._copy().__reduce_ex__(protocol)

    def _copy(self) -> torch.Tensor:
        value = self.load().clone()
        return torch.nn.Parameter(value, self.requires_grad) if hasattr(self, "_is_param") else value

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
        if getattr(func, "__name__", "") in _CASTS and isinstance(result, torch.Tensor):
            return result.clone() if result.dtype is torch.bfloat16 else result  # who may change it
        return result

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        first, kwargs = args[0] if args else None, kwargs or {}
        if isinstance(first, SplitWeight) and func is _CAST and kwargs == _TO_BFLOAT16:
            first.check()
            return first.halves.cast()
        if isinstance(first, SplitWeight) and func in _SAME:
            with torch.inference_mode(False):  # it has the weight's count of changes
                return SplitWeight(first, first.halves, first.changes)
        if is_view(func):
            return func(*tree_map(_loaded, args), **tree_map(_loaded, dict(kwargs)))
        result = super().__torch_dispatch__(func, types, args, kwargs)
        for each in changed(func, args, kwargs):
            if "foreach" in func.__name__:  # of which autograd counts each tensor's own operator
                each.updated()
            else:
                each.changes.count = each._version + 1  # as soon as autograd has it back
        return result


def changed(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[SplitWeight]:
    """Those that an operator works on in place."""
    return [
        each
        for number, given in enumerate(func._schema.arguments)
        if given.alias_info is not None and given.alias_info.is_write
        for each in tree_leaves(args[number] if number < len(args) else kwargs.get(given.name))
        if isinstance(each, SplitWeight)
    ]


def _loaded(value: Any) -> Any:
    return value.load() if isinstance(value, SplitWeight) else value


_aten: Any = torch.ops.aten
_CAST, _TO_BFLOAT16 = _aten._to_copy.default, {"dtype": torch.bfloat16}
_SAME = (_aten.detach.default, _aten.alias.default)
_OWN = ("halves", "changes", "_is_param")
_CASTS = ("to", "bfloat16", "type", "type_as")


class SplitWeights:
    """Parameters that are :class:`SplitWeight` until :meth:`close`; they stay the same objects.

    Args:
        weights: by name; such as :func:`splittable` finds.
        file: in which the rest of those ``in_file`` is, by their identities.
    """

    def __init__(
        self,
        weights: Mapping[str, torch.nn.Parameter],
        file: TensorFile | None = None,
        in_file: Collection[int] = (),
    ) -> None:
        self._split: list[torch.nn.Parameter] = []
        torch.clear_autocast_cache()
        try:
            for name, weight in weights.items():
                halves = Halves(weight.data, file if id(weight) in in_file else None)
                halves.store(weight.data)
                made = torch.nn.Parameter(SplitWeight(weight.data, halves))
                made.__dict__.update(weight.__dict__)
                _exchange(name, weight, made)
                made.data = made.data.new_empty(0)  # a graph of before may hold it
                self._split.append(weight)
        except BaseException:
            self.close()
            raise

    def require_exchangeable(self) -> None:
        """AttachError where torch could not make one an ordinary parameter again."""
        weight: Any
        for weight in self._split:
            if weight._use_count() > 2 or weakref.getweakrefcount(weight):
                raise AttachError(
                    f"something else has hold of a weight of {tuple(weight.shape)} that this plan holds in "
                    "bfloat16 and a rest. Delete what refers to it, such as a weak reference or a loss whose "
                    "backward was never run, and call detach() again."
                )

    def close(self) -> None:
        """Every parameter is an ordinary one again."""
        torch.clear_autocast_cache()
        while self._split:
            weight: Any = self._split.pop()
            own = {key: each for key, each in weight.__dict__.items() if key not in _OWN}
            made = torch.nn.Parameter(weight.halves.settle(), weight.requires_grad)
            made.__dict__.update(own)
            _exchange("a weight", weight, made)


def splittable(model: torch.nn.Module, least_bytes: int) -> dict[str, torch.nn.Parameter]:
    """The model's trained parameters that can be split, by name, from ``least_bytes`` on.

    Left out are those with weak references, such as recurrent layers': torch exchanges no such tensor.
    """
    found = movable_weights(model, least_bytes, trained=True)
    return {
        name: each
        for name, each in found.items()
        if each.dtype is torch.float32 and not weakref.getweakrefcount(each)
    }


def _exchange(name: str, weight: torch.nn.Parameter, made: torch.nn.Parameter) -> None:
    """Have the parameter be what was made for it, with its own gradient and hooks."""
    made.grad, weight.grad = weight.grad, None
    try:
        torch.utils.swap_tensors(weight, made)
    except RuntimeError as error:
        weight.grad = made.grad
        raise AttachError(
            f"'{name}' cannot be held in bfloat16 and a rest, as this plan has it: {error} Delete what "
            "refers to it, such as a loss whose backward was never run, and attach again."
        ) from error
    for hooks in ("_backward_hooks", "_post_accumulate_grad_hooks"):
        setattr(weight, hooks, getattr(weight, hooks))  # torch calls those that were set on what it is now

"""Parameters whose cast to bfloat16 is there, and whose float32 elements come back when they are wanted."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from squeezebox.memory import StoredTensor, TensorFile, flat_in_memory, movable_weights
from squeezebox.optim._halves import Halves
from squeezebox.schema import AttachError, CaptureError


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

    data = property(
        lambda self: SplitWeight(self, self.halves), lambda self, value: self.store(value.detach())
    )

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
            return SplitWeight(first, first.halves, first.changes)
        if any(each.alias_info is not None and not each.alias_info.is_write for each in func._schema.returns):
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

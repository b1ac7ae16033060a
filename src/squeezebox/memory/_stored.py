"""Tensors whose elements are brought to memory whenever torch computes with them."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from squeezebox.memory._absent import Absent
from squeezebox.schema import CaptureError


class StoredTensor(Absent):
    """A tensor held elsewhere, or in another form: every operator loads it, one in place stores it again."""

    def load(self) -> torch.Tensor:
        """The elements, in memory of their own."""
        raise NotImplementedError

    def store(self, value: torch.Tensor) -> None:
        """Take these elements."""
        raise NotImplementedError

    def lent(
        self, start: int, stop: int, *, changed: bool = True, filled: bool = True
    ) -> AbstractContextManager[torch.Tensor]:
        """Flat elements, ``filled`` as they are, in memory for a while; they are stored if ``changed``."""
        raise NotImplementedError

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        return self.load()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.load().__reduce_ex__(protocol)

    def numpy(self, *, force: bool = False) -> Any:
        """A copy of the elements, which cannot be written to: that would not reach the file."""
        found = self.load().numpy(force=force)
        found.flags.writeable = False
        return found

    def _set_data(self, value: torch.Tensor) -> None:
        self.store(value)

    data = property(lambda self: self, _set_data)

    def tolist(self) -> Any:
        """The elements as Python's numbers."""
        return self.load().tolist()

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        first = args[0] if args else None
        if isinstance(first, (list, tuple)) and len(first) > 1 and "foreach" in func.__name__:
            return _one_by_one(func, args, kwargs or {})
        if isinstance(first, StoredTensor) and func in _DETACH:
            return first
        return _loaded(func, args, kwargs or {})


_DETACH = (torch.ops.aten.detach.default, torch.ops.aten.alias.default)


def flat_in_memory(value: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """All elements in the order that memory of ``like``'s strides has them in."""
    if value.stride() != like.stride():
        value = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype).copy_(value)
    return value.as_strided((like.numel(),), (1,))


def _one_by_one(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """An operator on lists, once for each of their members, so that no two are in memory at once."""
    count = len(args[0])

    def of(number: int, value: Any) -> Any:
        return (
            value[number : number + 1] if isinstance(value, (list, tuple)) and len(value) == count else value
        )

    found = [func(*(of(number, arg) for arg in args), **kwargs) for number in range(count)]
    return None if found[0] is None else [each for results in found for each in results]


def _loaded(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """The operator on the elements; those that it changes are stored again."""
    schema = func._schema
    if any(each.alias_info is not None and not each.alias_info.is_write for each in schema.returns):
        raise CaptureError(
            f"{func} would make a view of a tensor that is in a file or packed (optimizer state, a gradient "
            "or a weight, under a plan with states=True), and what is done to the view would not reach it. "
            "Take .clone() first."
        )
    there: dict[int, torch.Tensor] = {}

    def load(value: Any) -> Any:
        if isinstance(value, StoredTensor) and id(value) not in there:
            there[id(value)] = value.load()
        return there.get(id(value), value)

    result = func(*tree_map(load, args), **tree_map(load, dict(kwargs)))
    changed = [
        each
        for number, given in enumerate(schema.arguments)
        if given.alias_info is not None and given.alias_info.is_write
        for each in tree_leaves(args[number] if number < len(args) else kwargs.get(given.name))
        if isinstance(each, StoredTensor)
    ]
    for each in changed:
        each.store(there[id(each)])
    return changed[0] if changed and isinstance(result, torch.Tensor) else result

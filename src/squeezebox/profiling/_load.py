"""What routers choose, where that is assumed: on fake tensors, which have no scores, and on real ones."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
)
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    _get_current_dispatch_mode_stack,
)
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.weak import WeakIdKeyDictionary

from squeezebox.schema import OptionError

aten = torch.ops.aten
Function = TypeVar("Function", bound=Callable[..., Any])
_MOST_BYTES = 1 << 30  # of values that are followed, and of those of floating point
_MOST_FLOAT_BYTES = 1 << 26


class Load(NamedTuple):
    """How rows choose among things, such as tokens among experts.

    ``spread``: in turn. Else all rows choose the first ones; ``touched``: but for as many rows as the others
    need to be chosen once.
    """

    spread: bool
    touched: bool = False

    def chosen(self, like: torch.Tensor, dim: int, size: int) -> torch.Tensor:
        """Indices below ``size`` in the place of ``like``, different ones along ``dim``."""
        where = like.movedim(dim, -1) if like.dim() else like.reshape(1)
        count = where.shape[-1]
        rows = where.numel() // max(count, 1)
        row, choice = torch.arange(rows)[:, None], torch.arange(count)
        if self.spread:
            found = (row * count + choice) % size
        else:
            found = choice.repeat(rows, 1)
            others = min(size - count, rows) if self.touched else 0
            if others > 0:
                found[rows - others :, -1] = torch.arange(count, count + others)
        return found.view(where.shape).movedim(-1, dim) if like.dim() else found.view(())


LOADS = {
    "balanced": (Load(spread=True),),
    "worst": (Load(spread=False), Load(spread=False, touched=True)),
}


def loads_named(load: str) -> tuple[Load, ...]:
    """Those to try, of which the worst counts; OptionError where there is none of that name."""
    if load not in LOADS:
        raise OptionError(f"load {load!r} is neither 'balanced' nor 'worst'.")
    return LOADS[load]


class _Choice(NamedTuple):
    """An operator that chooses: the place of its dimension among the arguments, and which result tells."""

    dim: int | None
    output: int | None = 1
    usual: int = -1


_CHOICES = {
    aten.topk.default: _Choice(2),
    aten.sort.default: _Choice(1),
    aten.sort.stable: _Choice(2),
    aten.max.dim: _Choice(1),
    aten.min.dim: _Choice(1),
    aten.argmax.default: _Choice(1, None),
    aten.argmin.default: _Choice(1, None),
    aten.multinomial.default: _Choice(None, None),
}


def _chosen(load: Load, func: Any, args: Any, kwargs: Any, out: Any) -> tuple[int, Any, torch.Tensor] | None:
    """Along which dimension the operator chooses, the result that tells, and what that is to be."""
    rule = _CHOICES.get(func)
    if rule is None or not args[0].is_floating_point() or not args[0].dim():
        return None
    given, told = args[0], out if rule.output is None else out[rule.output]
    dim = args[rule.dim] if rule.dim is not None and len(args) > rule.dim else kwargs.get("dim", rule.usual)
    with _disable_current_modes():
        if dim is None:  # the one of all elements
            return 0, told, torch.zeros(told.shape, dtype=torch.int64)
        dim %= given.dim()
        like = torch.zeros(told.shape if told.dim() == given.dim() else _one_along(given.shape, dim))
        return dim, told, load.chosen(like, dim, given.shape[dim]).view(told.shape)


def _one_along(shape: torch.Size, dim: int) -> list[int]:
    return [*shape[:dim], 1, *shape[dim + 1 :]]


class _Routed(TorchDispatchMode):
    """Real tensors: what is chosen is replaced, and so are its values."""

    def __init__(self, load: Load) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._load = load

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        found = _chosen(self._load, func, args, kwargs or {}, out)
        if found is not None:
            dim, told, chosen = found
            told.copy_(chosen)
            if isinstance(out, tuple) and dim is not None:
                index = told if told.dim() == args[0].dim() else told.unsqueeze(dim)
                out[0].copy_(args[0].gather(dim, index).view(out[0].shape))
        return out


def routed(load: Load) -> AbstractContextManager[object]:
    """Within, routers choose by that load, whatever their scores.

    What ``topk``, ``sort``, ``max``, ``argmax`` and ``multinomial`` choose of floating-point scores is
    replaced.
    """
    return _Routed(load)


def at_balanced_load(function: Function) -> Function:
    """The function with an argument ``load``: where there is one, its steps are those of a balanced load.

    The function raises OptionError where there is no such load.
    """

    @functools.wraps(function)
    def wrapped(*args: Any, load: str | None = None, **kwargs: Any) -> Any:
        if load is None:
            return function(*args, **kwargs)
        loads_named(load)
        with routed(*loads_named("balanced")):
            return function(*args, load=load, **kwargs)

    return cast("Function", wrapped)


class Followed(TorchDispatchMode):
    """Fake tensors: what operators make of known values alone is computed, and so has its size.

    Known are integers that the caller has, what code fills in, and what a router chooses by ``load``. Enter
    it within the fake mode. ``assumed``: whether any router chose.
    """

    def __init__(self, load: Load) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._load = load
        self._known: Any = WeakIdKeyDictionary()  # storages with values, by those of fake tensors
        self.assumed = False

    def know(self, fake: torch.Tensor, value: torch.Tensor) -> None:
        """A fake tensor has these values, which change with it."""
        if not _is_small(fake):
            return
        with _disable_current_modes():
            held = value
            if value.stride() != fake.stride() or value.untyped_storage().nbytes() != _nbytes(fake):
                held = _like(fake).copy_(value)
            self._known[fake.untyped_storage()] = held.untyped_storage()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace != "aten":
            return func(*args, **kwargs)
        if func is aten._grouped_mm.default:
            return _grouped(*args, **kwargs)
        if func in _BY_MASK:
            func, args = self._by_index(func, args)
        changed = _changed(func, args, kwargs)
        values = self._values(func, args, kwargs)
        if values is not None:
            return self._computed(func, args, kwargs, values, is_new=not changed)
        for each in changed:
            self._known.pop(each.untyped_storage(), None)
        out = func(*args, **kwargs)
        if func is aten.lift_fresh.default and not isinstance(args[0], FakeTensor):
            self.know(out, _copied(args[0]))
        found = _chosen(self._load, func, args, kwargs, out)
        if found is not None:
            self.assumed = True
            self.know(found[1], found[2])
        return out

    def _values(self, func: Any, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        """The arguments with values; None where some have none, or the result has none or shares memory."""
        name = func._schema.name
        shares = any(each.alias_info is not None for each in func._schema.returns)
        is_random = torch.Tag.nondeterministic_seeded in func.tags and name not in _RANDOM
        if is_random or (shares and not _changed(func, args, kwargs)):
            return None
        if "empty" in name and torch.get_default_dtype() == kwargs.get("dtype", torch.get_default_dtype()):
            return None
        fills = name in _FILLED
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if not all((fills and _is_small(each)) or self._has(each) for each in tensors):
            return None
        with _disable_current_modes():
            found: tuple[Any, Any] = tree_map_only(torch.Tensor, self._value, (args, kwargs))
        return found[0], {name: _HOST if name == "device" else each for name, each in found[1].items()}

    def _computed(self, func: Any, args: Any, kwargs: Any, values: Any, *, is_new: bool) -> Any:
        """The operator's results, as large as its values say; it changes values where it is not new."""
        try:
            out = func(*args, **kwargs)
        except _SIZED_BY_VALUES:
            out = None
        if out is not None and not all(map(_is_small, _tensors(out))):
            return out
        with _disable_current_modes():
            made = func(*values[0], **values[1])
        if not is_new:
            return out
        if out is None:
            device = next((each.device for each in _tensors((args, kwargs))), _HOST)
            out = tree_map_only(torch.Tensor, lambda each: _like(each, device), made)
        for fake, value in zip(_tensors(out), _tensors(made), strict=True):
            self.know(fake, value)
        return out

    def _has(self, tensor: torch.Tensor) -> bool:
        if tensor.layout is not torch.strided:
            return False
        return not isinstance(tensor, FakeTensor) or tensor.untyped_storage() in self._known

    def _value(self, tensor: torch.Tensor) -> torch.Tensor:
        """Its values; of one that only says a shape, anything of that shape."""
        if not isinstance(tensor, FakeTensor):
            return tensor
        storage = self._known.get(tensor.untyped_storage())
        if storage is None:
            return _like(tensor)
        made = torch.empty(0, dtype=tensor.dtype)
        return made.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())

    def _by_index(self, func: Any, args: Any) -> tuple[Any, Any]:
        """The same call with the places that masks name, where these are known."""
        if func is aten.masked_select.default:
            func, args = aten.index.Tensor, (*torch.broadcast_tensors(args[0], args[1]),)
            args = (args[0], [args[1]])
        indices: list[torch.Tensor | None] = []
        for each in args[1]:
            if each is None or each.dtype not in (torch.bool, torch.uint8) or not self._has(each):
                indices.append(each)
                continue
            with _disable_current_modes():
                places = self._value(each).nonzero().unbind(1)
            for place in places:
                indices.append(_like(place, each.device))
        return func, (args[0], indices, *args[2:])


_HOST = torch.device("cpu")
_SIZED_BY_VALUES = (DataDependentOutputException, DynamicOutputShapeException)
_BY_MASK = (
    aten.masked_select.default,
    aten.index.Tensor,
    aten.index_put.default,
    aten.index_put_.default,
    aten._index_put_impl_.default,
)
_RANDOM = ("aten::randint", "aten::randperm")  # whose results no size should follow from, and may
_FILLED = tuple(
    f"aten::{name}" for name in "zeros_like ones_like full_like new_zeros new_ones new_full".split()
)


def _grouped(
    a: torch.Tensor, b: torch.Tensor, offs: Any = None, bias: Any = None, out_dtype: Any = None
) -> Any:
    """The result of a grouped product: its rows begin at multiples of 16 bytes."""
    if a.dim() == 2:
        shape = (a.shape[0], b.shape[2]) if b.dim() == 3 else (offs.shape[0], a.shape[0], b.shape[1])
    else:
        shape = (a.shape[0], a.shape[1], b.shape[2]) if b.dim() == 3 else (a.shape[1], b.shape[1])
    dtype = out_dtype or a.dtype
    unit = 16 // dtype.itemsize
    width = (shape[-1] + unit - 1) // unit * unit
    stride = (width, 1) if len(shape) == 2 else (shape[1] * width, width, 1)
    return a.new_empty_strided(shape, stride, dtype=dtype)


def _changed(func: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
    """Arguments that the operator writes to."""
    written = [
        args[place] if place < len(args) else kwargs.get(each.name)
        for place, each in enumerate(func._schema.arguments)
        if each.alias_info is not None and each.alias_info.is_write
    ]
    return _tensors(written)


def _like(tensor: torch.Tensor, device: torch.device = _HOST) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    with _disable_current_modes():
        return tensor.detach().cpu().clone()


def _nbytes(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().nbytes()


def _is_small(tensor: torch.Tensor) -> bool:
    return _nbytes(tensor) <= (_MOST_FLOAT_BYTES if tensor.is_floating_point() else _MOST_BYTES)


def _tensors(values: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]


def remembered(fake: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """The fake tensor, whose values are followed if they are integers and anybody follows."""
    for mode in _get_current_dispatch_mode_stack():
        if isinstance(mode, Followed) and not tensor.is_meta and not isinstance(tensor, FakeTensor):
            if not tensor.is_floating_point() and not tensor.is_complex():
                mode.know(fake, _copied(tensor))
    return fake

"""The rule that a linear layer's output waits for the cross-entropy that reads it."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.nn import functional

from squeezebox.rewriting._deferred import Deferred, Waiting, made
from squeezebox.rewriting._sliced_loss import sliced_cross_entropy

_CROSS_ENTROPY = inspect.signature(functional.cross_entropy)
_NLL = inspect.signature(functional.nll_loss)
_REDUCTIONS = ("mean", "sum", "none")


@dataclass(frozen=True, kw_only=True, slots=True)
class _Head:
    """``linear(x, weight, bias)`` with classes in another place, cast, or as logarithms of probabilities.

    ``x`` has its features last, and its other sizes in the order in which the result has them.
    """

    x: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    class_dim: int  # of the result, from 0
    product: torch.dtype
    dtype: torch.dtype  # of the result
    is_log: bool = False

    @property
    def is_last(self) -> bool:
        """Whether classes are the result's last dim."""
        return self.class_dim == self.x.dim() - 1

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the result."""
        sizes = list(self.x.shape[:-1])
        sizes.insert(self.class_dim, len(self.weight))
        return tuple(sizes)


class SlicedLoss:
    """Cross-entropy over a linear layer in slices of rows."""

    name = "sliced loss"
    exact = False
    says = "cross_entropy(linear(x)) a few rows at a time, without the whole output"
    functions = frozenset({functional.linear})

    def begin(self, func: Any, args: Any, kwargs: Any, note: Callable[[str], None]) -> Any:
        """Put a linear layer off if it could be a head."""
        x, weight, bias = _linear(*args, **kwargs)
        if not _may_be_head(x, weight, bias):
            return NotImplemented
        kind = x.device.type
        casts = torch.is_autocast_enabled(kind) and x.dtype is not torch.float64
        dtype = torch.get_autocast_dtype(kind) if casts else x.dtype
        head = _Head(x=x, weight=weight, bias=bias, class_dim=x.dim() - 1, product=dtype, dtype=dtype)
        return Deferred.of(Waiting(self, func, args, kwargs, head.shape, dtype, note, head))

    def read(self, call: Waiting, func: Any, args: Any, kwargs: Any) -> Any:
        """Views and casts wait as well; losses are computed in slices."""
        if func in (functional.cross_entropy, functional.nll_loss):
            return _loss(call, func, args, kwargs)
        if func not in _CHANGES or not isinstance(args[0], Deferred) or args[0].call is not call:
            return NotImplemented
        try:
            changed = _CHANGES[func](call.state, *args[1:], **kwargs)
        except (TypeError, RuntimeError):  # it was called in another way
            return NotImplemented
        if changed is None:
            return NotImplemented
        shape, dtype = changed.shape, changed.dtype
        return Deferred.of(Waiting(self, func, args, kwargs, shape, dtype, call.note, changed))


def _linear(
    input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    return input, weight, bias


def _may_be_head(x: Any, weight: Any, bias: Any) -> bool:
    """Whether that is a product of plain sizes."""
    given = (x, weight) if bias is None else (x, weight, bias)
    floating = all(isinstance(each, torch.Tensor) and each.is_floating_point() for each in given)
    plain = floating and not any(isinstance(each, Deferred) for each in given)
    if not plain or x.dim() < 2 or weight.dim() != 2 or weight.shape[1] != x.shape[-1]:
        return False
    fit = bias is None or bias.shape == weight.shape[:1]
    alike = len({each.device for each in given}) == 1
    casts = torch.is_autocast_enabled(x.device.type)
    return bool(fit and alike and len(weight) > 1 and (casts or len({each.dtype for each in given}) == 1))


def _viewed(head: _Head, *shape: Any) -> _Head | None:
    sizes: Sequence[Any] = shape[0] if len(shape) == 1 and isinstance(shape[0], (tuple, list)) else shape
    if not all(isinstance(size, int) for size in sizes):
        return None
    count = math.prod(head.shape)
    known = math.prod(size for size in sizes if size != -1)
    if sizes.count(-1) > 1 or not known or (-1 in sizes and count % known):
        return None
    return _reshaped(head, [count // known if size == -1 else size for size in sizes])


def _flattened(head: _Head, start_dim: int = 0, end_dim: int = -1) -> _Head | None:
    rank, shape = len(head.shape), head.shape
    if not (-rank <= start_dim < rank and -rank <= end_dim < rank):
        return None
    start, end = start_dim % rank, end_dim % rank
    if start > end:
        return None
    return _reshaped(head, [*shape[:start], math.prod(shape[start : end + 1]), *shape[end + 1 :]])


def _reshaped(head: _Head, sizes: Sequence[int]) -> _Head | None:
    """The same elements in other dims, where the last one still has the classes."""
    same = math.prod(sizes) == math.prod(head.shape)
    if not head.is_last or not same or not sizes or sizes[-1] != len(head.weight):
        return None
    x = head.x.reshape(*sizes[:-1], head.x.shape[-1])
    return replace(head, x=x, class_dim=len(sizes) - 1)


def _transposed(head: _Head, dim0: int, dim1: int) -> _Head | None:
    rank = len(head.shape)
    if not (-rank <= dim0 < rank and -rank <= dim1 < rank):
        return None
    order = list(range(rank))
    order[dim0], order[dim1] = order[dim1], order[dim0]
    return _turned(head, order)


def _permuted(head: _Head, *dims: Any) -> _Head | None:
    given = dims[0] if len(dims) == 1 and isinstance(dims[0], (tuple, list)) else dims
    rank = len(head.shape)
    order = [dim % rank for dim in given]
    return _turned(head, order) if sorted(order) == list(range(rank)) else None


def _turned(head: _Head, order: list[int]) -> _Head | None:
    """Dims in this order, if all but the classes keep theirs."""
    others = [dim for dim in order if dim != head.class_dim]
    return replace(head, class_dim=order.index(head.class_dim)) if others == sorted(others) else None


def _cast(dtype: torch.dtype) -> Callable[[_Head], _Head]:
    return lambda head: replace(head, dtype=dtype)


def _to(head: _Head, *args: Any, **kwargs: Any) -> _Head | None:
    """``.to(...)`` without a move."""
    parsed: Any = torch._C._nn._parse_to(*args, **kwargs)
    device, dtype, _, layout = parsed
    moves = device is not None and device not in (head.x.device, torch.device(head.x.device.type))
    if moves or layout is not None or not (dtype is None or dtype.is_floating_point):
        return None
    return head if dtype is None else replace(head, dtype=dtype)


def _as_log(head: _Head, dim: int, _stacklevel: int = 3, dtype: Any = None) -> _Head | None:
    rank = len(head.shape)
    if head.is_log or not -rank <= dim < rank or dim % rank != head.class_dim or dtype is not None:
        return None
    casts = torch.is_autocast_enabled(head.x.device.type)
    wide = torch.promote_types(head.dtype, torch.float32)
    return replace(head, is_log=True, dtype=wide if casts else head.dtype)


def _indexed(head: _Head, index: Any) -> _Head | None:
    """``[...]`` that takes all classes."""
    parts = index if isinstance(index, tuple) else (index,)
    simple = all(part is None or part is Ellipsis or type(part) in (int, slice) for part in parts)
    if not simple or not head.is_last or sum(part is Ellipsis for part in parts) > 1:
        return None
    taken = sum(type(part) in (int, slice) for part in parts)
    after = parts[parts.index(Ellipsis) + 1 :] if Ellipsis in parts else ()
    reaches_last = bool(after) or taken == len(head.shape)
    if taken > len(head.shape) or (reaches_last and parts[-1] != slice(None)):
        return None
    x = head.x[index]
    return replace(head, x=x, class_dim=x.dim() - 1)


_T = torch.Tensor
_CHANGES: dict[Any, Callable[..., _Head | None]] = {
    **dict.fromkeys((_T.view, _T.reshape, torch.reshape), _viewed),
    **dict.fromkeys((_T.flatten, torch.flatten), _flattened),
    **dict.fromkeys((_T.transpose, torch.transpose), _transposed),
    **dict.fromkeys((_T.permute, torch.permute), _permuted),
    **dict.fromkeys((_T.log_softmax, torch.log_softmax, functional.log_softmax), _as_log),
    _T.contiguous: lambda head: head,
    _T.float: _cast(torch.float32),
    _T.double: _cast(torch.float64),
    _T.to: _to,
    _T.__getitem__: _indexed,
}


def _loss(call: Waiting, func: Any, args: Any, kwargs: Any) -> Any:
    """Of a target of classes, by rows."""
    head: _Head = call.state
    of_logs = func is functional.nll_loss
    try:
        bound = (_NLL if of_logs else _CROSS_ENTROPY).bind(*args, **kwargs)
    except TypeError:  # for the call itself to say
        return NotImplemented
    bound.apply_defaults()
    given = bound.arguments
    fits = isinstance(given["input"], Deferred) and given["input"].call is call and head.is_log is of_logs
    target, w = made((given["target"], given["weight"]))
    if not fits or not _is_by_rows(head, target, w) or not _is_current(given):
        return NotImplemented
    call.require_unchanged()
    call.note("fused")
    loss = sliced_cross_entropy(
        head.x.reshape(-1, head.x.shape[-1]),
        head.weight,
        target.reshape(-1),
        head.bias,
        class_weight=w,
        ignore_index=given["ignore_index"],
        reduction=given["reduction"],
        label_smoothing=given.get("label_smoothing", 0.0),
        product=head.product,
        result=_result_dtype(head),
    )
    return loss.reshape(target.shape) if given["reduction"] == "none" else loss


def _is_by_rows(head: _Head, target: Any, w: Any) -> bool:
    """Whether every row has one class, and classes are where the loss looks for them."""
    device = head.x.device
    if not isinstance(target, torch.Tensor) or target.dtype != torch.int64 or target.device != device:
        return False
    if head.class_dim != 1 or target.shape != head.x.shape[:-1]:
        return False
    return w is None or (w.shape == head.weight.shape[:1] and w.device == device)


def _is_current(given: Any) -> bool:
    """Whether the loss is asked for in words of today, which torch will not refuse."""
    current = given["size_average"] is None and given["reduce"] is None
    return current and given["reduction"] in _REDUCTIONS and 0.0 <= given.get("label_smoothing", 0.0) <= 1.0


def _result_dtype(head: _Head) -> torch.dtype:
    """What the loss, under autocast or not, is computed in."""
    device = head.x.device
    if not torch.is_autocast_enabled(device.type):
        return head.dtype
    probe = torch.zeros(1, 2, dtype=head.dtype, device=device)
    return functional.cross_entropy(probe, torch.zeros(1, dtype=torch.int64, device=device)).dtype

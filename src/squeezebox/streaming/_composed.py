"""Operators written as others that stream, such as norms by moments, and losses that check their labels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from squeezebox.streaming._rows import widened

_aten = torch.ops.aten
Maybe = Tensor | None


def _normalised(x: Tensor, variance: Tensor, mean: Tensor, eps: float, weight: Maybe, bias: Maybe) -> Tensor:
    """Weight (x - mean) / sqrt(variance + eps) + bias, all of them broadcastable to x."""
    scale = torch.rsqrt(variance + eps)
    scale = scale if weight is None else scale * weight
    return (x - mean) * scale if bias is None else torch.addcmul(bias, x - mean, scale)


def _normalised_by_whole(
    x: Tensor, variance: Tensor, mean: Tensor, eps: float, weight: Maybe, bias: Maybe
) -> Tensor:
    """The same by moments without rows, of which a strip's backward then sums no pixels for the mean.

    The derivative by it, ``-scale`` times that by the bias, goes by a term that is zero.
    """
    scale = torch.rsqrt(variance + eps)
    scale = scale if weight is None else scale * weight
    fixed = torch.detach_copy(mean)
    shift = (fixed - mean) * scale
    return torch.addcmul(shift if bias is None else bias + shift, x - fixed, scale)


def _channels(x: Tensor, value: Maybe) -> Maybe:
    return None if value is None else value.view([1, -1] + [1] * (x.dim() - 2))


def _trained_batch_norm(
    x: Tensor, weight: Maybe, bias: Maybe, mean: Maybe, variance: Maybe, momentum: float, eps: float
) -> tuple[Tensor, ...]:
    dims, dtype, x = [dim for dim in range(x.dim()) if dim != 1], x.dtype, widened(x)
    own_variance, own_mean = torch.var_mean(x, dims, correction=0, keepdim=True)
    y = _normalised_by_whole(x, own_variance, own_mean, eps, _channels(x, weight), _channels(x, bias))
    y = y.to(dtype)
    flat_mean, flat_variance = own_mean.reshape(-1).detach(), own_variance.reshape(-1).detach()
    saved = flat_mean, torch.rsqrt(flat_variance + eps)
    if mean is None or variance is None:
        return y, *saved
    count = x.numel() // x.shape[1]
    unbiased = flat_variance * (count / max(count - 1, 1))
    return (
        y,
        *saved,
        (momentum * flat_mean + (1 - momentum) * mean).to(mean.dtype),
        (momentum * unbiased + (1 - momentum) * variance).to(variance.dtype),
    )


def _batch_norm(
    x: Tensor,
    weight: Maybe,
    bias: Maybe,
    mean: Tensor,
    variance: Tensor,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[Tensor, ...]:
    if training:
        return _trained_batch_norm(x, weight, bias, mean, variance, momentum, eps)
    return (*_fixed_batch_norm(x, weight, bias, mean, variance, momentum, eps), mean, variance)


def _without_running(
    x: Tensor, weight: Maybe, bias: Maybe, training: bool, momentum: float, eps: float
) -> tuple[Tensor, ...]:
    return _trained_batch_norm(x, weight, bias, None, None, momentum, eps)


def _fixed_batch_norm(
    x: Tensor, weight: Maybe, bias: Maybe, mean: Tensor, variance: Tensor, momentum: float, eps: float
) -> tuple[Tensor, ...]:
    at_mean, at_variance = (value.view([1, -1] + [1] * (x.dim() - 2)) for value in (mean, variance))
    y = _normalised(widened(x), at_variance, at_mean, eps, _channels(x, weight), _channels(x, bias))
    return y.to(x.dtype), x.new_empty((0,)), x.new_empty((0,))


def _group_norm(
    x: Tensor, weight: Maybe, bias: Maybe, batch: int, channels: int, pixels: int, groups: int, eps: float
) -> tuple[Tensor, ...]:
    grouped = widened(x).reshape([batch, groups, channels // groups, *x.shape[2:]])
    variance, mean = torch.var_mean(grouped, [*range(2, grouped.dim())], correction=0, keepdim=True)
    y = _normalised_by_whole(grouped, variance, mean, eps, None, None).reshape(x.shape)
    by_channel, added = _channels(x, weight), _channels(x, bias)
    y = y if by_channel is None else y * by_channel
    y = y if added is None else y + added
    y = y.to(x.dtype)
    return y, mean.reshape(batch, groups), torch.rsqrt(variance + eps).reshape(batch, groups)


def _layer_norm(
    x: Tensor, shape: Sequence[int], weight: Maybe, bias: Maybe, eps: float
) -> tuple[Tensor, ...]:
    wide, dims = widened(x), [*range(x.dim() - len(shape), x.dim())]
    variance, mean = torch.var_mean(wide, dims, correction=0, keepdim=True)
    y = _normalised(wide, variance, mean, eps, weight, bias).to(x.dtype)
    return y, mean, torch.rsqrt(variance + eps)


def _variance(x: Tensor, dim: Any = None, *, correction: Any = None, keepdim: bool = False) -> Tensor:
    return torch.var_mean(x, dim, correction=1 if correction is None else correction, keepdim=keepdim)[0]


def _deviation(x: Tensor, dim: Any = None, *, correction: Any = None, keepdim: bool = False) -> Tensor:
    """Of what is constant it has no gradient, as in torch."""
    variance = _variance(x, dim, correction=correction, keepdim=keepdim)
    is_zero = variance == 0
    return variance.masked_fill(is_zero, 1.0).sqrt().masked_fill(is_zero, 0.0)


def _circular(x: Tensor, pad: Sequence[int]) -> Tensor:
    """Pads of each axis before and after, the last axis first; a negative one crops, before others wrap."""
    for number, (before, after) in enumerate(zip(pad[::2], pad[1::2], strict=True), start=1):
        dim = x.dim() - number
        cropped, stop = max(-before, 0), x.shape[dim] - max(-after, 0)
        x = x.narrow(dim, cropped, stop - cropped)
        count = x.shape[dim]
        x = _joined(x, dim, (count - max(before, 0), count), (0, count), (0, max(after, 0)))
    return x


def _roll(x: Tensor, shifts: Sequence[int], dims: Sequence[int] = ()) -> Tensor:
    if not dims:
        return _roll(x.reshape(-1), shifts, (0,)).reshape(x.shape)
    for shift, dim in zip(shifts, dims, strict=True):
        count = x.shape[dim]
        first = -shift % max(count, 1)
        x = _joined(x, dim, (first, count), (0, first))
    return x


def _joined(x: Tensor, dim: int, *parts: tuple[int, int]) -> Tensor:
    """Parts of one axis, one behind another."""
    return torch.cat([x.narrow(dim, start, stop - start) for start, stop in parts if start < stop], dim)


def _by_labels(
    x: Tensor, target: Tensor, weight: Maybe, reduction: int, ignore_index: int
) -> tuple[Tensor, ...]:
    """As torch's own graph of it, which takes integers that its operator refuses."""
    from torch._decomp.decompositions import nll_loss_forward  # slow to import

    if target.dtype not in (torch.int64, torch.uint8):
        raise RuntimeError(f"expected labels of torch.int64, but found {target.dtype}")
    found: tuple[Tensor, ...] = nll_loss_forward(x, target, weight, reduction, ignore_index)
    return found


def _by_mask(
    x: Tensor, target: Tensor, weight: Maybe, reduction: int, ignore_index: int
) -> tuple[Tensor, ...]:
    """The same of masks; torch's graph takes the first rows and columns where a mask is smaller."""
    from torch._decomp.decompositions import nll_loss2d_forward  # slow to import

    if target.dtype != torch.int64:
        raise RuntimeError(f"expected a mask of torch.int64, but found {target.dtype}")
    if x.shape[:1] + x.shape[2:] != target.shape:
        raise RuntimeError(f"size mismatch (got input: {[*x.shape]}, target: {[*target.shape]})")
    found: tuple[Tensor, ...] = nll_loss2d_forward(x, target, weight, reduction, ignore_index)
    return found


COMPOSED: dict[Any, Callable[..., Any]] = {
    _aten._native_batch_norm_legit_functional.default: _batch_norm,
    _aten._native_batch_norm_legit.no_stats: _without_running,
    _aten._native_batch_norm_legit_no_training.default: _fixed_batch_norm,
    _aten.native_group_norm.default: _group_norm,
    _aten.native_layer_norm.default: _layer_norm,
    _aten.var.correction: _variance,
    _aten.std.correction: _deviation,
    _aten._pad_circular.default: _circular,
    _aten.roll.default: _roll,
    _aten.nll_loss_forward.default: _by_labels,
    _aten.nll_loss2d_forward.default: _by_mask,
}

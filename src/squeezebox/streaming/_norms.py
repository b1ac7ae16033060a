"""Normalisations and variances as moments and elementwise operators, for torch.export's table.

The moments are reductions like any other then, and so are their gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

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
    dims = [dim for dim in range(x.dim()) if dim != 1]
    own_variance, own_mean = torch.var_mean(x, dims, correction=0, keepdim=True)
    y = _normalised_by_whole(x, own_variance, own_mean, eps, _channels(x, weight), _channels(x, bias))
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
    y = _normalised(x, at_variance, at_mean, eps, _channels(x, weight), _channels(x, bias))
    return y, x.new_empty((0,)), x.new_empty((0,))


def _group_norm(
    x: Tensor, weight: Maybe, bias: Maybe, batch: int, channels: int, pixels: int, groups: int, eps: float
) -> tuple[Tensor, ...]:
    grouped = x.reshape([batch, groups, channels // groups, *x.shape[2:]])
    variance, mean = torch.var_mean(grouped, [*range(2, grouped.dim())], correction=0, keepdim=True)
    y = _normalised_by_whole(grouped, variance, mean, eps, None, None).reshape(x.shape)
    by_channel, added = _channels(x, weight), _channels(x, bias)
    y = y if by_channel is None else y * by_channel
    y = y if added is None else y + added
    return y, mean.reshape(batch, groups), torch.rsqrt(variance + eps).reshape(batch, groups)


def _layer_norm(
    x: Tensor, shape: Sequence[int], weight: Maybe, bias: Maybe, eps: float
) -> tuple[Tensor, ...]:
    variance, mean = torch.var_mean(x, [*range(x.dim() - len(shape), x.dim())], correction=0, keepdim=True)
    return _normalised(x, variance, mean, eps, weight, bias), mean, torch.rsqrt(variance + eps)


def _variance(x: Tensor, dim: Any = None, *, correction: Any = None, keepdim: bool = False) -> Tensor:
    return torch.var_mean(x, dim, correction=1 if correction is None else correction, keepdim=keepdim)[0]


NORMS: dict[Any, Callable[..., Any]] = {
    _aten._native_batch_norm_legit_functional.default: _batch_norm,
    _aten._native_batch_norm_legit.no_stats: _without_running,
    _aten._native_batch_norm_legit_no_training.default: _fixed_batch_norm,
    _aten.native_group_norm.default: _group_norm,
    _aten.native_layer_norm.default: _layer_norm,
    _aten.var.correction: _variance,
}

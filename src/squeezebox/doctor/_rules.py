"""Rules of layers: products, convolutions, norms, softmax, pooling, losses, and what else a step runs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from squeezebox.doctor._elementwise import ELEMENTWISE, count, or_zero
from squeezebox.doctor._intervals import Arguments, Interval, Rule, added, around, times

aten: Any = torch.ops.aten
_HIDDEN = -1e30  # what a mask adds to a key that must not be seen


def _dot(a: Arguments, first: int, second: int, dims: tuple[Sequence[int], Sequence[int]]) -> Interval:
    """Sums of products along these dims of two tensors; tighter where the values of one are known."""
    one, other = a.args[first], a.args[second]
    terms = math.prod(one.shape[dim] for dim in dims[0])
    found = times(a[first], a[second]).scaled(float(terms))
    reach = min(a.sums(one, dims[0]) * a[second].reach, a.sums(other, dims[1]) * a[first].reach)
    return Interval(max(found.low, -reach), min(found.high, reach))


def _matrices(first: int) -> Rule:
    return lambda a: _dot(a, first, first + 1, ((-1,), (-2,)))


def _plus_product(a: Arguments) -> Interval:
    """Beta * a + alpha * (b @ c)."""
    product = _dot(a, 1, 2, ((-1,), (-2,))).scaled(float(a.kwargs.get("alpha", 1)))
    return added(a[0].scaled(float(a.kwargs.get("beta", 1))), product)


def _convolution(a: Arguments) -> Interval:
    """Each element is a sum over a window of one group's channels; padding adds zeros."""
    weight, is_transposed = a.args[1], a.args[6]
    window = [0, *range(2, weight.dim())] if is_transposed else [*range(1, weight.dim())]
    terms = math.prod(weight.shape[dim] for dim in window)
    inputs = a[0].with_(Interval(0.0, 0.0))
    found = times(inputs, a[1]).scaled(float(terms)).with_(Interval(0.0, 0.0))
    reach = a.sums(weight, window) * inputs.reach
    found = Interval(max(found.low, -reach), min(found.high, reach))
    return found if a.args[2] is None else added(found, a[2])


def _affine(a: Arguments, reach: float, weight: int) -> Interval:
    """What is normalised, of at most this magnitude, times a weight and plus a bias."""
    found = around(reach)
    if a.args[weight] is not None:
        found = times(found, a[weight])
    return found if a.args[weight + 1] is None else added(found, a[weight + 1])


def _layer_norm(a: Arguments) -> tuple[Interval | None, ...]:
    count = math.prod(a.args[1])  # of n numbers none is more than sqrt(n - 1) deviations from their mean
    spread = 1.0 / math.sqrt(a.args[4])
    return _affine(a, math.sqrt(max(count - 1, 0)), 2), a[0], Interval(0.0, spread)


def _batch_norm(a: Arguments) -> tuple[Interval | None, ...]:
    count, epsilon = a.args[0].numel() // a.args[0].shape[1], a.args[7]
    if not a.args[5]:
        spread = 1.0 / math.sqrt(max(a[4].low, 0.0) + epsilon)
        empty = Interval(0.0, 0.0)
        return _affine(a, (a[0].reach + a[3].reach) * spread, 1), empty, empty
    return _affine(a, math.sqrt(max(count - 1, 0)), 1), a[0], Interval(0.0, 1.0 / math.sqrt(epsilon))


def running_moments(a: Arguments) -> tuple[Interval, Interval]:
    """What batch normalisation writes to its running mean and variance: shares of a batch's."""
    count = a.args[0].numel() // a.args[0].shape[1]
    return a[0], Interval(0.0, a[0].reach * a[0].reach * count / max(count - 1, 1))


def _group_norm(a: Arguments) -> tuple[Interval | None, ...]:
    count = a.args[0].numel() // (a.args[3] * a.args[6])
    return _affine(a, math.sqrt(max(count - 1, 0)), 1), a[0], Interval(0.0, 1.0 / math.sqrt(a.args[7]))


def _norm_backward(a: Arguments, count: int, places: int, spread: float, weight: int) -> tuple[Interval, ...]:
    """Of input, weight and bias. ``count`` numbers are normalised as one, ``places`` of them with one weight.

    The input's is a projection, whose rows have at most length 1, of the gradient times the weight. Squares
    of n normalised numbers add up to n at most, so magnitudes of p of them to the root of n p.
    """
    has_weight = a.args[weight] is not None
    weighted = a[0].reach * (a[weight].reach if has_weight else 1.0)
    summed = a.args[0].numel() / (a.args[weight].numel() if has_weight else 1)
    normalised = min(math.sqrt(max(count - 1, 0)), math.sqrt(count / places))
    return (
        around(weighted * spread * math.sqrt(count)),
        around(a[0].reach * summed * normalised),
        around(a[0].reach * summed),
    )


def _layer_norm_backward(a: Arguments) -> tuple[Interval, ...]:
    return _norm_backward(a, math.prod(a.args[2]), 1, a[4].reach, 5)


def _group_norm_backward(a: Arguments) -> tuple[Interval, ...]:
    batch, places, groups = a.args[5], a.args[7], a.args[8]
    return _norm_backward(a, a.args[0].numel() // (batch * groups), places, a[3].reach, 4)


def _batch_norm_backward(a: Arguments) -> tuple[Interval | None, ...]:
    count, is_training, epsilon = a.args[0].numel() // a.args[0].shape[1], a.args[7], a.args[8]
    if is_training:
        return _norm_backward(a, count, count, 1.0 / math.sqrt(epsilon), 2)
    spread = 1.0 / math.sqrt(max(a[4].low, 0.0) + epsilon)
    weight, summed = 1.0 if a.args[2] is None else a[2].reach, a[0].reach * count
    moved = (a[1].reach + a[3].reach) * spread
    return around(a[0].reach * weight * spread), around(summed * moved), around(summed)


def _attention_backward(a: Arguments) -> tuple[Interval | None, ...]:
    """Of queries, keys and values; a row of weights p adds up to 1, and g are the gradients of its weights.

    p (g - sum(p g)) adds up to at most max |g| in magnitude, and each is at most half of it.
    """
    if a.given(6, "dropout_p", 0.0):
        return (None, None, None)
    queries, width = a.args[1].shape[-2:]
    scale = a.kwargs.get("scale") or 1.0 / math.sqrt(width)
    most = a[0].reach * a[3].reach * width
    return (
        around(abs(scale) * most * a[2].reach),
        around(abs(scale) * most * a[1].reach * queries / 2),
        around(a[0].reach * queries),
    )


def _averaged(a: Arguments) -> Interval:
    """Of a window's places, or their sum over what is given; zeros of padding may be among them."""
    divisor = a.given(6, "divisor_override", None)
    padding: Any = a.given(3, "padding", 0)
    if divisor is not None:
        return or_zero(a).scaled(_places(a.args[1]) / divisor)
    return or_zero(a) if padding and any([padding] if isinstance(padding, int) else padding) else a[0]


def _places(kernel: Sequence[int]) -> int:
    """Of a window whose sizes may be one number for both."""
    return int(math.prod([*kernel, *kernel][:2]))


def _averaged_backward(a: Arguments) -> Interval:
    """A place is in no more windows than one has places, and gets at most each one's gradient."""
    kernel, stride = ([*each, *each][:2] for each in (a.args[2], a.args[3] or a.args[2]))
    windows = math.prod(-(-k // s) for k, s in zip(kernel, stride, strict=True))
    return or_zero(a).scaled(windows / (a.args[7] or 1))


def _rows_backward(a: Arguments) -> Interval:
    """A row gets the gradients of all its places, which may be all there are."""
    return around(a[0].reach * a.args[1].numel())


def _shares(a: Arguments) -> Interval:
    return Interval(0.0, 1.0)


def _log_shares(a: Arguments) -> Interval:
    return Interval(a[0].low - a[0].high - math.log(count(a.args[0], a.args[1])), 0.0)


def _shares_backward(a: Arguments) -> Interval:
    """Y (g - sum(y g)): both g and its mean by weights that add up to 1 lie in g's interval."""
    return around(min(1.0, a[1].reach) * (a[0].high - a[0].low))


def _dropout(a: Arguments) -> tuple[Interval | None, ...]:
    kept = 1.0 - a.args[1]
    return or_zero(a).scaled(1.0 / kept if kept > 0.0 else 1.0), Interval(0.0, 1.0)


def _pooled(a: Arguments) -> tuple[Interval | None, ...]:
    return a[0], Interval(0.0, float(a.args[0].shape[-1] * a.args[0].shape[-2]))


def _gelu_backward(a: Arguments) -> Interval:
    return around(1.13 * a[0].reach)


def _silu_backward(a: Arguments) -> Interval:
    return around(1.1 * a[0].reach)


def _tanh_backward(a: Arguments) -> Interval:
    return times(a[0], Interval(max(1.0 - a[1].reach ** 2, 0.0), 1.0))


def _sigmoid_backward(a: Arguments) -> Interval:
    return times(a[0], Interval(0.0, 0.25)) if 0.0 <= a[1].low and a[1].high <= 1.0 else around(math.inf)


def _picked(a: Arguments) -> tuple[Interval | None, ...]:
    """A loss of one class, summed or not, and the weights that it was divided by."""
    if a.args[2] is not None:
        return (None, None)
    count = float(a.args[1].numel())
    loss = or_zero(a).scaled(-1.0)
    return loss.scaled(count) if a.args[3] == 2 else loss, Interval(0.0, count)


def _picked_backward(a: Arguments) -> Interval:
    """Of a loss of one class: each gradient goes to one place, perhaps divided by how many there are."""
    return around(a[0].reach)


def _log_shares_backward(a: Arguments) -> Interval:
    """G - softmax * sum(g)."""
    return around(a[0].reach * (1 + count(a.args[0], a.args[2])))


def _pooled_backward(a: Arguments) -> Interval:
    """A place is the largest of no more windows than one has places."""
    return or_zero(a).scaled(float(math.prod(a.args[2]) ** (2 // len(a.args[2]))))


def _convolution_backward(a: Arguments) -> tuple[Interval | None, ...]:
    """Gradients of input, weight and bias."""
    gradient, weight, is_transposed = a.args[0], a.args[2], a.args[7]
    window = [*range(1, weight.dim())] if is_transposed else [0, *range(2, weight.dim())]
    terms = math.prod(weight.shape[dim] for dim in window)
    summed = gradient.numel() // gradient.shape[1]
    if is_transposed:
        summed = max(summed, a.args[1].numel() // a.args[1].shape[1])
    reach = a[0].reach
    return (
        around(reach * min(terms * a[2].reach, a.sums(weight, window))),
        around(reach * a[1].reach * summed),
        around(reach * summed),
    )


def _attention(a: Arguments) -> tuple[Interval | None, ...]:
    """Values by weights that add up to 1, and the logarithms of what these were divided by."""
    if a.given(3, "dropout_p", 0.0):
        return (None, None)
    keys, width = a.args[1].shape[-2:]
    scale = a.kwargs.get("scale") or 1.0 / math.sqrt(width)
    most = abs(scale) * a[0].reach * a[1].reach * width
    mask = a.kwargs.get("attn_mask")
    low, high = (0.0, 0.0) if mask is None else a.of(mask)
    low = low if low > _HIDDEN else 0.0  # of a row with a key left; where none is, infinity is meant
    return a[2], Interval(min(low, 0.0) - most, max(high, 0.0) + most + math.log(keys))


RULES: Mapping[Any, Rule] = {
    **ELEMENTWISE,
    aten.mm: _matrices(0),
    aten.bmm: _matrices(0),
    aten.addmm: _plus_product,
    aten.baddbmm: _plus_product,
    aten.convolution: _convolution,
    aten.native_layer_norm: _layer_norm,
    aten.native_batch_norm: _batch_norm,
    aten.native_group_norm: _group_norm,
    aten.native_layer_norm_backward: _layer_norm_backward,
    aten.native_batch_norm_backward: _batch_norm_backward,
    aten.native_group_norm_backward: _group_norm_backward,
    aten._softmax: _shares,
    aten._safe_softmax: _shares,
    aten.bernoulli: _shares,
    aten.uniform: lambda a: Interval(a.given(1, "from", 0.0), a.given(2, "to", 1.0)),
    aten.rand: _shares,
    aten.rand_like: _shares,
    aten.zero: lambda a: Interval(0.0, 0.0),
    aten.fill: lambda a: a[1],
    aten.select_backward: or_zero,
    aten.slice_backward: or_zero,
    aten.nll_loss_forward: _picked,
    aten.nll_loss_backward: lambda a: _picked_backward(a) if a.args[3] is None else around(math.inf),
    aten._log_softmax_backward_data: _log_shares_backward,
    aten.max_pool2d_with_indices_backward: _pooled_backward,
    aten.convolution_backward: _convolution_backward,
    aten.avg_pool2d: _averaged,
    aten.avg_pool2d_backward: _averaged_backward,
    aten.embedding_dense_backward: _rows_backward,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
    aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    aten._log_softmax: _log_shares,
    aten.native_dropout: _dropout,
    aten.max_pool2d_with_indices: _pooled,
    aten.threshold_backward: or_zero,
    aten.gelu_backward: _gelu_backward,
    aten.silu_backward: _silu_backward,
    aten.tanh_backward: _tanh_backward,
    aten.sigmoid_backward: _sigmoid_backward,
    aten._softmax_backward_data: _shares_backward,
}
# What they make is as it is in every step; of what is not filled nothing is read.
CONSTANTS = frozenset(
    {
        aten.zeros,
        aten.ones,
        aten.full,
        aten.zeros_like,
        aten.ones_like,
        aten.full_like,
        aten.arange,
        aten.scalar_tensor,
        aten.new_zeros,
        aten.new_ones,
        aten.new_full,
        aten.eye,
    }
)
EMPTY = frozenset({aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty, aten.new_empty_strided})
_SUMS = frozenset(
    {
        aten.native_batch_norm,
        aten.native_layer_norm,
        aten.native_group_norm,
        aten.native_batch_norm_backward,
        aten.native_layer_norm_backward,
        aten.native_group_norm_backward,
        aten._scaled_dot_product_flash_attention_for_cpu_backward,
        aten.embedding_dense_backward,
        aten._log_softmax,
        aten._softmax,
    }
)
PRODUCTS = frozenset({aten.mm, aten.bmm, aten.addmm, aten.baddbmm, aten.convolution})


def rounded_terms(packet: Any, args: Sequence[Any]) -> int:
    """How many numbers one element adds up at most, each of which may be rounded."""
    if packet is aten.convolution_backward:
        gradient, weight = args[0], args[2]
        return int(
            max(gradient.numel() // gradient.shape[1], args[1].numel() // args[1].shape[1], weight.numel())
        )
    if packet in (aten.sum, aten.mean):
        return count(args[0], args[1] if len(args) > 1 else None)
    if packet in (aten._log_softmax_backward_data, aten._softmax_backward_data):
        return count(args[0], args[2])
    if packet is aten.avg_pool2d:
        return _places(args[1])
    if packet is aten._adaptive_avg_pool2d:
        return count(args[0], (-2, -1))
    if packet in _SUMS:
        return int(args[0].numel())
    return terms_of(packet, args)


def terms_of(packet: Any, args: Sequence[Any]) -> int:
    """How many products one element of a product or convolution adds up; 1 elsewhere."""
    if packet is aten.convolution:
        weight = args[1]
        return int(weight.numel() // weight.shape[1 if args[6] else 0])
    if packet in PRODUCTS:
        return int(args[-1].shape[-2])
    return 1

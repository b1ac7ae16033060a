"""Operators that work along the streamed axis, written as reductions over it and elementwise parts.

It is done in the traced graph, where the streamed axis is known: softmax as exp(x - logsumexp), products that
sum over pixels, norms, adaptive pooling to a few bins, pooling over all there is, and windows over channels.
What cannot be written so gets all rows at once.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from math import inf
from typing import Any

import torch
from torch.fx import Node
from torch.fx.node import map_arg

from squeezebox.schema import UnsupportedModelError
from squeezebox.streaming._reductions import gathered
from squeezebox.streaming._rows import Call, Rows, is_narrow

_aten = torch.ops.aten
_TO = _aten._to_copy.default


def written(call: Call) -> bool:
    """Whether the node has become others, of which every one can be streamed."""
    write = _WRITERS.get(call.target)
    return write is not None and write(call)


def gather(call: Call, why: UnsupportedModelError) -> None:
    """Give the node all rows at once of what it reads; ``why`` is what to say where they are too many."""
    for source in call.inputs:
        known = next((each for each in source.users if each.target is gathered), None)
        whole = known or _add(call.node, gathered, source)
        whole.meta.setdefault("why", why)
        call.node.replace_input_with(source, whole)


def _add(place: Node, target: Any, *arguments: Any, **keywords: Any) -> Node:
    """A new node before ``place``, of the same module."""
    with place.graph.inserting_before(place):
        node = place.graph.call_function(target, arguments, keywords)
    fakes: Any = map_arg(arguments, lambda inner: inner.meta["val"])
    with _value(place).fake_mode:
        node.meta["val"] = target(*fakes, **keywords)
    node.meta["nn_module_stack"] = place.meta.get("nn_module_stack")
    return node


def _become(node: Node, target: Any, *arguments: Any) -> bool:
    """The node is this operator from now on, in its own precision."""
    made, keywords = _add(node, target, *arguments), {}
    if _value(made).dtype != _value(node).dtype:
        target, arguments, keywords = _TO, (made,), {"dtype": _value(node).dtype}
    else:
        node.graph.erase_node(made)
    node.target, node.args, node.kwargs = target, arguments, keywords
    return True


def _wide(place: Node, x: Node) -> Node:
    return _add(place, _TO, x, dtype=torch.float32) if is_narrow(_value(x)) else x


def _value(node: Node) -> Any:
    value = node.meta["val"]
    return value[0] if isinstance(value, tuple | list) else value


def _softmaxed(call: Call) -> bool:
    """exp(x - logsumexp(x)), or that without exp."""
    ((x, rows),) = call.inputs.items()
    shape = x.meta["val"].shape
    dim = call.args[1] % len(shape)
    if dim != rows.dim or _value(call.node).dtype != x.meta["val"].dtype:
        return False
    x = _wide(call.node, x)
    whole = _add(call.node, _aten.logsumexp.default, x, [dim], True)
    if call.target is _aten._log_softmax.default:
        return _become(call.node, _aten.sub.Tensor, x, whole)
    return _become(call.node, _aten.exp.default, _add(call.node, _aten.sub.Tensor, x, whole))


def _product(call: Call) -> bool:
    """The sum over pixels of products of both factors' elements, of which both depend on the image."""
    first, second = call.args
    summed = first.meta["val"].dim() - 1
    if len(call.inputs) < 2 or call.inputs[first].dim != summed or call.inputs[second].dim != summed - 1:
        return False
    factors = _add(call.node, _aten.unsqueeze.default, _wide(call.node, first), summed + 1), second
    both = _add(call.node, _aten.unsqueeze.default, factors[1], summed - 1)
    return _become(
        call.node, _aten.sum.dim_IntList, _add(call.node, _aten.mul.Tensor, factors[0], both), [summed]
    )


def _product_added(call: Call) -> bool:
    """A product and what is added to it."""
    added, first, second = call.args
    if call.node.kwargs or first not in call.inputs or second not in call.inputs:
        return False
    alone = _aten.mm.default if call.target is _aten.addmm.default else _aten.bmm.default
    return _become(call.node, _aten.add.Tensor, _add(call.node, alone, first, second), added)


def _attention(call: Call) -> bool:
    """Softmax and two products, where queries or keys depend on the image; both get all rows at once.

    Torch's own operator then holds no weight for every pair.
    """
    node, (query, key, value), options = call.node, call.args[:3], call.node.kwargs
    names = [each.name for each in call.target._schema.arguments]
    given = dict(zip(names, call.args, strict=False)) | options
    shapes = [each.meta["val"].shape for each in (query, key, value)]
    is_plain = not any(given.get(name) for name in ("dropout_p", "is_causal", "enable_gqa"))
    if not is_plain or (query in call.inputs and key in call.inputs) or len({s[:-2] for s in shapes}) > 1:
        return False
    scale, mask = given.get("scale"), given.get("attn_mask")
    scaled = _add(node, _aten.mul.Scalar, query, shapes[0][-1] ** -0.5 if scale is None else scale)
    first, second, third = (
        _add(node, _aten.reshape.default, each, [-1, *shape[-2:]])
        for each, shape in zip((scaled, key, value), shapes, strict=True)
    )
    scores = _add(node, _aten.bmm.default, first, _add(node, _aten.transpose.int, second, 1, 2))
    scores = _add(node, _aten.reshape.default, scores, [*shapes[0][:-1], shapes[1][-2]])
    if mask is not None and _value(mask).dtype == torch.bool:
        outside = _add(node, _aten.logical_not.default, mask)
        scores = _add(node, _aten.masked_fill.Scalar, scores, outside, -inf)
    elif mask is not None:
        scores = _add(node, _aten.add.Tensor, scores, mask)
    weights = _weights(node, _wide(node, scores), mask is not None, key in call.inputs)
    if _value(weights).dtype != _value(value).dtype:
        weights = _add(node, _TO, weights, dtype=_value(value).dtype)
    weights = _add(node, _aten.reshape.default, weights, [-1, *weights.meta["val"].shape[-2:]])
    product = _add(node, _aten.bmm.default, weights, third)
    return _become(node, _aten.reshape.default, product, [*_value(node).shape])


def _weights(place: Node, scores: Node, masked: bool, along: bool) -> Node:
    """Softmax, along the streamed axis or not; of what is all masked it is 0, as in torch's attention."""
    if not masked:
        return _add(place, _aten._softmax.default, scores, -1, False)
    fill = _aten.masked_fill.Scalar
    if along:
        whole = _add(place, _aten.logsumexp.default, scores, [-1], True)
        whole = _add(place, fill, whole, _add(place, _aten.eq.Scalar, whole, -inf), 0.0)
        return _add(place, _aten.exp.default, _add(place, _aten.sub.Tensor, scores, whole))
    none = _add(place, _aten.eq.Scalar, _add(place, _aten.amax.default, scores, [-1], True), -inf)
    weights = _add(place, _aten._softmax.default, _add(place, fill, scores, none, 0.0), -1, False)
    return _add(place, fill, weights, none, 0.0)


def _norm(call: Call) -> bool:
    """Of order 2, 1, infinity or another one; that of zeros has no gradient, as in torch."""
    node, ((x, rows),) = call.node, call.inputs.items()
    ndim, given = x.meta["val"].dim(), call.args[1:]
    order, keepdim = (given[0] if given else 2), (given[2] if len(given) > 2 else False)
    dims = sorted(dim % ndim for dim in (given[1] if len(given) > 1 else None) or range(ndim))
    if rows.dim not in dims or node.kwargs or len(given) > 3 or order in (0, -inf):
        return False
    size = _add(node, _aten.abs.default, _wide(node, x))
    if order == inf:
        return _become(node, _aten.amax.default, size, dims, keepdim)
    if order == 1:
        return _become(node, _aten.sum.dim_IntList, size, dims, keepdim)
    powers = _powers(node, size, order)
    total = _add(node, _aten.sum.dim_IntList, powers, dims, keepdim)
    is_zero = _add(node, _aten.eq.Scalar, total, 0)
    root = _add(
        node, _aten.pow.Tensor_Scalar, _add(node, _aten.masked_fill.Scalar, total, is_zero, 1.0), 1 / order
    )
    return _become(node, _aten.masked_fill.Scalar, root, is_zero, 0.0)


def _powers(place: Node, size: Node, order: Any) -> Node:
    """Those of zeros have no gradient where the order is below 1, as in torch."""
    power, fill = _aten.pow.Tensor_Scalar, _aten.masked_fill.Scalar
    if order >= 1:
        return _add(place, power, size, order)
    is_zero = _add(place, _aten.eq.Scalar, size, 0)
    powers = _add(place, power, _add(place, fill, size, is_zero, 1.0), order)
    return _add(place, fill, powers, is_zero, 0.0 if order > 0 else inf)


def _adaptive(call: Call) -> bool:
    """Bins: slices along the other axis, and rows within bounds along the streamed one.

    Where several elements of a bin are its largest, they share its gradient.
    """
    node, ((x, rows),) = call.node, call.inputs.items()
    ndim, is_max = x.meta["val"].dim(), call.target is _aten.adaptive_max_pool2d.default
    if rows.dim < ndim - 2 or rows.merged:
        return False
    end = _first_item(node) if is_max else node
    if end is None:
        return False
    other = 2 * ndim - 3 - rows.dim
    bins = dict(zip((ndim - 2, ndim - 1), call.args[1], strict=True))
    slices = [
        _reduced(node, _add(node, _aten.slice.Tensor, x, other, *bounds), other, is_max)
        for bounds in _bins(x.meta["val"].shape[other], bins[other])
    ]
    x = slices[0] if len(slices) == 1 else _add(node, _aten.cat.default, slices, other)
    found = [_bin(node, x, rows, bounds, is_max) for bounds in _bins(rows.count, bins[rows.dim])]
    return _become(end, _aten.cat.default, found, rows.dim)


def _bins(count: int, bins: int) -> list[tuple[int, int]]:
    return [(number * count // bins, -(-(number + 1) * count // bins)) for number in range(bins)]


def _bin(place: Node, x: Node, rows: Rows, bounds: tuple[int, int], is_max: bool) -> Node:
    """Mean or maximum of the rows within bounds."""
    value = x.meta["val"]
    if bounds == (0, rows.count):
        return _reduced(place, x, rows.dim, is_max)
    number = _add(place, _aten.arange.default, rows.count, device=value.device, pin_memory=False)
    number = _add(place, _aten.view.default, number, [-1] + [1] * (value.dim() - 1 - rows.dim))
    outside = _add(
        place,
        _aten.bitwise_or.Tensor,
        _add(place, _aten.lt.Scalar, number, bounds[0]),
        _add(place, _aten.ge.Scalar, number, bounds[1]),
    )
    inside = _add(place, _aten.masked_fill.Scalar, x, outside, -inf if is_max else 0.0)
    if is_max:
        return _add(place, _aten.amax.default, inside, [rows.dim], True)
    total = _add(place, _aten.sum.dim_IntList, inside, [rows.dim], True)
    return _add(place, _aten.div.Scalar, total, bounds[1] - bounds[0])


def _reduced(place: Node, x: Node, dim: int, is_max: bool) -> Node:
    return _add(place, _aten.amax.default if is_max else _aten.mean.dim, x, [dim], True)


def _first_item(node: Node) -> Node | None:
    """The only item that is read of a tuple, if that is its first."""
    items = [*node.users]
    is_first = [item.target is operator.getitem and item.args[1] == 0 for item in items]
    return items[0] if is_first == [True] else None


def _pooled_whole(call: Call) -> bool:
    """One window over all that there is."""
    node, ((x, rows),) = call.node, call.inputs.items()
    shape = tuple(x.meta["val"].shape)
    padding = call.args[3] if len(call.args) > 3 else 0
    kernel = tuple(call.args[1]) * (2 if len(call.args[1]) == 1 else 1)
    if rows.merged or kernel != shape[-2:] or any([padding] if isinstance(padding, int) else padding):
        return False
    dims = [len(shape) - 2, len(shape) - 1]
    if call.target is _aten.avg_pool2d.default:
        is_own = len(call.args) > 6 and call.args[6] is not None
        return not is_own and _become(node, _aten.mean.dim, x, dims, True)
    end = _first_item(node)
    return end is not None and _become(end, _aten.amax.default, x, dims, True)


def _channel_windows(call: Call) -> bool:
    """Means over windows of channels, of local response normalisation."""
    node, ((x, rows),) = call.node, call.inputs.items()
    kernel: Any = call.args[1]
    stride, *rest = call.args[2:] or [()]
    stride = stride or kernel
    shape = x.meta["val"].shape
    is_plain = [*kernel[1:]] == [1, 1] and {*stride} == {1} and not any(rest[0] if rest else [])
    if not is_plain or rows.dim < len(shape) - 2:
        return False
    dim, width = len(shape) - 3, shape[-3] - kernel[0] + 1
    parts = [_add(node, _aten.slice.Tensor, x, dim, first, first + width) for first in range(kernel[0])]
    total = parts[0]
    for part in parts[1:]:
        total = _add(node, _aten.add.Tensor, total, part)
    return _become(node, _aten.div.Scalar, total, kernel[0])


_WRITERS: Mapping[Any, Callable[[Call], bool]] = {
    **dict.fromkeys((_aten._softmax.default, _aten._log_softmax.default), _softmaxed),
    **dict.fromkeys((_aten.mm.default, _aten.bmm.default), _product),
    _aten.scaled_dot_product_attention.default: _attention,
    **dict.fromkeys((_aten.addmm.default, _aten.baddbmm.default), _product_added),
    **dict.fromkeys((_aten._adaptive_avg_pool2d.default, _aten.adaptive_max_pool2d.default), _adaptive),
    **dict.fromkeys((_aten.avg_pool2d.default, _aten.max_pool2d_with_indices.default), _pooled_whole),
    _aten.linalg_vector_norm.default: _norm,
    _aten.avg_pool3d.default: _channel_windows,
}

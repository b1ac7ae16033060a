"""Operators that make a row from the same row of their inputs: elementwise, over channels, views."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.node import map_arg

from squeezebox.streaming._rows import Call, Operator, Rows, Strip, run_node, shape_of

_aten = torch.ops.aten
Arguments = list[Any]
Adjust = Callable[[Arguments, int], Arguments]
_MISFIT = "its inputs have the streamed axis at different places, or not in the same size"


def elementwise(call: Call) -> Operator:
    """Every element from those at its place; inputs without rows are broadcast, or cut where full."""
    shape, (rows, *others) = call.shape, [_aligned(call, node) for node in call.inputs]
    if any(other != rows for other in others) or shape[rows.dim] != rows.size(rows.count):
        raise call.refuse(_MISFIT)

    def cut(source: Node, value: Any, start: int, stop: int) -> Any:
        return _broadcast(value, rows, len(shape), start, stop)

    return _same_rows(call, rows, cut=cut)


def _broadcast(value: Any, rows: Rows, ndim: int, start: int, stop: int) -> Any:
    """Of what is broadcast to the rows of ``ndim`` dimensions, these where it has all."""
    place = rows.dim - ndim + value.dim() if isinstance(value, Tensor) else -1
    if place < 0 or value.shape[place] == 1:
        return value
    return _moved(rows, place).take(value, start, stop)


def _aligned(call: Call, node: Node) -> Rows:
    """An input's rows as the output has them."""
    rows, ndim = call.inputs[node], node.meta["val"].dim()
    dim = rows.dim + len(call.shape) - ndim
    return Rows(dim=dim, count=rows.count, before=rows.before, after=rows.after)


def along(call: Call) -> Operator:
    """Works along one or some other dimensions, which stay in place: softmax, gather, flip, cat, cumsum."""
    rows = _common(call)
    if rows.dim in named_dims(call):
        raise call.refuse("it works along the streamed axis")
    _require_as_many(call, rows)

    def cut(source: Node, value: Any, start: int, stop: int) -> Any:
        ndim = len(_first_shape(call))
        full = (
            isinstance(value, Tensor)
            and value.dim() == ndim
            and value.shape[rows.dim] == rows.size(rows.count)
        )
        return rows.take(value, start, stop) if full and rows.count > 1 else value

    return _same_rows(call, rows, cut=cut)


def _require_as_many(call: Call, rows: Rows) -> None:
    """Raise where something without rows has fewer or more, of which ``gather`` would take the first."""
    ndim = len(_first_shape(call))
    for node in call.node.all_input_nodes:
        value = node.meta.get("val")
        if node not in call.inputs and isinstance(value, Tensor) and value.dim() == ndim:
            if value.shape[rows.dim] != rows.size(rows.count):
                raise call.refuse(_MISFIT)


def gathered(call: Call) -> Operator:
    """Elements picked along another dimension; or, from what has no rows, along the streamed one."""
    if call.args[0] not in call.inputs and call.inputs[call.args[2]].dim in named_dims(call):
        return _same_rows(call, _common(call))
    return along(call)


def without(call: Call) -> Operator:
    """Takes other dimensions away, or leaves them as 1 (``keepdim``): sum, mean, amax, select, squeeze."""
    rows, shape = _common(call), _first_shape(call)
    dims = named_dims(call)
    if rows.dim in dims and shape[rows.dim] != 1:
        raise call.refuse("it works along the streamed axis")
    taken = sum(1 for dim in dims if dim < rows.dim) if len(call.shape) < len(shape) else 0
    return _same_rows(call, _moved(rows, rows.dim - taken))


def squeezed(call: Call) -> Operator:
    """Takes dimensions of size 1 away, but never the streamed one."""
    rows, shape = _common(call), _first_shape(call)
    gone = [dim for dim in named_dims(call) if shape[dim] == 1]
    if rows.dim in gone:
        raise call.refuse("it takes the streamed axis away")
    return _same_rows(call, _moved(rows, rows.dim - sum(1 for dim in gone if dim < rows.dim)))


def unsqueezed(call: Call) -> Operator:
    """A new dimension of size 1."""
    rows, at = _common(call), int(call.args[1]) % len(call.shape)
    return _same_rows(call, _moved(rows, rows.dim + (at <= rows.dim)))


def permuted(call: Call) -> Operator:
    """Dimensions in another order."""
    rows, ndim = _common(call), len(call.shape)
    if call.target is _aten.permute.default:
        order = [dim % ndim for dim in call.args[1]]
    else:
        first, second = (int(dim) % ndim for dim in call.args[1:3])
        order = [*range(ndim)]
        order[first], order[second] = second, first
    return _same_rows(call, _moved(rows, order.index(rows.dim)))


def viewed(call: Call) -> Operator:
    """Another shape in which the streamed axis is a dimension, or a factor of one.

    Where it is merged with dimensions before it, a strip has their parts of its rows in that order:
    elementwise operators and reductions do not mind.
    """
    ((source, rows),) = call.inputs.items()
    given, shape = tuple(source.meta["val"].shape), call.shape
    before, after = prod(given[: rows.dim]) * rows.before, prod(given[rows.dim + 1 :]) * rows.after
    found = [
        Rows(dim=dim, count=rows.count, before=before // head, after=after // tail)
        for dim, size in enumerate(shape)
        if (head := prod(shape[:dim])) and (tail := prod(shape[dim + 1 :]))
        if before % head == 0 and after % tail == 0
        if size == (before // head) * rows.count * (after // tail)
    ]
    if not found:
        raise call.refuse(f"it changes the shape {given} to {shape}, which parts the streamed axis")
    best = min(found, key=lambda rows: (rows.before * rows.after, -rows.dim))

    def run(strip: Strip, start: int, stop: int) -> Tensor:
        sizes = [*shape]
        sizes[best.dim] = best.size(stop - start)
        result: Tensor = strip.rows(source, start, stop).reshape(sizes)
        return result

    return Operator(rows=best, needs=lambda start, stop: [(source, start, stop)], run=run)


def expanded(call: Call) -> Operator:
    """Repeated along dimensions of size 1, without copies."""
    rows = _aligned(call, next(iter(call.inputs)))
    if call.shape[rows.dim] != rows.size(rows.count):
        raise call.refuse("it repeats the streamed axis")

    def adjust(arguments: Arguments, count: int) -> Arguments:
        sizes = [*arguments[1]]
        sizes[rows.dim] = -1
        return [arguments[0], sizes, *arguments[2:]]

    return _same_rows(call, rows, adjust=adjust)


def made_like(call: Call) -> Operator:
    """A new tensor of an input's shape, or of one with the same rows."""
    return _same_rows(call, _common(call))


def picked(call: Call) -> Operator:
    """An item of a tuple."""
    return _same_rows(call, _common(call))


def detached(call: Call) -> Operator:
    """The same values without gradient."""
    ((source, rows),) = call.inputs.items()
    return Operator(
        rows=rows,
        needs=lambda start, stop: [(source, start, stop)],
        run=lambda strip, start, stop: strip.rows(source, start, stop).detach(),
    )


def multiplied(call: Call) -> Operator:
    """Products of matrices: one for every row, or one that is the same for all along another dimension."""
    if len({*call.inputs.values()}) > 1:
        raise call.refuse("every pixel meets every other, as in self-attention, where each attends to all")
    rows, biased = _common(call), call.target in (_aten.addmm.default, _aten.baddbmm.default)
    first, second = call.args[biased : biased + 2]
    ndim = first.meta["val"].dim()
    if rows.dim >= ndim - 2 or call.target is _aten.linear.default:
        _require_one_factor(call, rows, {first: ndim - 1, second: ndim - 2})

    def cut(source: Node, value: Any, start: int, stop: int) -> Any:
        if biased and source is call.args[0]:
            return _broadcast(value, rows, ndim, start, stop)
        full = rows.dim < ndim - 2 and value.dim() == ndim and value.shape[rows.dim] == rows.size(rows.count)
        return rows.take(value, start, stop) if full else value

    return _same_rows(call, rows, cut=cut)


def _require_one_factor(call: Call, rows: Rows, summed: dict[Node, int]) -> None:
    (factor, *others) = call.inputs
    is_weight = call.target is _aten.linear.default and factor is not call.args[0]
    if others or len(summed) < 2 or factor not in summed or is_weight:
        raise call.refuse("more than one of what it multiplies and adds depends on the image")
    if rows.dim == summed[factor]:
        raise call.refuse("it multiplies along the streamed axis")


def attended(call: Call) -> Operator:
    """Attention within each row, such as along the image's other axis."""
    parts, mask = {*call.args[:3]}, call.args[3] if len(call.args) > 3 else call.node.kwargs.get("attn_mask")
    rows, *others = {*call.inputs.values()}
    if {*call.inputs} != parts or others or rows.dim >= len(call.shape) - 2 or mask is not None:
        raise call.refuse("every pixel meets every other, as in self-attention, where each attends to all")
    return _same_rows(call, rows)


def distances(call: Call) -> Operator:
    """Between every pixel and what is the same for all."""
    rows, (first, second, *_) = _common(call), call.args
    if first not in call.inputs or second in call.inputs or rows.dim != len(call.shape) - 2:
        raise call.refuse("every pixel meets every other")
    return _same_rows(call, rows)


def embedded(call: Call) -> Operator:
    """A row of a table for every element."""
    if call.args[0] in call.inputs:
        raise call.refuse("its table depends on the image, row by row")
    if len(call.args) > 3 and call.args[3]:
        raise call.refuse("it divides gradients by how often a number is in all of the image")
    return _same_rows(call, _common(call))


def _same_rows(
    call: Call,
    rows: Rows,
    *,
    adjust: Adjust | None = None,
    cut: Callable[[Node, Any, int, int], Any] | None = None,
) -> Operator:
    sources, positional, named = [*call.inputs], call.args, call.node.kwargs
    places = [place for place, argument in enumerate(positional) if _has_nodes(argument)]
    names = [name for name, argument in named.items() if _has_nodes(argument)]

    def run(strip: Strip, start: int, stop: int) -> Any:
        def fill(source: Node) -> Any:
            if source in call.inputs:
                return strip.rows(source, start, stop)
            value = strip.value(source)
            return value if cut is None else cut(source, value, start, stop)

        arguments = [*positional]
        for place in places:
            argument = positional[place]
            arguments[place] = fill(argument) if isinstance(argument, Node) else map_arg(argument, fill)
        keywords = named | {name: map_arg(named[name], fill) for name in names} if names else named
        if adjust is not None:
            arguments = adjust(arguments, stop - start)
        return run_node(call.node, arguments, keywords)

    return Operator(rows=rows, needs=lambda start, stop: [(each, start, stop) for each in sources], run=run)


def _has_nodes(argument: Any) -> bool:
    found: list[Node] = []
    map_arg(argument, found.append)
    return bool(found)


def _common(call: Call) -> Rows:
    first, *others = set(call.inputs.values())
    if others:
        raise call.refuse(_MISFIT)
    return first


def _moved(rows: Rows, dim: int) -> Rows:
    return Rows(dim=dim, count=rows.count, before=rows.before, after=rows.after)


def _first_shape(call: Call) -> tuple[int, ...]:
    return shape_of(next(iter(call.inputs)))


def named_dims(call: Call) -> tuple[int, ...]:
    """The dimensions of its first input that a call names, all where it names none."""
    ndim, schema = len(_first_shape(call)), call.target._schema
    for place, argument in enumerate(schema.arguments):
        if argument.name in ("dim", "dims"):
            default = argument.default_value
            named = (
                call.args[place] if place < len(call.args) else call.node.kwargs.get(argument.name, default)
            )
            listed: Sequence[Any] = [named] if isinstance(named, int) else [*(named or range(ndim))]
            return tuple(dim % ndim for dim in listed)
    return tuple(range(ndim))


ROWWISE: dict[Any, Callable[[Call], Operator]] = {
    **dict.fromkeys((_aten.clone.default, _aten._to_copy.default, _aten.alias.default), elementwise),
    **dict.fromkeys((_aten.where.self, _aten.lift_fresh_copy.default, _aten.addcmul.default), elementwise),
    **dict.fromkeys((_aten.log_sigmoid_forward.default, _aten.complex.default), elementwise),
    **dict.fromkeys((_aten._softmax.default, _aten._log_softmax.default, _aten.flip.default), along),
    _aten._safe_softmax.default: along,
    **dict.fromkeys((_aten.scatter.value, _aten.scatter.src, _aten.cat.default), along),
    **dict.fromkeys((_aten.cumsum.default, _aten.sort.default, _aten.topk.default), along),
    _aten.index_select.default: along,
    **dict.fromkeys((_aten.split.Tensor, _aten.split_with_sizes.default, _aten.slice.Tensor), along),
    **dict.fromkeys((_aten.sum.default, _aten.sum.dim_IntList, _aten.mean.default, _aten.mean.dim), without),
    **dict.fromkeys((_aten.amax.default, _aten.amin.default, _aten.max.dim, _aten.min.dim), without),
    **dict.fromkeys((_aten.var_mean.correction, _aten.argmax.default, _aten.argmin.default), without),
    **dict.fromkeys((_aten.select.int, _aten.unbind.int, _aten.any.dim, _aten.prod.dim_int), without),
    **dict.fromkeys((_aten.squeeze.dims, _aten.squeeze.dim), squeezed),
    **dict.fromkeys((_aten.permute.default, _aten.transpose.int), permuted),
    **dict.fromkeys((_aten.view.default, _aten._unsafe_view.default, _aten.reshape.default), viewed),
    **dict.fromkeys((_aten.mm.default, _aten.bmm.default, _aten.linear.default), multiplied),
    **dict.fromkeys((_aten.addmm.default, _aten.baddbmm.default), multiplied),
    **dict.fromkeys((_aten.full_like.default, _aten.zeros_like.default, _aten.ones_like.default), made_like),
    **dict.fromkeys((_aten.linalg_vector_norm.default, _aten.logsumexp.default), without),
    _aten.scaled_dot_product_attention.default: attended,
    **dict.fromkeys((_aten._euclidean_dist.default, _aten._cdist_forward.default), distances),
    _aten.gather.default: gathered,
    _aten.detach_copy.default: detached,
    _aten.unsqueeze.default: unsqueezed,
    _aten.expand.default: expanded,
    _aten.embedding.default: embedded,
    operator.getitem: picked,
}

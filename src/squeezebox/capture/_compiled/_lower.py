"""The same joint graph of forward and backward, with less that lives at a time. No value changes."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

_aten = torch.ops.aten
_PRODUCTS = (_aten.mm.default, _aten.addmm.default, _aten.bmm.default)
_VIEWS = (_aten.permute.default, _aten.t.default, _aten.transpose.int, _aten.view.default)


def lower_peaks(graph: fx.Graph, results: int) -> None:
    """Change a joint graph in place; the first ``results`` of its outputs are forward's.

    Gradients of weights come before those of inputs, and a stack that is copied into another order is made
    in that order.
    """
    _weights_first(graph, results)
    for node in list(graph.nodes):
        if node.target is _aten.clone.default:
            _stack_permuted(node)
    graph.eliminate_dead_code()
    graph.lint()


def _weights_first(graph: fx.Graph, results: int) -> None:
    """Of two products with one gradient, first the one that ends what its input lives for.

    Autograd computes the input's gradient first, of the same size as the input, and holds both.
    """
    outputs: Any = graph.output_node().args[0]
    place = {node: number for number, node in enumerate(graph.nodes)}
    weights = list[fx.Node]()
    for node in outputs[results:]:
        while isinstance(node, fx.Node) and node.target in _VIEWS:
            node = node.args[0]
        if isinstance(node, fx.Node) and node.target in _PRODUCTS:
            weights.append(node)
    begun = max((place[node] for node in outputs[:results] if isinstance(node, fx.Node)), default=-1)
    backward = [node for node in graph.nodes if place[node] > begun]
    products = [node for node in backward if node.target in _PRODUCTS and node not in weights]
    for weight in weights:
        last, own = weight, _storages(weight)
        for node in products:
            later = all(place[user] > place[weight] for user in node.users)
            if place[node] < place[weight] and later and own & _storages(node):
                last.append(node)
                last = node


def _storages(node: fx.Node) -> set[int]:
    """Of what it reads."""
    values = (each.meta.get("val") for each in node.all_input_nodes)
    return {each.untyped_storage()._cdata for each in values if isinstance(each, torch.Tensor)}


def _stack_permuted(copy: fx.Node) -> None:
    """A copy of a permuted stack, as of the gradients of queries, keys and values: stacked in that order.

    Inductor would hold the parts, the stack and the copy at once.
    """
    found = _stacked(copy)
    if found is None:
        return
    parts, dims = found
    along = dims.index(0)
    own = [dim - 1 for dim in dims if dim != 0]
    with copy.graph.inserting_before(copy):
        pieces = [_call(_aten.permute.default, part, own) for part in parts]
        made = _call(
            _aten.cat.default, [_call(_aten.unsqueeze.default, each, along) for each in pieces], along
        )
    if made.meta["val"].stride() == copy.meta["val"].stride():
        made.meta = {**copy.meta, "val": made.meta["val"]}
        copy.replace_all_uses_with(made)


def _stacked(copy: fx.Node) -> tuple[list[fx.Node], list[int]] | None:
    """The parts, stacked along a first dimension, and the order of dimensions in which that is copied."""
    nodes = [copy]
    for target in (_aten.permute.default, _aten.view.default, _aten.cat.default):
        source = nodes[-1].args[0]
        if not isinstance(source, fx.Node) or source.target is not target or len(source.users) != 1:
            return None
        nodes.append(source)
    _, permute, view, cat = nodes
    parts: Any = cat.args[0]
    dims: Any = permute.args[1]
    stacked = tuple(view.meta["val"].shape)
    same = all((len(parts), *each.meta["val"].shape) == stacked for each in parts)
    if cat.args[1:] not in ((), (0,)) or not same:
        return None
    return parts, [dim % len(dims) for dim in dims]


def _call(target: Any, values: Any, extra: Any) -> fx.Node:
    first = values[0] if isinstance(values, list) else values
    node: fx.Node = first.graph.call_function(target, (values, extra))
    known: Any = fx.map_arg(node.args, lambda each: each.meta["val"])
    with first.meta["val"].fake_mode:
        node.meta["val"] = target(*known)
    return node

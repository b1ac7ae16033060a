"""What backward must read exactly: masks and indices that it would compute again from values that lost some.

A comparison, an index or a rounding jumps where its operand crosses a threshold; an error there does not fade
with the bound. Such a result is computed in forward, from exact values, and saved.
"""

from __future__ import annotations

import operator
from collections.abc import Container, Iterator

import torch
from torch import fx

aten = torch.ops.aten
_COMPARISONS = {
    overload
    for name in ("le", "lt", "ge", "gt", "eq", "ne")
    for overload in (getattr(aten, name).Scalar, getattr(aten, name).Tensor)
}
_JUMPS = {
    aten.sign.default,
    aten.sgn.default,
    aten.floor.default,
    aten.ceil.default,
    aten.round.default,
    aten.trunc.default,
    aten.frac.default,
    aten.fmod.Scalar,
    aten.fmod.Tensor,
    aten.remainder.Scalar,
    aten.remainder.Tensor,
}
# Backwards that compare within; the place of the argument that they compare.
_COMPARING_BACKWARDS: dict[object, int] = {
    aten.threshold_backward.default: 1,
    aten.leaky_relu_backward.default: 1,
    aten.hardtanh_backward.default: 1,
    aten.hardswish_backward.default: 1,
    aten.hardsigmoid_backward.default: 1,
}
# The sign of the result is that of the operand, for these.
_SIGN_KEEPING = {aten.relu.default, aten.clone.default, aten.alias.default}


def behind(graph: fx.Graph, inputs: Container[fx.Node]) -> set[fx.Node]:
    """These inputs and all that hangs on them."""
    found: set[fx.Node] = set()
    for node in graph.nodes:
        if node in inputs or any(used in found for used in node.all_input_nodes):
            found.add(node)
    return found


def exact_reads(
    backward: fx.Graph, lossy: Container[fx.Node], gradients: Container[fx.Node]
) -> list[fx.Node]:
    """Nodes of backward that must come from forward, in order.

    Args:
        backward: the graph after the cut.
        lossy: its inputs that will be off by up to their bounds, with zeros and signs as they were.
        gradients: its nodes that hang on gradients; these stay.
    """
    wrong: set[fx.Node] = set()  # may differ from what forward saw
    signed: set[fx.Node] = set()  # wrong, but with the right sign
    found: dict[fx.Node, None] = {}
    for node in backward.nodes:
        if node in lossy:
            wrong.add(node)
            signed.add(node)
        elif node in gradients:
            found |= {used: None for used in _compared(node) if used in wrong and used not in signed}
        elif not any(used in wrong for used in node.all_input_nodes):
            continue
        elif _jumps(node) and not _is_inner(node, gradients):
            if not _reads_signs_only(node, wrong, signed):
                found[node] = None
        else:
            wrong.add(node)
            if _keeps_sign(node) and node.all_input_nodes[0] in signed:
                signed.add(node)
    return list(found)


def _compared(node: fx.Node) -> Iterator[fx.Node]:
    place = _COMPARING_BACKWARDS.get(node.target)
    operand = None if place is None else node.args[place]
    if isinstance(operand, fx.Node):
        yield operand


def _reads_signs_only(node: fx.Node, wrong: Container[fx.Node], signed: Container[fx.Node]) -> bool:
    """Whether a comparison with zero, or a sign, of values whose signs are right."""
    if any(used in wrong and used not in signed for used in node.all_input_nodes):
        return False
    if node.target in (aten.sign.default, aten.sgn.default):
        return True
    return node.target in _COMPARISONS and node.args[1:] == (0,)


def _jumps(node: fx.Node) -> bool:
    value = node.meta.get("val")
    whole = isinstance(value, torch.Tensor) and not (value.is_floating_point() or value.is_complex())
    return whole or node.target in _JUMPS


def _is_inner(node: fx.Node, gradients: Container[fx.Node]) -> bool:
    """Whether only other such nodes read it, which will be saved in its place."""
    readers = list(node.users)
    return bool(readers) and all(
        user.op == "call_function" and _jumps(user) and user not in gradients for user in readers
    )


def _keeps_sign(node: fx.Node) -> bool:
    return node.target in _SIGN_KEEPING or is_view(node)


def is_view(node: fx.Node) -> bool:
    """Whether the node only looks at its first operand's storage."""
    if node.target is operator.getitem:
        source = node.args[0]
        return isinstance(source, fx.Node) and is_view(source)
    if node.target is aten._unsafe_view.default:
        return True
    schema = getattr(node.target, "_schema", None)
    first = schema.arguments[0] if schema is not None and schema.arguments else None
    return first is not None and first.alias_info is not None and not first.alias_info.is_write


def storage_of(node: fx.Node) -> fx.Node:
    """The node that made the storage which this one looks at."""
    while is_view(node) and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return node


def in_forward(node: fx.Node, forward: fx.Graph, known: dict[fx.Node, fx.Node]) -> fx.Node:
    """Forward's node for one of backward's: the same, or a copy with all that it is computed from.

    ``known`` gives forward's nodes for backward's inputs; what is found is added.
    """
    if node not in known:
        arguments = [in_forward(used, forward, known) for used in node.all_input_nodes]
        same = (own for own in forward.nodes if own.name == node.name and own.target == node.target)
        known[node] = next(same, None) or _copied(node, forward, arguments, known)
    return known[node]


def _copied(
    node: fx.Node, forward: fx.Graph, arguments: list[fx.Node], known: dict[fx.Node, fx.Node]
) -> fx.Node:
    """A copy behind the last of its arguments, and behind the graph's inputs."""
    wanted = {*arguments, *(each for each in forward.nodes if each.op == "placeholder")}
    last = next(each for each in reversed(forward.nodes) if each in wanted)
    with forward.inserting_before(last.next):
        return forward.node_copy(node, known.__getitem__)

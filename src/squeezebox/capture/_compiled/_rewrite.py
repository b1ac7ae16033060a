"""What forward hands to backward, made smaller: values in few bits, masks in one, the rest exact.

A comparison, an index or a rounding jumps where its operand crosses a threshold; an error there does not fade
with the bound. Such a result is computed in forward, from exact values, and saved.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import fx

from squeezebox.capture._compiled import _codes
from squeezebox.capture._compiled._adapter import (
    Handed,
    Split,
    add_saved,
    copied_bytes,
    emit,
    finish,
    pool_window,
    replace_saved,
)
from squeezebox.capture._compiled._codes import module_path, operator_name
from squeezebox.capture._store import SMALL_BYTES
from squeezebox.reports import CompiledReport, CompiledTensor

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


# Bits of forward's node, taken by backward's, not searched beyond gradients; None: keep it.
Choose = Callable[[fx.Node, fx.Node, Container[fx.Node]], int | None]

# Near zero, a small error in what these read is a large one in their results.
_SINGULAR = frozenset({"reciprocal", "rsqrt", "sqrt", "log", "log2", "log10", "log1p"})
_EXACT = frozenset({"softmax", "logsoftmax"})
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_IMAGE = ("conv", "batchnorm", "pool", "relu")


def rewrite(
    plain: Split, split: Split, choose: Choose, packs: Callable[[fx.Node], bool] = lambda _: True
) -> CompiledReport:
    """Pack what ``split`` saves; ``plain`` is the same graph as Inductor alone would cut it.

    Nodes of forward that are not to be packed, by ``packs``, are saved as they are.
    """
    owned = owned_storages(split)
    free = [handed for handed in split.saved if storage_of(handed.node) not in owned]
    gradients = behind(split.backward.graph, set(split.gradients))
    bits = {
        handed: choose(handed.node, handed.input, gradients)
        for handed in free
        if packs(handed.node) and _may_lose(handed)
    }
    lossy = {handed: width for handed, width in bits.items() if width is not None}
    rows = _save_exact_reads(split, lossy, gradients)
    split.backward.graph.eliminate_dead_code()
    for handed in free:
        if not handed.input.users:  # only what is saved in its place now was read off it
            replace_saved(split, handed, [])
        elif handed in lossy:
            rows.append(_pack_values(split, handed, lossy[handed]))
        elif packs(handed.node) and _is_large_flags(handed.node):
            rows.append(_pack_flags(split, handed))
        elif packs(handed.node) and _index_bits(handed.node) is not None:
            rows.append(_pack_indices(split, handed))
        else:
            rows.append(_row(handed.node, None, [handed.node]))
    finish(split)
    return CompiledReport(
        saved_bytes=held_bytes(plain),
        packed_bytes=held_bytes(split),
        tensors=tuple(sorted(rows, key=lambda row: -row.saved_bytes)),
        copied_bytes=copied_bytes(split),
    )


def codes(graph: fx.Graph, forward: Iterable[fx.Node], choose: Choose) -> dict[fx.Node, tuple[int, int]]:
    """Of values of a joint graph that can be packed: bytes of the codes, and what packing takes besides.

    The bits are those of the operators that read a value, itself or through what Inductor fuses with them.
    """
    wanted = {*forward}
    stops = {node for node in graph.nodes if node not in wanted or not _is_fused(node)}
    found = dict[fx.Node, tuple[int, int]]()
    for node in wanted:
        if node.op != "call_function" or not isinstance(node.meta.get("val"), torch.Tensor):
            continue
        own = Handed(node, node)
        bits = choose(node, node, stops) if _may_lose(own) else None
        if bits is not None:
            shape = node.meta["val"].shape
            layout = _codes.layout_of(tuple(shape), _order(own, flat=False), bits, channel=_channel(own))
            rows = math.prod(shape) // math.prod(shape[layout.order[place]] for place in layout.rows)
            found[node] = math.prod(shape) * layout.bits // 8 + 5 * rows, 8 * rows
        elif _is_large_flags(node):
            found[node] = nbytes(node) // 8, 0
        elif (width := _index_bits(node)) is not None:
            found[node] = node.meta["val"].numel() * width // 8, 0
    return found


def _is_fused(node: fx.Node) -> bool:
    return is_view(node) or torch.Tag.pointwise in getattr(node.target, "tags", ())


def owned_storages(split: Split) -> set[fx.Node]:
    """Storages that somebody else holds anyway: parameters, buffers, the caller's inputs and results."""
    inputs = {node for node in split.forward.graph.nodes if node.op == "placeholder"}
    results = {storage_of(node) for node in split.outputs if isinstance(node, fx.Node)}
    return inputs | results


def held_bytes(split: Split) -> int:
    """Bytes that live between forward and backward and that nobody else holds, each storage once."""
    owned = owned_storages(split)
    others = [node for node in split.others if isinstance(node, fx.Node)]
    nodes = {storage_of(node) for node in [*(handed.node for handed in split.saved), *others]}
    return sum(nbytes(node) for node in nodes if node not in owned)


def nbytes(node: fx.Node) -> int:
    """Bytes of a node's tensor; 0 where it makes none, or its size is not known."""
    value = node.meta.get("val")
    size = value.numel() * value.element_size() if isinstance(value, torch.Tensor) else 0
    return size if isinstance(size, int) else 0


def _may_lose(handed: Handed) -> bool:
    """Whether these are many values, of known shape, of which backward reads no more than the law covers."""
    value = handed.node.meta["val"]
    if value.dtype not in _DTYPES or not all(isinstance(size, int) for size in value.shape):
        return False
    if nbytes(handed.node) < SMALL_BYTES or _is_statistic(handed.node):
        return False
    return not any(_is_delicate(user, handed) for user in (handed.node, *readers(handed.input)))


def _is_statistic(node: fx.Node) -> bool:
    """Means, deviations and log-sums of rows: few, and every element of a row hangs on one of them."""
    value = node.meta["val"]
    second = not is_view(node) and len(node.args) > 1 and isinstance(node.args[1], int) and node.args[1] > 0
    return (value.dim() > 1 and value.shape[-1] == 1) or (second and "getitem" in str(node.target))


def _is_delicate(node: fx.Node, handed: Handed) -> bool:
    name = str(getattr(node.target, "_opname", ""))
    if operator_name(node) in _EXACT or name in _SINGULAR or name == "as_strided":
        return True
    second = node.args[1] if len(node.args) > 1 else None
    if name == "pow":
        return not (isinstance(second, (int, float)) and second >= 1)
    return name == "div" and isinstance(second, fx.Node) and storage_of(second) is handed.input


def readers(node: fx.Node) -> list[fx.Node]:
    """Operators that read a tensor, itself or through views."""
    found: list[fx.Node] = []
    for user in node.users:
        found.extend(readers(user) if is_view(user) else [user])
    return found


def _is_large_flags(node: fx.Node) -> bool:
    value = node.meta["val"]
    fixed = all(isinstance(size, int) for size in value.shape)
    return value.dtype == torch.bool and fixed and nbytes(node) >= SMALL_BYTES


def _index_bits(node: fx.Node) -> int | None:
    """The fewest bits that hold a max pool's offsets, where they are many and fewer than their own."""
    window = pool_window(node)
    if window is None or nbytes(node) < SMALL_BYTES:
        return None
    return min((bits for bits in _codes.BITS if bits < 8 and window <= 1 << bits), default=None)


def _save_exact_reads(
    split: Split, lossy: Iterable[Handed], gradients: Container[fx.Node]
) -> list[CompiledTensor]:
    """Masks and indices that backward would take from lossy values come from forward instead."""
    known = {handed.input: handed.node for handed in split.saved}
    wanted = exact_reads(split.backward.graph, {handed.input for handed in lossy}, gradients)
    own_nodes = [in_forward(node, split.forward.graph, known) for node in wanted]
    rows = []
    for node, own in zip(wanted, own_nodes, strict=True):
        [found] = add_saved(split, split.saved[0], [own])
        handed = split.saved[0]
        node.replace_all_uses_with(found)
        flags = _is_large_flags(own)
        rows.append(_pack_flags(split, handed) if flags else _row(own, None, [own]))
    return rows


def _pack_values(split: Split, handed: Handed, bits: int) -> CompiledTensor:
    value = handed.node.meta["val"]
    channel = _channel(handed)
    layout = _codes.layout_of(tuple(value.shape), _order(handed, flat=False), bits, channel=channel)
    pack = functools.partial(_codes.pack, layout=layout)
    unpack = functools.partial(_codes.unpack, layout=layout, dtype=value.dtype)
    pieces = _exchange(split, handed, pack, unpack)
    return _row(handed.node, layout.bits, pieces)


def _pack_flags(split: Split, handed: Handed) -> CompiledTensor:
    shape = tuple(handed.node.meta["val"].shape)
    layout = _codes.layout_of(shape, _order(handed, flat=False), 1)
    if layout.bits != 1:
        layout = dataclasses.replace(layout, order=_order(handed, flat=True))
    pack = functools.partial(_codes.pack_flags, layout=layout)
    unpack = functools.partial(_codes.unpack_flags, shape=shape, layout=layout)
    return _row(handed.node, 1, _exchange(split, handed, pack, unpack))


def _pack_indices(split: Split, handed: Handed) -> CompiledTensor:
    value = handed.node.meta["val"]
    bits = _index_bits(handed.node) or 8
    layout = _codes.layout_of(tuple(value.shape), _order(handed, flat=False), bits)
    pack = functools.partial(_codes.pack_indices, layout=layout)
    unpack = functools.partial(_codes.unpack_indices, layout=layout, dtype=value.dtype)
    return _row(handed.node, layout.bits, _exchange(split, handed, pack, unpack))


def _exchange(
    split: Split, handed: Handed, pack: Callable[..., Any], unpack: Callable[..., Any]
) -> list[fx.Node]:
    """Pack right behind the tensor in forward, unpack right before its first use in backward."""
    with split.forward.graph.inserting_before(handed.node.next):
        pieces = emit(split.forward.graph, pack, [handed.node])
    users = set(handed.input.users)
    first = next(node for node in split.backward.graph.nodes if node in users)
    inputs = replace_saved(split, handed, pieces)
    with split.backward.graph.inserting_before(first):
        [decoded] = emit(split.backward.graph, unpack, inputs)
    for user in users:
        user.replace_input_with(handed.input, decoded)
    return pieces


def _channel(handed: Handed) -> int | None:
    """The channels' dim of an image, as convolutions and their companions take it."""
    if handed.node.meta["val"].dim() < 3:
        return None
    around = [handed.node, *handed.node.users, *handed.input.users]
    image = any(word in operator_name(node) for node in around for word in _IMAGE)
    return 1 if image else None


def _order(handed: Handed, *, flat: bool) -> tuple[int, ...]:
    """Dims in the order in which codes are laid out, outermost first; ``flat`` ones lose their shape.

    On the CPU Inductor lays out images with the channels innermost, whatever the strides of the traced tensor
    say, and any other tensor of four dims too. So an image's codes keep its dims, and go the same way.
    """
    value = handed.node.meta["val"]
    if value.device.type != "cpu" or _channel(handed) is None:
        return _codes.memory_order(value.stride())
    return (0, *range(2, value.dim()), 1) if flat else tuple(range(value.dim()))


def _row(node: fx.Node, bits: int | None, pieces: Sequence[fx.Node]) -> CompiledTensor:
    value = node.meta["val"]
    return CompiledTensor(
        name=node.name,
        module=module_path(node),
        shape=tuple(value.shape),
        dtype=str(value.dtype).removeprefix("torch."),
        bits=bits,
        saved_bytes=math.prod(value.shape) * value.element_size(),
        packed_bytes=sum(nbytes(piece) for piece in pieces),
    )

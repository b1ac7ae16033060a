"""Every node's part in streaming: rows, reductions and values without rows, and in which pass it is known."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from squeezebox.reports import human_bytes
from squeezebox.schema import UnsupportedModelError
from squeezebox.streaming._reductions import Gathered, Reduction, Sum, reduction
from squeezebox.streaming._resampling import RESAMPLED
from squeezebox.streaming._rows import Call, Operator, Part, Rows, is_continuous, place_of, refusal
from squeezebox.streaming._rowwise import ROWWISE, elementwise, named_dims
from squeezebox.streaming._trace import DETACHED, Program
from squeezebox.streaming._windows import (
    average_pooled,
    constant_padded,
    convolved,
    flipped,
    joined,
    max_pooled,
    shuffled,
    sliced,
    unshuffled,
)
from squeezebox.streaming._written import gather, written

_aten = torch.ops.aten
_RULES: Mapping[Any, Callable[[Call], Operator]] = {
    **ROWWISE,
    **RESAMPLED,
    _aten.convolution.default: convolved,
    _aten.max_pool2d_with_indices.default: max_pooled,
    _aten.avg_pool2d.default: average_pooled,
    _aten.constant_pad_nd.default: constant_padded,
    _aten.pixel_shuffle.default: shuffled,
    _aten.pixel_unshuffle.default: unshuffled,
}
_DROPOUT = (_aten.native_dropout.default, _aten.scaled_dot_product_attention.default)
_ALONG_ROWS = {_aten.slice.Tensor: sliced, _aten.flip.default: flipped, _aten.cat.default: joined}
VIEWS = frozenset(
    {
        *(_aten.view.default, _aten._unsafe_view.default, _aten.reshape.default, _aten.expand.default),
        *(_aten.squeeze.dims, _aten.squeeze.dim, _aten.unsqueeze.default, _aten.permute.default),
        *(_aten.transpose.int, _aten.alias.default, DETACHED),
    }
)
_LINEAR = frozenset(
    {
        *(_aten.add.Tensor, _aten.sub.Tensor, _aten.neg.default, _aten.clone.default, _aten._to_copy.default),
        *(_aten.mul.Tensor, _aten.mul.Scalar, _aten.div.Tensor, _aten.div.Scalar, _aten.view.default),
        *(_aten.sum.default, _aten.sum.dim_IntList, _aten.mean.default, _aten.mean.dim, _aten.expand.default),
        *(_aten.squeeze.dims, _aten.squeeze.dim, _aten.unsqueeze.default, _aten.select.int),
    }
)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Streamed:
    """A program, and how to stream it.

    ``rows`` are the nodes that have the streamed axis, ``operators`` those of them that are made, and
    ``reductions`` take it away. A node's ``level`` says how many passes over the image come before it can be
    known: those with rows are made in every pass from theirs on, reductions in the pass of their input's
    level. Values without rows, ``single``, are computed once between passes, in order. ``maps`` are the
    outputs that have rows.
    ``across`` is the same along the image's other axis, where tiles are possible.
    """

    program: Program
    rows: Mapping[Node, Rows]
    operators: Mapping[Node, Operator]
    reductions: Mapping[Node, Reduction]
    level: Mapping[Node, int]
    single: tuple[Node, ...]
    differentiable: frozenset[Node]
    maps: tuple[Node, ...]
    across: Streamed | None = None

    @property
    def unit(self) -> int:
        """Image rows to a row of the smallest feature map."""
        count = self.rows[self.program.image].count
        return max(1, round(count / min(rows.count for rows in self.rows.values())))

    @property
    def passes(self) -> list[int]:
        """The levels at which there is something to reduce or to give, in order."""
        return sorted({*map(self.pass_of, self.reductions), *map(self.level.__getitem__, self.maps)})

    @property
    def draws(self) -> bool:
        """Whether values without rows are drawn at random."""
        return any(map(_draws, self.single))

    def pass_of(self, reduced: Node) -> int:
        """The pass in which a reduction is made."""
        return self.level[self.source(reduced)]

    def column_dim(self, node: Node) -> int:
        """The dimension of the image's other axis, of a node where no view has merged the axes."""
        assert self.across is not None
        return self.across.rows[node].dim

    def part(self, node: Node, apart: Tensor, start: int, stop: int, columns: Part | None) -> Tensor:
        """Rows, of some columns or all, of a node's tensor that has the streamed axis apart, as a view."""
        dim = self.rows[node].dim
        found = apart.narrow(dim + 1, start, stop - start)
        if columns is None:
            return found
        return found.narrow(self.apart_dim(node), columns[0], columns[1] - columns[0])

    def apart_dim(self, node: Node) -> int:
        """As :meth:`column_dim`, where the streamed axis is apart."""
        across = self.column_dim(node)
        return across + 2 * (across > self.rows[node].dim)

    def source(self, reduced: Node) -> Node:
        """What a reduction reduces, or a view shows."""
        return next(node for node in reduced.all_input_nodes if node in self.rows)

    def crossing(self) -> frozenset[Node]:
        """What later passes read of an earlier one's; they recompute views, and level 0 from the image."""
        return frozenset(
            self._viewed(node)
            for node in self.operators
            if self.level[node] > 0
            and any(each in self.operators and self.level[each] > self.level[node] for each in node.users)
        )

    def _viewed(self, node: Node) -> Node:
        while node.target in VIEWS:
            node = self.source(node)
        return node

    @property
    def gathered(self) -> list[Node]:
        """The reductions that are all rows, which some operator needs at once."""
        return [node for node, each in self.reductions.items() if isinstance(each, Gathered)]

    @property
    def gathered_bytes(self) -> dict[str, int]:
        """Bytes of these, by operator and module."""
        found = dict[str, int]()
        for node in self.gathered:
            user = next(iter(node.users))
            name = f"{user.target} of {place_of(user)}"
            found[name] = found.get(name, 0) + nbytes_of(node)
        return found

    def reduced_in(self, number: int) -> list[Node]:
        """The reductions of a pass."""
        return [node for node in self.reductions if self.pass_of(node) == number]


def analyse(program: Program, axis: int, *, write: bool = True) -> Streamed:
    """Give every node that an output, or a buffer's new value, depends on its part.

    Args:
        program: the traced program.
        axis: the image's dimension that is streamed, -2 or -1.
        write: operators along the axis may be written as others, in the program's graph.

    Raises:
        UnsupportedModelError: an operator cannot be streamed exactly; names its module and why.
    """
    needed = ancestors([*(each for each in program.outputs if isinstance(each, Node)), *program.mutations])
    nodes = [node for node in program.graph.nodes if node in needed]
    rows = _inputs(program, axis)
    parted = parts(nodes, rows, write)
    if parted is None:
        return analyse(program, axis)
    operators, reductions = parted
    _require_values(program, rows)
    differentiable = _differentiable(program, nodes)
    streamed = [node for node in nodes if node in rows]
    return Streamed(
        program=program,
        rows={node: rows[node] for node in streamed},
        operators=operators,
        reductions=reductions,
        level=_levels(nodes, rows, reductions, differentiable),
        single=tuple(
            node for node in nodes if node not in rows and node not in reductions and node not in program.held
        ),
        differentiable=differentiable,
        maps=tuple(node for node in dict.fromkeys(program.outputs) if node in rows),
    )


def parts(
    nodes: list[Node], rows: dict[Node, Rows], write: bool
) -> tuple[dict[Node, Operator], dict[Node, Reduction]] | None:
    """Operators and reductions of nodes; adds to ``rows`` what the operators make.

    None where an operator has been written as others, or gets all rows at once, so that the nodes are not
    what they were.
    """
    operators: dict[Node, Operator] = {}
    reductions: dict[Node, Reduction] = {}
    for node in nodes:
        if node.op == "placeholder":
            continue
        call = Call(node=node, inputs={each: rows[each] for each in node.all_input_nodes if each in rows})
        _refuse_random(call)
        if not call.inputs:
            continue
        if write and written(call):
            return None
        try:
            found = (reduction(call) if len(call.inputs) == 1 else None) or _operator(call, nodes)
        except UnsupportedModelError as error:
            if not write:
                raise
            gather(call, error)
            return None
        if isinstance(found, Operator):
            operators[node], rows[node] = found, found.rows
        else:
            reductions[node] = found
    return operators, reductions


def with_across(streamed: Streamed, axis: int, kept: frozenset[Node]) -> Streamed:
    """The same with the image's other axis, of which tiles have a part.

    Raises:
        UnsupportedModelError: an operator cannot be streamed along it, or only one of the axes is left
            somewhere, or both are merged into one where ``kept`` or given.
    """
    for node in streamed.gathered:
        raise _no_tiles(next(iter(node.users)), "needs all rows at once")
    across = analyse(streamed.program, axis, write=False)
    for node in streamed.program.graph.nodes:
        both = [each.rows[node] for each in (streamed, across) if node in each.rows]
        if len(both) == 1:
            raise _no_tiles(node, "leaves one of the image's two axes, and tiles need both")
        if (node in kept or node in streamed.maps) and any(rows.merged for rows in both):
            raise _no_tiles(node, "merges the image's two axes, and what is filed or given has them apart")
    return replace(streamed, across=across)


def _no_tiles(node: Node, why: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"{place_of(node)} cannot be taken in tiles: {node.target} {why}. Give height= one number, for "
        "strips, or memory=."
    )


def require_gathered(streamed: Streamed, most_bytes: int, of: str) -> None:
    """Raise UnsupportedModelError where what is needed at once takes more than these bytes ``of`` something.

    That is all that is gathered, and the largest value that is computed of it.
    """
    gathered = streamed.gathered
    if not gathered:
        return
    largest = max(streamed.single, key=nbytes_of)
    nbytes = sum(map(nbytes_of, gathered)) + nbytes_of(largest)
    if nbytes > most_bytes:
        raise UnsupportedModelError(
            f"{max(gathered, key=nbytes_of).meta['why']} With all rows at once it would take up to "
            f"{human_bytes(nbytes)}, of which {largest.target} of {place_of(largest)} makes "
            f"{human_bytes(nbytes_of(largest))}, and {human_bytes(most_bytes)}, half of {of}, are allowed."
        )


def nbytes_of(node: Node) -> int:
    """Of the node's tensors; where the size depends on values, what it is at most."""
    value = node.meta.get("val")
    tensors = value if isinstance(value, tuple | list) else [value]
    return sum(_most(each.numel()) * each.element_size() for each in tensors if isinstance(each, Tensor))


def _most(size: Any) -> int:
    if isinstance(size, int):
        return size

    from torch.utils._sympy.value_ranges import bound_sympy  # slow to import

    upper = bound_sympy(size.node.expr, size.node.shape_env.var_to_range).upper
    return int(upper) if upper.is_finite else 0


def is_linear(streamed: Streamed, last: int) -> bool:
    """Whether the loss is linear in what the last pass reduces, so that its gradient is known beforehand."""
    varying = set(streamed.reduced_in(last))
    if not all(isinstance(streamed.reductions[node], Sum) for node in varying):
        return False
    wanted = ancestors([*streamed.program.outputs])
    for node in streamed.single:
        inside = [each for each in node.all_input_nodes if each in varying]
        if not inside or node not in wanted:
            continue
        product = node.target in (_aten.mul.Tensor, _aten.div.Tensor)
        if node.target not in _LINEAR or (product and (len(inside) > 1 or node.args[0] is node.args[1])):
            return False
        if node.target is _aten.div.Tensor and node.args[1] in varying:
            return False
        varying.add(node)
    return True


def ancestors(ends: list[Node]) -> set[Node]:
    """These nodes and all that they are made from."""
    found, ahead = set[Node](), [*ends]
    while ahead:
        node = ahead.pop()
        if node not in found:
            found.add(node)
            ahead.extend(node.all_input_nodes)
    return found


def _inputs(program: Program, axis: int) -> dict[Node, Rows]:
    """The image, and targets whose last two dimensions are the image's or a feature map's of the model."""
    image = program.image.meta["val"]
    maps, from_image = {tuple(image.shape[-2:])}, {program.image}
    for node in program.graph.nodes:
        if not from_image.isdisjoint(node.all_input_nodes):
            from_image.add(node)
            value = node.meta.get("val")
            if isinstance(value, Tensor) and value.dim() > 2 and value.shape[axis] > 1:
                maps.add(tuple(value.shape[-2:]))
    found = {program.image: Rows(dim=image.dim() + axis, count=image.shape[axis])}
    for node in program.targets:
        value = node.meta.get("val")
        if isinstance(value, Tensor) and value.dim() >= 2 and tuple(value.shape[-2:]) in maps:
            found[node] = Rows(dim=value.dim() + axis, count=value.shape[axis])
    return found


def _draws(node: Node) -> bool:
    """Whether it draws random numbers: attention only where it has dropout."""
    if node.target is _aten.scaled_dot_product_attention.default:
        return bool(node.args[4] if len(node.args) > 4 else node.kwargs.get("dropout_p"))
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


def _refuse_random(call: Call) -> None:
    if call.target in _DROPOUT and not call.inputs:
        return  # of what is computed once
    if not _draws(call.node):
        return
    if not call.inputs:
        raise call.refuse(
            "it draws random numbers, others each time that it is computed; draw them before, and give them "
            "with the target"
        )
    raise refusal(
        call.node,
        "it draws random numbers, others for strips than for the whole image, and others again when a strip "
        "is computed a second time",
        "" if call.target is _aten.native_dropout.default else "Set its probability to 0, or call eval()",
    )


def _operator(call: Call, needed: list[Node]) -> Operator:
    target = call.node.target
    if target is _aten.max_pool2d_with_indices.default and any(
        user in needed and user.args[1] == 1 for user in call.node.users
    ):
        raise call.refuse("the indices that it gives would be those within a strip")
    if target in _ALONG_ROWS and any(rows.dim in named_dims(call) for rows in call.inputs.values()):
        return _ALONG_ROWS[target](call)
    rule = _RULES.get(target)
    if rule is None and torch.Tag.pointwise in getattr(target, "tags", ()):
        rule = elementwise
    if rule is None:
        raise call.refuse("how its rows depend on the image's is not known")
    return rule(call)


def _require_values(program: Program, rows: Mapping[Node, Rows]) -> None:
    if program.loss is not None and program.loss in rows:
        raise refusal(program.loss, "it has a value for every row; take its sum or mean")
    for node in program.mutations:
        if node in rows:
            raise refusal(node, "a buffer gets a value for every row")


def _differentiable(program: Program, nodes: list[Node]) -> frozenset[Node]:
    found = {*program.trained, *((program.image,) if program.by_image else ())}
    for node in nodes:
        value = node.meta.get("val")
        first = value[0] if isinstance(value, tuple | list) else value
        continuous = isinstance(first, Tensor) and is_continuous(first)
        if continuous and node.target is not DETACHED and not found.isdisjoint(node.all_input_nodes):
            found.add(node)
    return frozenset(found)


def _levels(
    nodes: list[Node],
    rows: Mapping[Node, Rows],
    reductions: Mapping[Node, Reduction],
    differentiable: frozenset[Node],
) -> dict[Node, int]:
    """Pass 0 is for what no parameter changes, such as how many pixels a loss counts."""
    level: dict[Node, int] = {}
    for node in nodes:
        above = max((level[each] for each in node.all_input_nodes), default=0)
        if node in rows and node in differentiable:
            above = max(above, 1)
        level[node] = above + (node in reductions)
    return level

"""A band of the image's columns, along which tiles go row by row.

A pass is taken over the band as over a strip, along the image's other axis, on tensors without memory that
have every row. What it does is recorded as a graph, and that graph is streamed along the rows as any other
is. So no operator knows of tiles.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.node import map_arg
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils import _pytree as pytree

from squeezebox.streaming._graph import Streamed, ancestors, parts
from squeezebox.streaming._rows import Part, run_node
from squeezebox.streaming._strip import Hands, Pass, Read, inputs_of, pass_to
from squeezebox.streaming._trace import DETACHED

_aten = torch.ops.aten


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Band:
    """Columns of a pass.

    ``work`` makes the pass's ends by the recorded graph, of every end these ``columns``. ``reads`` are the
    nodes, and their columns, that the graph's own inputs stand for. ``fixed`` are its values without rows,
    those of the whole pass as nodes, and ``single`` are computed of them.
    """

    work: Pass
    columns: Mapping[Node, Part]
    reads: Mapping[Node, tuple[Node, Part]]
    fixed: Mapping[Node, Any]
    single: tuple[Node, ...]

    def parts(self, start: int, stop: int, whole: int) -> dict[Node, Part]:
        """Which rows of every end a tile owns."""
        return self.work.parts(start, stop, whole)

    def sizes(self, owned: Mapping[Node, Part]) -> list[int]:
        """Columns of what a tile reads, and rows as :meth:`Pass.sizes`."""
        columns = (stop - start for _, (start, stop) in self.reads.values())
        return [*columns, *self.work.sizes(owned)]

    def run(self, owned: Mapping[Node, Part], singles: Mapping[Node, Any], hands: Hands) -> None:
        """Make a tile, as :meth:`Pass.run` a strip."""
        self.work.run(owned, self._values(singles), hands._replace(read=self._part(hands.read)))

    def run_again(self, owned: Mapping[Node, Part], singles: Mapping[Node, Any], hands: Hands) -> None:
        """Make a tile, as :meth:`Pass.run_again` a strip."""
        self.work.run_again(owned, self._values(singles), hands._replace(read=self._part(hands.read)))

    def _part(self, read: Read) -> Read:
        def part(node: Node, start: int, stop: int, columns: Part | None = None) -> Tensor:
            source, columns = self.reads[node]
            return read(source, start, stop, columns)

        return part

    def _values(self, singles: Mapping[Node, Any]) -> dict[Node, Any]:
        values = {
            node: singles[value] if isinstance(value, Node) else value for node, value in self.fixed.items()
        }
        for node in self.single:
            arguments, keywords = map_arg((node.args, node.kwargs), values.__getitem__)
            values[node] = run_node(node, arguments, keywords)
        return values


def band(work: Pass, start: int, stop: int) -> Band:
    """The band of a pass that owns the image's columns ``start`` to ``stop``."""
    sideways = crosswise(work)
    across = sideways.streamed
    owned = sideways.parts(start, stop, across.rows[across.program.image].count)
    demanded = sideways.demands(owned)
    inputs = [node for node in work.order if node in demanded and node not in work.operators]
    read = [(node, part) for node in inputs for part in demanded[node]]
    singles = inputs_of(work)
    made: dict[Node, Any] = {}

    def record(parts: list[Tensor], values: list[Any]) -> list[Any]:
        given, known = dict(zip(read, parts, strict=True)), dict(zip(singles, values, strict=True))
        sideways.run(owned, known, Hands(lambda node, *part: given[node, part], made.__setitem__))
        return [made[end] for end in owned]

    # Of operators that stream, only attention's own kernels do not.
    plain = sdpa_kernel(SDPBackend.MATH)
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad(), plain:
        fakes = [_part(across, node, *part) for node, part in read]
        values = pytree.tree_map_only(Tensor, _like, [node.meta["val"] for node in singles])
        recorded = make_fx(record)(fakes, values)
    return _streamed(work, recorded, owned, read, singles)


def crosswise(work: Pass) -> Pass:
    """The pass along the image's other axis."""
    across = work.streamed.across
    assert across is not None
    operators = {node: across.operators[node] for node in work.operators}
    return replace(work, streamed=across, operators=operators, known=frozenset())


def _part(across: Streamed, node: Node, start: int, stop: int) -> Tensor:
    value, rows = node.meta["val"], across.rows[node]
    shape = [*value.shape]
    shape[rows.dim] = rows.size(stop - start)
    return torch.empty(shape, dtype=value.dtype, device=value.device)


def _like(value: Tensor) -> Tensor:
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)


def _streamed(
    work: Pass, recorded: Any, owned: dict[Node, Part], read: list[tuple[Node, Part]], singles: list[Node]
) -> Band:
    """The recorded graph, streamed along the rows."""
    placeholders = recorded.graph.find_nodes(op="placeholder")
    (output,) = recorded.graph.find_nodes(op="output")
    for node in recorded.graph.find_nodes(op="call_function", target=_aten.detach.default):
        node.target = DETACHED
    needed = ancestors([*output.args[0]])
    nodes = [node for node in recorded.graph.nodes if node in needed]
    reads = dict(zip(placeholders, read, strict=False))
    fixed = dict(zip(placeholders[len(read) :], singles, strict=True))
    for node, source in fixed.items():
        node.meta["stands_for"] = source
    fixed |= {node: getattr(recorded, node.target) for node in nodes if node.op == "get_attr"}
    rows = {node: work.streamed.rows[source] for node, (source, _) in reads.items()}
    parted = parts(nodes, rows, write=False)
    assert parted is not None
    operators, _ = parted
    streamed = replace(
        work.streamed, rows={node: rows[node] for node in nodes if node in rows}, operators=operators
    )
    ends = dict(zip(owned, output.args[0], strict=True))
    known = {
        ends[end]: (end, owned[end])
        for end in ends
        if end in work.known and ends[end].target is _aten.convolution.default
    }
    return Band(
        work=replace(pass_to(streamed, ends), known=frozenset(known)),
        columns=owned,
        reads=reads | known,
        fixed=fixed,
        single=tuple(node for node in nodes if node not in rows and node not in fixed),
    )

"""A graph whose features may be larger than memory, cut into parts: nodes with all edges that end at them."""

# numba infers the types of what it compiles.
# mypy: allow-untyped-defs, allow-untyped-calls
# ruff: noqa: ANN001, ANN202

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numba import njit
from torch import Tensor

from squeezebox.memory import RowFile
from squeezebox.schema import OptionError
from squeezebox.streaming._files import FileArray, from_file, mapped_below, require_whole

_CHUNK_ROWS = 4096


@dataclass(frozen=True, kw_only=True, slots=True)
class Graph:
    """What a graph network is trained on.

    Args:
        features: nodes x features; a tensor or an array, such as a numpy.memmap. It is read by rows.
        edges: 2 x edges of node numbers: messages go from the first row's nodes to the second row's.
        targets: what the loss compares outputs with, a row for each node.
        weights: a number for each edge, given to layers as ``edge_weight``; none by default.
        nodes: the nodes whose outputs count in the loss; all by default.
    """

    features: Any
    edges: Any
    targets: Any
    weights: Any = None
    nodes: Any = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """The nodes from ``start`` to ``stop``, and the edges that end at them.

    ``others`` are the other nodes that edges begin at, in order. Edges are numbered within the part: its own
    nodes first, the others behind them.
    """

    start: int
    stop: int
    others: np.ndarray
    edges: Tensor
    weights: Tensor | None

    @property
    def size(self) -> int:
        """How many nodes it has or reads."""
        return self.stop - self.start + len(self.others)

    @property
    def own(self) -> np.ndarray:
        """Its own nodes."""
        return np.arange(self.start, self.stop)


class Edges:
    """Edges sorted by the node they end at.

    They are in memory: 4 bytes an edge and 12 a node, and the weights.

    Args:
        sources: the nodes that they begin at.
        ends: for each node that they end at where its edges end, behind a 0.
        weights: theirs, if they have some.
        rows: how many nodes there are; those that are only read are behind the others.

    Attributes:
        count: how many nodes edges end at.
    """

    def __init__(self, sources: np.ndarray, ends: np.ndarray, weights: Tensor | None, rows: int) -> None:
        self.sources = sources.astype(np.int32 if rows < 2**31 else np.int64, copy=False)
        self.ends, self.weights, self.rows, self.count = ends, weights, rows, len(ends) - 1
        self._place = np.full(rows, -1, self.sources.dtype)

    def within(self, part: Part) -> Edges:
        """A part's edges alone, with nodes numbered as there: its own are cut, the others only read."""
        ends = self.ends[part.start : part.stop + 1] - self.ends[part.start]
        weights = None if part.weights is None else part.weights.clone()
        return Edges(part.edges[0].numpy(), ends, weights, part.size)

    def cuts(self, parts: int) -> list[tuple[int, int]]:
        """Intervals of nodes, at most ``parts``, with about equally many nodes and edges together in each."""
        load = self.ends[1:] + np.arange(1, self.count + 1)
        at = np.searchsorted(load, np.arange(1, parts) * load[-1] / parts, side="left") + 1
        bounds = np.unique(np.concatenate([[0], np.minimum(at, self.count), [self.count]]))
        return [(int(start), int(stop)) for start, stop in zip(bounds[:-1], bounds[1:], strict=True)]

    def part(self, start: int, stop: int, others: np.ndarray | None = None) -> Part:
        """These nodes with what they read; ``others`` if it is known which other nodes that are."""
        first, last = int(self.ends[start]), int(self.ends[stop])
        # Tensors of torch's, so that what they take is measured with the others.
        local = torch.empty(2, last - first, dtype=torch.int64)
        sources = self.sources[first:last]
        if others is None:
            others = torch.empty(min(last - first, self.rows), dtype=torch.int64).numpy()
            others = others[: _others(sources, start, stop, self._place, others)]
            others.sort()
        _localise(sources, self.ends[start : stop + 1], start, self._place, others, local.numpy())
        return Part(
            start=start,
            stop=stop,
            others=others,
            edges=local,
            weights=None if self.weights is None else self.weights[first:last],
        )


def sorted_edges(graph: Graph, order: np.ndarray | None = None) -> Edges:
    """A graph's edges; those of one node stay in their order.

    Args:
        graph: whose.
        order: the nodes in the order in which they are numbered from now on; as given by default.

    Raises:
        OptionError: what the graph says of nodes and edges does not fit together.
    """
    count = checked(graph)
    sources, targets = edges_of(graph)
    if order is not None:
        place = np.empty(count, np.int32 if count < 2**31 else np.int64)
        place[order] = np.arange(count)
        sources, targets = place[sources], place[targets]
    sorted_ = np.argsort(targets, kind="stable")
    ends = np.concatenate([[0], np.cumsum(np.bincount(targets, minlength=count))])
    weights = None if graph.weights is None else torch.as_tensor(_array(graph.weights)[sorted_])
    return Edges(sources[sorted_], ends, weights, count)


@njit(cache=True, nogil=True)
def _others(sources, start, stop, place, others):
    """Put the distinct sources outside of the part into ``others``; returns how many they are."""
    found = 0
    for source in sources:
        if (source < start or source >= stop) and place[source] < 0:
            place[source] = 0
            others[found] = source
            found += 1
    return found


@njit(cache=True, nogil=True)
def _localise(sources, ends, start, place, others, local):
    """Number sources and targets within a part; ``place`` is -1 again for all behind it."""
    own = ends.shape[0] - 1
    for at in range(others.shape[0]):
        place[others[at]] = own + at
    for node in range(own):
        for edge in range(ends[node] - ends[0], ends[node + 1] - ends[0]):
            source = sources[edge]
            inside = start <= source < start + own
            local[0, edge] = source - start if inside else place[source]
            local[1, edge] = node
    for other in others:
        place[other] = -1


class Reader:
    """Rows of an array by node, in an order of nodes; those of a mapped file are read from the file.

    Args:
        array: a tensor or an array with a row for each node.
        order: the nodes in order; None as given.
    """

    def __init__(self, array: Any, order: np.ndarray | None) -> None:
        self._array, self._order = from_file(array), order

    @property
    def is_file(self) -> bool:
        """Whether rows are read from a file."""
        return isinstance(self._array, FileArray)

    def __call__(self, rows: np.ndarray, found: np.ndarray | None = None) -> Tensor:
        """A copy of these nodes' rows; of a file in ``found`` if it is given.

        Raises:
            DatasetError: a mapped file has become shorter.
        """
        rows = rows if self._order is None else self._order[rows]
        if isinstance(self._array, Tensor):
            return self._array[torch.from_numpy(rows)]
        if isinstance(self._array, FileArray):
            return torch.from_numpy(self._array.rows(rows, found))
        mapped = mapped_below(self._array)
        if mapped is not None:
            require_whole(mapped)
        return torch.from_numpy(np.ascontiguousarray(self._array[rows]))

    @property
    def stamp(self) -> tuple[int, int] | None:
        """A mapped file's length and when it was last changed; None of what is in memory."""
        return self._array.stamp if isinstance(self._array, FileArray) else None

    def copied(self, rows: np.ndarray, folder: Path) -> RowFile:
        """A file with these rows, one behind another."""
        copy = RowFile(folder, len(rows), self._array.shape[1], self._array.dtype, "copies of features")
        for start in range(0, len(rows), _CHUNK_ROWS):
            part = np.arange(start, min(start + _CHUNK_ROWS, len(rows)))
            copy.write(part, self(rows[part]).numpy())
        return copy


def kind_of(values: Any) -> torch.dtype:
    """The type of a tensor, or torch's for an array's."""
    return values.dtype if isinstance(values, Tensor) else torch.from_numpy(np.empty(0, values.dtype)).dtype


def edges_of(graph: Graph) -> np.ndarray:
    """2 x edges, signed: numpy has no integers for both uint64 and negative ones."""
    edges = _array(graph.edges)
    return edges.astype(np.int64) if edges.dtype == np.uint64 else edges


def _array(values: Any) -> np.ndarray:
    return values.numpy() if isinstance(values, Tensor) else np.asarray(values)


def checked(graph: Graph) -> int:
    """The number of nodes.

    Raises:
        OptionError: what the graph says of nodes and edges does not fit together.
    """
    count = int(graph.features.shape[0])
    if graph.features.ndim != 2 or not count:
        raise OptionError(f"features have the shape {tuple(graph.features.shape)}; give nodes x features.")
    edges = _array(graph.edges)
    if edges.ndim != 2 or edges.shape[0] != 2 or edges.dtype.kind not in "iu":
        raise OptionError(
            f"edges have the shape {edges.shape} and {edges.dtype}; give 2 x edges of integers."
        )
    _require_nodes("edges", edges, count)
    if graph.nodes is not None:
        if not distinct_nodes("nodes", graph.nodes, count).size:
            raise OptionError("nodes are none; give those whose outputs the loss takes.")
    for name, values, wanted in (
        ("targets", graph.targets, count),
        ("weights", graph.weights, edges.shape[1]),
    ):
        if values is not None and len(values) != wanted:
            raise OptionError(f"{name} have {len(values):,} rows, where the graph needs {wanted:,}.")
    return count


def order_of(order: Any, graph: Graph) -> np.ndarray:
    """The order as numbers of all nodes.

    Raises:
        OptionError: it is not.
    """
    count = int(graph.features.shape[0])
    numbers = distinct_nodes("order", order, count)
    if len(numbers) != count:
        raise OptionError(f"order has {len(numbers):,} nodes of {count:,}; give each node's number once.")
    return numbers.astype(np.int64)


def distinct_nodes(name: str, values: Any, count: int) -> np.ndarray:
    """Node numbers, each at most once.

    Raises:
        OptionError: they are not.
    """
    numbers = _array(values)
    if numbers.ndim != 1 or numbers.dtype.kind not in "iu":
        hint = f", such as np.flatnonzero({name})" if numbers.dtype.kind == "b" else ""
        raise OptionError(f"{name} is an array of {numbers.dtype} {numbers.shape}; give node numbers{hint}.")
    _require_nodes(name, numbers, count)
    if np.unique(numbers).size != numbers.size:
        raise OptionError(f"{name} does not have distinct node numbers; give each node at most once.")
    return numbers


def _require_nodes(name: str, numbers: np.ndarray, count: int) -> None:
    if numbers.size and (int(numbers.min()) < 0 or int(numbers.max()) >= count):
        raise OptionError(
            f"{name} name nodes from {int(numbers.min()):,} to {int(numbers.max()):,}, but features have "
            f"rows 0 to {count - 1:,}. Correct the numbers, or give features of every node."
        )

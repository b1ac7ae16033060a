"""A graph whose features may be larger than memory, cut into parts: nodes with all edges that end at them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from squeezebox.schema import OptionError
from squeezebox.streaming._files import mapped_below, require_whole


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
    """The nodes from ``start`` to ``stop``, and the edges that end at them, numbered within ``read``.

    ``read`` has the part's own nodes first and the other nodes that its edges begin at behind them.
    """

    start: int
    stop: int
    read: np.ndarray
    edges: Tensor
    weights: Tensor | None


class Edges:
    """All edges, sorted by the node they end at; edges of one node stay in their order.

    They are in memory: 8 bytes an edge and 8 a node, and the weights.
    """

    def __init__(self, graph: Graph) -> None:
        self.count = _checked(graph)
        edges = _array(graph.edges)
        order = np.argsort(edges[1], kind="stable")
        self.sources = edges[0][order].astype(np.int64, copy=False)
        self.ends = np.concatenate([[0], np.cumsum(np.bincount(edges[1], minlength=self.count))])
        self.weights = None if graph.weights is None else torch.as_tensor(_array(graph.weights)[order])

    @property
    def nbytes(self) -> int:
        """What they hold."""
        weights = 0 if self.weights is None else self.weights.nbytes
        return int(self.sources.nbytes + self.ends.nbytes + weights)

    def cuts(self, parts: int) -> list[tuple[int, int]]:
        """Intervals of nodes, at most ``parts``, with about equally many nodes and edges together in each."""
        load = self.ends[1:] + np.arange(1, self.count + 1)
        at = np.searchsorted(load, np.arange(1, parts) * load[-1] / parts, side="left") + 1
        bounds = np.unique(np.concatenate([[0], np.minimum(at, self.count), [self.count]]))
        return [(int(start), int(stop)) for start, stop in zip(bounds[:-1], bounds[1:], strict=True)]

    def part(self, start: int, stop: int) -> Part:
        """These nodes with what they read."""
        first, last = self.ends[start], self.ends[stop]
        sources = self.sources[first:last]
        others = np.unique(sources)
        others = others[(others < start) | (others >= stop)]
        inside = (sources >= start) & (sources < stop)
        local = np.where(inside, sources - start, stop - start + np.searchsorted(others, sources))
        targets = np.repeat(np.arange(stop - start), np.diff(self.ends[start : stop + 1]))
        return Part(
            start=start,
            stop=stop,
            read=np.concatenate([np.arange(start, stop), others]),
            edges=torch.from_numpy(np.stack([local, targets])),
            weights=None if self.weights is None else self.weights[first:last],
        )


def rows_of(array: Any, rows: np.ndarray) -> Tensor:
    """A copy of these rows, in order.

    Raises:
        DatasetError: the array is a mapped file that has become shorter: reading it would end the process.
    """
    if isinstance(array, Tensor):
        return array[torch.from_numpy(rows)]
    mapped = mapped_below(array)
    if mapped is not None:
        require_whole(mapped)
    return torch.from_numpy(np.ascontiguousarray(array[rows]))


def _array(values: Any) -> np.ndarray:
    return values.numpy() if isinstance(values, Tensor) else np.asarray(values)


def _checked(graph: Graph) -> int:
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
        nodes = _array(graph.nodes)
        if nodes.dtype.kind not in "iu" or not nodes.size or np.unique(nodes).size != nodes.size:
            raise OptionError("nodes are not distinct node numbers; give those whose outputs the loss takes.")
        _require_nodes("nodes", nodes, count)
    for name, values, wanted in (
        ("targets", graph.targets, count),
        ("weights", graph.weights, edges.shape[1]),
    ):
        if values is not None and len(values) != wanted:
            raise OptionError(f"{name} have {len(values):,} rows, where the graph needs {wanted:,}.")
    return count


def _require_nodes(name: str, numbers: np.ndarray, count: int) -> None:
    if numbers.size and (int(numbers.min()) < 0 or int(numbers.max()) >= count):
        raise OptionError(
            f"{name} name nodes from {int(numbers.min()):,} to {int(numbers.max()):,}, but features have "
            f"rows 0 to {count - 1:,}. Correct the numbers, or give features of every node."
        )

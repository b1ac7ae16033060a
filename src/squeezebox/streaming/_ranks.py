"""A graph shared among ranks: each has an interval of nodes, and sends the rows that others read."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from squeezebox.schema import OptionError
from squeezebox.streaming._boundary import PartFile
from squeezebox.streaming._messages import packed, unpacked
from squeezebox.streaming._nodes import Edges

_Array = np.ndarray[Any, Any]


class Ranks:
    """The ranks of a process group, and how they send rows.

    Args:
        group: a process group with a backend for the CPU, such as gloo.
        mean_bits: of an element of a message, from 2 to 8; None sends rows as they are.

    Attributes:
        sent_bytes: what this rank has sent to others, in messages of rows.

    Raises:
        OptionError: mean_bits is another number.
    """

    def __init__(self, group: Any, mean_bits: float | None) -> None:
        if mean_bits is not None and not 2 <= mean_bits <= 8:
            raise OptionError(f"message_bits is {mean_bits}; give a number from 2 to 8, or None for exact.")
        self._group, self.mean_bits = group, mean_bits
        self.rank, self.count = dist.get_rank(group), dist.get_world_size(group)
        self.sent_bytes = 0
        seed = (torch.initial_seed() + self.rank) % 2**63
        self._generator = torch.Generator().manual_seed(seed)  # of its own, so torch's stays as it is

    def most(self, number: int) -> int:
        """The largest of all ranks' numbers."""
        found = torch.tensor(number)
        dist.all_reduce(found, dist.ReduceOp.MAX, self._group)
        return int(found)

    def add(self, x: Tensor) -> Tensor:
        """The sum of all ranks' tensors, in place."""
        dist.all_reduce(x, group=self._group)
        return x

    def packed(self, rows: Tensor, squared_weights: Tensor) -> Tensor:
        """A message of rows, rounded by random numbers of its own."""
        return packed(rows, squared_weights, self.mean_bits, self._generator)

    def swap(self, given: list[Tensor]) -> list[Tensor]:
        """Bytes to each rank for bytes from each rank."""
        sizes = torch.tensor([len(each) for each in given])
        self.sent_bytes += int(sizes.sum())
        came = torch.empty_like(sizes)
        dist.all_to_all_single(came, sizes, group=self._group)
        into, found = came.tolist(), torch.empty(int(came.sum()), dtype=torch.uint8)
        dist.all_to_all_single(found, torch.cat(given), into, sizes.tolist(), group=self._group)
        return list(found.split(into))


class Exchange:
    """Which rows this rank gets from others, and sends to them, ``most`` at a time to each.

    Rows that come are numbered behind this rank's own.

    Args:
        ranks: all ranks, which call every method together.
        edges: of the whole graph.
        most: rows in a message at most.

    Attributes:
        start, stop: the interval of this rank's nodes.
        came: intervals of rows that come in one message each.
        edges: this rank's own.
        nodes: of its own rows and those that come, the nodes.
        sent: which of its own rows are sent, in order.
    """

    def __init__(self, ranks: Ranks, edges: Edges, most: int) -> None:
        self._ranks = ranks
        cuts = edges.cuts(ranks.count)
        if len(cuts) < ranks.count:
            raise OptionError(
                f"{ranks.count} ranks would share {edges.count:,} nodes. Take at most as many ranks as nodes."
            )
        self.start, self.stop = cuts[ranks.rank]
        bounds = np.array([start for start, _ in cuts])
        self._given: list[_Array] = []
        self._squares: list[Tensor] = []
        rounds = 0
        for other, cut in enumerate(cuts):
            part = edges.part(*cut)
            ends = np.append(np.searchsorted(part.others, bounds), len(part.others))
            rounds = max(rounds, -(-int(np.diff(ends).max()) // most))
            squares = np.ones(part.edges.shape[1]) if part.weights is None else part.weights.double().square()
            sums = np.bincount(part.edges[0].numpy(), np.asarray(squares), minlength=part.size)
            first, last = ends[ranks.rank : ranks.rank + 2]
            self._given.append(part.others[first:last] - self.start)
            self._squares.append(torch.from_numpy(sums[cut[1] - cut[0] :][first:last]))
            if other == ranks.rank:
                self.edges, self.nodes = edges.within(part), np.concatenate([part.own, part.others])
                came = ends + self.stop - self.start
        self.sent = np.unique(np.concatenate(self._given))
        self._most, self._rounds = most, rounds
        self.came = [
            (first, min(first + most, int(last)))
            for begin, last in zip(came[:-1], came[1:], strict=True)
            for first in range(int(begin), int(last), most)
        ]
        numbers = iter(range(len(self.came)))
        self._numbers = [
            [next(numbers) for _ in range(int(begin), int(last), most)]
            for begin, last in zip(came[:-1], came[1:], strict=True)
        ]

    def forward(self, file: PartFile) -> None:
        """Send this rank's rows to those that read them."""
        for turn in range(self._rounds):
            given = []
            for rows, squares in zip(self._given, self._squares, strict=True):
                part = slice(turn * self._most, (turn + 1) * self._most)
                given.append(self._ranks.packed(file.rows(rows[part]), squares[part]))
            for numbers, message in zip(self._numbers, self._ranks.swap(given), strict=True):
                if turn < len(numbers):
                    first, last = self.came[numbers[turn]]
                    file.write(file.parts + numbers[turn], self._rows(message, last - first, file))

    def backward(self, file: PartFile) -> None:
        """Send gradients of rows that came to the ranks whose rows they are, which add them up."""
        for turn in range(self._rounds):
            given = []
            for numbers in self._numbers:
                here = turn < len(numbers)
                sums = file.total(file.parts + numbers[turn]) if here else file.rows(np.empty(0, np.int64))
                given.append(self._ranks.packed(sums, torch.ones(len(sums))))
            for rows, message in zip(self._given, self._ranks.swap(given), strict=True):
                part = rows[turn * self._most : (turn + 1) * self._most]
                file.add(part, self._rows(message, len(part), file))

    def _rows(self, message: Tensor, count: int, file: PartFile) -> Tensor:
        return unpacked(message.clone(), count, file.width, file.dtype, self._ranks.mean_bits)

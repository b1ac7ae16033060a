"""What a step would take if passes handed on these tensors and recomputed the others: sizes and seconds."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.fx import Node

from squeezebox.memory import DiskSpeed
from squeezebox.streaming._graph import VIEWS, nbytes_of
from squeezebox.streaming._prepared import Prepared
from squeezebox.streaming._rates import Rates, whole_pass
from squeezebox.streaming._spool import Choice
from squeezebox.streaming._stages import Stage, stages_of
from squeezebox.streaming._strip import Pass, as_tuple

_Array = np.ndarray[Any, Any]
_SHARE = 0.9  # of the memory that strips take
_WORTH = 0.95  # of what strips take, at most, is worth tiles
_EIGHTH = 8  # of the image is timed, at most
_HELD = 0.3  # of the memory is between operators then; within one it is more


class Shapes:
    """The rows and columns that strips of a pass have of every node, and bytes and elements of these."""

    def __init__(self, prepared: Prepared, work: Pass) -> None:
        streamed, height = work.streamed, max(prepared.rows // 4, 1)
        start = prepared.middle(work, height)
        demanded = work.demands(work.parts(start, start + height, prepared.rows))
        self.nodes = [node for node in work.order if node in demanded]
        across = streamed.across
        values = [as_tuple(_value(node))[0] for node in self.nodes]
        self._rows = np.array([streamed.rows[node].count for node in self.nodes], float)
        self._columns = np.array(
            [1 if across is None else across.rows[node].count for node in self.nodes], float
        )
        read = np.array([sum(last - first for first, last in demanded[node]) for node in self.nodes], float)
        self._halo = np.maximum(read - self._rows * height / prepared.rows, 0.0)
        self._whole = prepared.rows, prepared.columns
        self._elements = np.array([value.numel() for value in values], float)
        self.itemsize = np.array([value.element_size() for value in values], float)
        held = [0 if node.target in VIEWS else nbytes_of(node) for node in self.nodes]
        self._bytes = np.array(held, float)

    def share(self, height: float, width: float) -> _Array:
        """Of every node's elements, how many a strip or tile has."""
        rows, columns = self._whole
        share: _Array = np.minimum(height / rows + self._halo / self._rows, 1.0)
        if width < columns:
            share = share * np.minimum(width / columns + self._halo / self._columns, 1.0)
        return share

    def elements(self, height: float, width: float) -> _Array:
        """Of every node."""
        return self._elements * self.share(height, width)

    def nbytes(self, height: float, width: float) -> _Array:
        """Of every node; views have none."""
        return self._bytes * self.share(height, width)


def _value(node: Node) -> Any:
    return node.meta["val"]


class StageCost:
    """Bytes and seconds of one way over the image, by the size of its strips."""

    def __init__(self, costs: Costs, stage: Stage, choice: Choice) -> None:
        self._prepared, work = costs.prepared, stage.work
        self._shapes = shapes = Shapes(costs.prepared, work)
        self._derives = stage.derives
        read = work.given
        given = np.array([node in read for node in shapes.nodes])
        self._held = 1.0 + given  # a gradient goes with what is read
        self._living = _living(work, shapes.nodes)
        operators = np.array([costs.operator(stage, node, read) for node in shapes.nodes]).reshape(-1, 2)
        self._start, self._each = operators[:, 0].sum(), operators[:, 1]
        self._moving = shapes.itemsize * [costs.moving(stage, node, read, choice) for node in shapes.nodes]

    def nbytes(self, height: float, width: float) -> float:
        """The peak of a strip: all that it makes where it goes back too, else what lives at once."""
        held = self._shapes.nbytes(height, width)
        if self._derives:
            return float(held @ self._held)
        return float((self._living @ held).max())

    def seconds(self, height: float, width: float) -> float:
        """Of all strips, ``height`` rows each."""
        operators = self._start + self._shapes.elements(height, width) @ self._each
        return self._strips(height, width) * float(operators) + self.moving_seconds(height, width)

    def moving_seconds(self, height: float, width: float) -> float:
        """Of writing and reading what is handed on."""
        return self._strips(height, width) * float(self._shapes.elements(height, width) @ self._moving)

    def _strips(self, height: float, width: float) -> float:
        return self._prepared.rows / height * self._prepared.columns / width

    def fitting(self, room_bytes: float) -> float:
        """The least seconds of strips or tiles within these bytes; infinite where none fits."""
        rows, columns = self._prepared.rows, self._prepared.columns
        height = self._largest(rows, room_bytes, lambda height: (height, columns))
        found = self.seconds(rows / math.ceil(rows / height), columns) if height else math.inf
        if self._prepared.streamed.across is not None and height < rows:
            side = self._largest(min(rows, columns), room_bytes, lambda side: (side, side))
            tiles = self.seconds(side, side) if side else math.inf
            found = tiles if tiles < _WORTH * found else found
        return found

    def _largest(self, most: int, room_bytes: float, size: Any) -> int:
        low, high = 0, most
        while low < high:
            middle = (low + high + 1) // 2
            if self.nbytes(*size(middle)) <= _SHARE * room_bytes:
                low = middle
            else:
                high = middle - 1
        return low


def affordable_height(prepared: Prepared, room_bytes: int) -> int:
    """Of a strip that goes through all operators one by one: an eighth of the image, or what has room."""
    work = whole_pass(prepared.streamed)
    shapes = Shapes(prepared, work)
    living, height = _living(work, shapes.nodes), max(prepared.rows // _EIGHTH, 1)
    while height > 1 and (living @ shapes.nbytes(height, prepared.columns)).max() > _HELD * room_bytes:
        height = height // 2
    return height


def _living(work: Pass, nodes: list[Node]) -> _Array:
    """Which nodes are there after each has been made."""
    place = {node: number for number, node in enumerate(nodes)}
    living, found = np.zeros(len(nodes)), np.zeros((len(nodes), len(nodes)))
    for number, node in enumerate(nodes):
        living[number] = 1.0
        found[number] = living
        for done in work.last[node]:
            if done in place:
                living[place[done]] = 0.0
    return found


@dataclass(frozen=True, kw_only=True, slots=True)
class Costs:
    """What steps take by what passes hand on.

    ``room_bytes`` are there for strips and what is kept. ``disk`` is None where nothing can be filed.
    ``packed`` is as of :func:`stages_of`. With ``again`` strips that go back recompute within themselves;
    ``journalled`` files keep what is overwritten.
    """

    prepared: Prepared
    rates: Rates
    room_bytes: int
    disk: DiskSpeed | None
    packed: bool
    again: bool
    journalled: bool
    known: dict[Any, StageCost]

    def seconds(self, choice: Choice, kept_bytes: int) -> float:
        """The least of a step."""
        room = self.room_bytes - kept_bytes
        return sum(cost.fitting(room) for cost in self.stages(choice))

    def stages(self, choice: Choice) -> list[StageCost]:
        """What each way over the image takes."""
        stages = stages_of(self.prepared.streamed, choice[0] | choice[1], self.packed)
        return [self.stage(stage, choice) for stage in stages]

    def stage(self, stage: Stage, choice: Choice) -> StageCost:
        """What one of them takes."""
        work = stage.work
        moved = work.given.union(work.ends)
        key = stage.number, stage.reduces, stage.derives, *(moved & each for each in choice), work.known
        if key not in self.known:
            self.known[key] = StageCost(self, stage, choice)
        return self.known[key]

    def operator(self, stage: Stage, node: Node, given: frozenset[Node]) -> tuple[float, float]:
        """Seconds of a strip, and for each element, of making a node and of going back through it."""
        work, ahead, back = stage.work, self.rates.ahead, self.rates.back
        nothing = 0.0, 0.0
        convolution = torch.ops.aten.convolution.default
        rates = []
        if node not in given and not (node in work.known and node.target is convolution):
            rates += [ahead.get(node, nothing)] * (1 + (self.again and stage.derives))
        if node not in given and stage.derives:
            rates.append(back.get(node, nothing))
        reduced = [end for end in work.ended.get(node, ()) if end in work.streamed.reductions]
        rates += [ahead.get(end, nothing) for end in reduced]
        return sum(start for start, _ in rates), sum(each for _, each in rates)

    def moving(self, stage: Stage, node: Node, given: frozenset[Node], choice: Choice) -> float:
        """Seconds for each byte of a node: of being handed on, read, and of gradients."""
        work, (kept, filed) = stage.work, choice
        if node not in kept and node not in filed:
            return 0.0
        derives = int(stage.derives and node in work.streamed.differentiable)
        reads, writes, changes = 0, 0, 0
        if node in given:
            reads, writes, changes = 1 + derives, derives, derives
        elif node in work.ends:
            reads, writes = derives + (node in work.known), int(stage.reduces)
        if node in kept or self.disk is None:
            return (reads + 2 * writes) * self.rates.copying
        again = changes * self.journalled
        each = self.disk.reading * (reads + again) + self.disk.writing * (writes + again)
        return each + 2 * (reads + writes) * self.rates.copying

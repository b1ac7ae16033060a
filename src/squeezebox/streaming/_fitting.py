"""How large strips or tiles are: as large as the memory allows, measured on some of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import NamedTuple

import torch
from torch.fx import Node

from squeezebox.memory import Ceiling, Peak, PeakMeter, ProcessMeter, freed_kept, return_all
from squeezebox.schema import BudgetError, OptionError
from squeezebox.streaming._band import crosswise
from squeezebox.streaming._costs import Costs
from squeezebox.streaming._plan import ENOUGH, StreamPlan, StripPlan, even, fitting_height, require_rowless
from squeezebox.streaming._prepared import Prepared
from squeezebox.streaming._rates import now
from squeezebox.streaming._run import Context
from squeezebox.streaming._stages import Stage
from squeezebox.streaming._strip import Pass

OWN_BYTES = 4 << 20
"""Of what the process grows by, not a strip's: what the system counts late, compiled kernels."""


_JUMP_BYTES = 24 << 20
"""By which one operator may pass the memory: freed memory is returned between operators, not amid one."""


class Need(NamedTuple):
    """What a strip takes, and the most that one of its operators adds at once."""

    strip_bytes: int
    jump_bytes: int

    @property
    def spare_bytes(self) -> int:
        """Of the memory, to stay free between operators."""
        return max(self.jump_bytes - _JUMP_BYTES, 0)

    @property
    def total_bytes(self) -> int:
        """Of the memory."""
        return self.strip_bytes + self.spare_bytes


_total = attrgetter("total_bytes")


class _TooHighError(Exception):
    """A strip holds more than the memory."""


Place = tuple[int, int]
"""The band and the first row of a strip or tile."""

_WASTED = 1.05  # times the image's operations are little enough for strips
_WORTH = 0.95  # of what strips compute, at most, is worth tiles
_TIMED = 2  # strips of a pass: the first finds memory returned, as some do in a step
_SAMPLED = 16  # strips of a pass whose operations are counted


@dataclass(frozen=True, kw_only=True, slots=True)
class Fitting:
    """Strips or tiles of one image: of a given ``size``, or as large as ``memory_bytes`` allow."""

    prepared: Prepared
    size: tuple[int, int] | None
    memory_bytes: int
    recompute: bool
    context: Context | None
    costs: Costs | None = None

    def plan(self) -> StreamPlan:
        """The passes, and the strips of each; some are run if their size is not given.

        Raises:
            BudgetError: the smallest strip, or what has no rows, needs more than the memory.
            OptionError: torch's profiler is active.
        """
        prepared, content = self.prepared, self.prepared.layout
        rowless = None if self.size else self.rehearsed()
        held = 0 if rowless is None else rowless.left_bytes + content.kept_bytes
        stages = tuple(self._stage(stage, held) for stage in prepared.stages)
        return StreamPlan(
            axis=prepared.axis,
            rows=prepared.rows,
            columns=prepared.columns,
            disk_bytes=content.disk_bytes,
            kept_bytes=content.kept_bytes,
            rowless_bytes=None if rowless is None else rowless.total_bytes,
            stages=stages,
            gathered=prepared.streamed.gathered_bytes,
        )

    def rehearsed(self) -> Peak:
        """What has no rows, at its highest moment and while strips run.

        Raises:
            BudgetError: it needs more than the memory.
            OptionError: torch's profiler is active.
        """
        meter = self._meter()
        try:
            run = self.prepared.run(self.context, self.prepared.blank)
            run.values.rehearse(self.prepared.stages)
        finally:
            peak = meter.stop(())
        nbytes = peak.total_bytes + self.prepared.layout.kept_bytes
        require_rowless(nbytes, self.memory_bytes, self.prepared.streamed.gathered_bytes)
        return peak

    def _stage(self, stage: Stage, held_bytes: int) -> StripPlan:
        prepared, need = self.prepared, None
        if self.size is not None:
            height, width = self.size
        else:
            height, width, need = self._fitted(stage, held_bytes)
        kept, filed, recomputed = prepared.handed_bytes(stage)
        return StripPlan(
            reduces=stage.reduces,
            derives=stage.derives,
            height=height,
            width=width,
            strips=prepared.tiles(height, width),
            halo=prepared.halo(stage.work, height),
            computed=self._computed(stage, height, width),
            kept_bytes=kept,
            disk_bytes=filed,
            recomputed_bytes=recomputed,
            seconds=self._seconds(stage, height, width, need or Need(0, 0)),
            strip_bytes=None if need is None else need.strip_bytes,
            spare_bytes=0 if need is None else need.spare_bytes,
            peak_bytes=None if need is None else need.strip_bytes + held_bytes,
        )

    def _seconds(self, stage: Stage, height: int, width: int, need: Need) -> float | None:
        """Of all strips of a stage, by two in the middle, and of what is handed on."""
        if self.costs is None:
            return None
        prepared = self.prepared
        start, band = (
            prepared.middle(stage.work, height),
            prepared.band(stage, width, prepared.columns // width // 2),
        )
        run = prepared.run(self.context, prepared.blank)
        run.pretend(stage, start, start + height, band)
        ceiling = self._ceiling(need)
        run.keep_room = None if ceiling is None else ceiling.keep
        begun = now(prepared.device)
        with freed_kept():
            for _ in range(_TIMED):
                run.strip(stage, start, start + height, self.recompute, band)
        strip = (now(prepared.device) - begun) / _TIMED
        moving = self.costs.stage(stage, prepared.layout.choice).moving_seconds(height, width)
        return prepared.tiles(height, width) * strip + moving

    def _fitted(self, stage: Stage, held_bytes: int) -> tuple[int, int, Need]:
        """Height, width and need of strips, or of tiles where these compute less or only they fit."""
        prepared, width = self.prepared, self.prepared.columns
        across = prepared.streamed.across
        least = width if across is None else min(across.unit, width)
        while True:
            try:
                height, need = self._fitting_height(stage, width, held_bytes)
                break
            except BudgetError:
                if width <= least:
                    raise
                width = even(width // 2, prepared.columns, least)
        strips = height, width, need
        computed = self._computed(stage, height, width)
        if width <= least or computed <= _WASTED:
            return strips
        halo = prepared.halo(stage.work, height)
        side = math.isqrt((height + halo) * (width + halo)) - halo
        other = even(max(side, least), prepared.columns, least)
        if other >= width:
            return strips
        height, need = self._fitting_height(stage, other, held_bytes)
        is_worth = self._computed(stage, height, other) <= _WORTH * computed
        return (height, other, need) if is_worth else strips

    def _fitting_height(self, stage: Stage, width: int, held_bytes: int) -> tuple[int, Need]:
        """By strips in the middle; by those at the borders too, if one of these then takes too much."""
        room, rows, unit = self.memory_bytes - held_bytes, self.prepared.rows, self.prepared.streamed.unit
        needs: dict[int, Need] = {}

        def measured(height: int, places: Callable[[Stage, int, int], set[Place]]) -> int:
            found = peak(height, places)
            if found.total_bytes > ENOUGH * room:
                found = min(found, peak(height, places), key=_total)
            needs[height] = max(found, needs.get(height, found), key=_total)
            return found.total_bytes

        def peak(height: int, places: Callable[[Stage, int, int], set[Place]]) -> Need:
            foreseen = self._foreseen(stage, needs, height)
            found = (
                self._need(stage, width, *place, height, foreseen) for place in places(stage, width, height)
            )
            return max(found, default=foreseen, key=_total)

        peak(1, self._middle)  # what libraries take once is not a strip's
        find = partial(
            fitting_height, rows=rows, unit=unit, memory_bytes=self.memory_bytes, held_bytes=held_bytes
        )
        height, nbytes = find(partial(measured, places=self._middle))
        if max(nbytes, measured(height, self._borders)) > ENOUGH * room:
            needs.clear()
            height, _ = find(partial(measured, places=self._everywhere))
        return height, needs[height]

    def _foreseen(self, stage: Stage, needs: Mapping[int, Need], height: int) -> Need:
        """A jump alone, by that of the highest strip so far and the rows that both read."""
        if not needs:
            return Need(0, 0)
        last, work = max(needs), stage.work
        rows = height + self.prepared.halo(work, height), last + self.prepared.halo(work, last)
        return Need(0, needs[last].jump_bytes * rows[0] // rows[1])

    def _middle(self, stage: Stage, width: int, height: int) -> set[Place]:
        """A strip in the image's middle."""
        return {(-(-self.prepared.columns // width) // 2, self.prepared.middle(stage.work, height))}

    def _borders(self, stage: Stage, width: int, height: int) -> set[Place]:
        """The first strip, which is copied where it is padded; of tiles, also one in the first band."""
        ((band, start),) = self._middle(stage, width, height)
        return {(band, 0), (0, start)} - {(band, start)}

    def _everywhere(self, stage: Stage, width: int, height: int) -> set[Place]:
        return self._middle(stage, width, height) | self._borders(stage, width, height)

    def _computed(self, stage: Stage, height: int, width: int) -> float:
        """The operations of all tiles, in multiples of the image's."""
        prepared, work = self.prepared, stage.work
        ahead = _shares(work, prepared.rows, height)
        across = dict.fromkeys(ahead, 1.0)
        if width < prepared.columns:
            across = _shares(crosswise(work), prepared.columns, width)
        costs = {node: _cost(node) for node in ahead}
        total = sum(cost * ahead[node] * across[node] for node, cost in costs.items())
        return total / sum(costs.values()) if costs else 1.0

    def _need(self, stage: Stage, width: int, place: int, start: int, height: int, foreseen: Need) -> Need:
        """That of one tile, with values made up where they are not known yet.

        It takes what its tensors do, or what the process grows by, where that is more: the C library keeps
        what is freed in between, and operators have memory that torch does not see.
        """
        band = self.prepared.band(stage, width, place)
        return_all()
        run = self.prepared.run(self.context, self.prepared.blank)
        run.pretend(stage, start, start + height, band)
        process, meter, ceiling = ProcessMeter(), self._meter(), self._ceiling(foreseen)
        run.keep_room = None if ceiling is None else partial(_watch, ceiling, process)
        process.start()
        least_bytes = 0
        try:
            with freed_kept():
                run.strip(stage, start, start + height, self.recompute, band)
        except _TooHighError:
            least_bytes = self.memory_bytes + 1
        finally:
            grown, peak = process.stop(), meter.stop(())
        if self.prepared.device.type != "cpu" or grown is None:
            return Need(max(least_bytes, peak.total_bytes), 0)
        return Need(max(least_bytes, peak.total_bytes, grown - OWN_BYTES), process.jump_bytes)

    def _ceiling(self, need: Need) -> Ceiling | None:
        """Has freed memory returned amid strips, as in a step; None on a device that is not the CPU."""
        if self.prepared.device.type != "cpu":
            return None
        return Ceiling(self.memory_bytes + OWN_BYTES - need.spare_bytes)

    def _meter(self) -> PeakMeter:
        """A running one."""
        meter = PeakMeter(self.prepared.device)
        if not meter.start():
            raise OptionError(
                "torch's profiler is active, so strips cannot be measured; give height= instead of memory=."
            )
        return meter


def _watch(ceiling: Ceiling, process: ProcessMeter) -> None:
    """Between operators of a trial, which ends where it holds too much."""
    if not ceiling.keep():
        raise _TooHighError
    process.mark()


def _shares(work: Pass, count: int, height: int) -> dict[Node, float]:
    """How often the rows of every operator's output are made, on average."""
    starts = range(0, count, height)
    sampled = starts[:: max(len(starts) // _SAMPLED, 1)]
    made = dict.fromkeys(work.operators, 0)
    for start in sampled:
        demanded = work.demands(work.parts(start, min(start + height, count), count))
        for node in made:
            made[node] += sum(last - first for first, last in demanded.get(node, ()))
    return {
        node: rows * len(starts) / (len(sampled) * work.streamed.rows[node].count)
        for node, rows in made.items()
    }


def _cost(node: Node) -> int:
    """Elements of the output, times the products for each where there are some."""
    value = node.meta["val"]
    elements = (value[0] if isinstance(value, tuple | list) else value).numel()
    if node.target is not torch.ops.aten.convolution.default:
        return int(elements)
    weight: torch.Tensor = node.args[1].meta["val"]  # type: ignore[union-attr]
    return int(elements * weight[0].numel())

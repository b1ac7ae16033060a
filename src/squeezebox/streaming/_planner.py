"""The plan of a step: what passes hand on and where, then how large strips are."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace

import torch
from torch.fx import Node

from squeezebox.memory import DiskFolder, DiskSpeed, disk_speed
from squeezebox.schema import BudgetError, CaptureError
from squeezebox.streaming._choice import NOTHING, Search
from squeezebox.streaming._costs import Costs, affordable_height
from squeezebox.streaming._fitting import Fitting
from squeezebox.streaming._given import uncast
from squeezebox.streaming._plan import StreamPlan
from squeezebox.streaming._prepared import Prepared, Ways
from squeezebox.streaming._rates import measured_rates
from squeezebox.streaming._run import Context
from squeezebox.streaming._spool import Choice, layout

_FREE = DiskSpeed(writing=0.0, reading=0.0, leaving=0.0, returning=0.0, slowing=0.0, direct=True)
_WORTH, _WORTH_SECONDS = 0.95, 0.1  # of a step that a disk must save, were it free, before it is measured
_KEPT = (0.5, 0.25, 0.0)  # of the memory that may be kept; less where strips then found no room


@dataclass(frozen=True, kw_only=True, slots=True)
class Planner:
    """How steps are planned, whatever the image.

    What passes hand on is filed in ``folder``: all of it if ``is_forced``, else where that takes the least
    time. None forbids files. ``keeps`` allows memory, ``is_journalled`` is for a checkpoint.
    """

    size: tuple[int, int | None] | None
    memory_bytes: int | None
    recompute: bool
    context: Context | None
    folder: DiskFolder | None
    is_forced: bool
    is_journalled: bool

    def plan(self, prepared: Prepared, *, files: bool = True) -> tuple[Ways, StreamPlan]:
        """Ways and strips; without ``files`` nothing is filed. Random numbers stay as they are.

        Raises:
            BudgetError: the smallest strip, or what has no rows, needs more than the memory.
            OptionError: torch's profiler is active.
        """
        device = prepared.device
        with torch.random.fork_rng([device] if device.type == "cuda" else []), uncast(device):
            ways, plan = self._plan(prepared, files)
        return ways, replace(plan, note=self._note(plan))

    def _note(self, plan: StreamPlan) -> str:
        """Why nothing is in a file that might be."""
        folder = self.folder
        recomputes = any(stage.recomputed_bytes for stage in plan.stages)
        if folder is None or self.memory_bytes is None or folder.frees_memory or not recomputes:
            return ""
        change = "lay checkpoint= on a disk" if self.is_journalled else "name a folder on a disk by spool="
        return (
            f"a file in {folder.path} would free no memory, so none is made and more is recomputed; {change}"
        )

    def _plan(self, prepared: Prepared, files: bool) -> tuple[Ways, StreamPlan]:
        crossing = prepared.streamed.crossing()
        costs = self._costs(prepared, crossing)
        if self.is_forced:
            return self._fitted(prepared, (frozenset(), crossing), costs)
        if costs is None:
            return self._fitted(prepared, NOTHING, None)
        for share in _KEPT:
            search = self._searched(costs, _movable(prepared, crossing), share, files)
            choice = search.cheapest()
            try:
                return self._fitted(prepared, choice, search.costs)
            except BudgetError:
                if not choice[0]:
                    raise
        raise AssertionError

    def ways(self, prepared: Prepared, choice: Choice) -> Ways:
        """The ways over an image that hand these on."""
        return Ways.of(prepared.streamed, *choice, self.context is not None)

    def _fitted(self, prepared: Prepared, choice: Choice, costs: Costs | None) -> tuple[Ways, StreamPlan]:
        ways = self.ways(prepared, choice)
        return ways, self._fitting(replace(prepared, ways=ways), costs).plan()

    def _fitting(self, prepared: Prepared, costs: Costs | None) -> Fitting:
        size = None
        if self.size is not None:
            height, width = self.size
            size = min(height, prepared.rows), min(width or prepared.columns, prepared.columns)
        return Fitting(
            prepared=prepared,
            size=size,
            memory_bytes=self.memory_bytes or 0,
            recompute=self.recompute,
            context=self.context,
            costs=costs,
        )

    def _costs(self, prepared: Prepared, crossing: frozenset[Node]) -> Costs | None:
        """Timed operators; None where nothing crosses, or strips are of a given size."""
        if self.memory_bytes is None or not crossing:
            return None
        room = self.memory_bytes - self._fitting(prepared, None).rehearsed().left_bytes
        return Costs(
            prepared=prepared,
            rates=measured_rates(prepared, affordable_height(prepared, room)),
            room_bytes=room,
            disk=self._speed() if self.is_forced else None,
            packed=self.context is not None,
            again=self.recompute,
            journalled=self.is_journalled,
            known={},
        )

    def _searched(self, costs: Costs, nbytes: dict[Node, int], share: float, files: bool) -> Search:
        """Without a disk, or with one where that could be worth it."""
        most_kept = 0 if self.is_journalled else int(share * costs.room_bytes)
        search = Search(costs=costs, nbytes=nbytes, most_kept=most_kept, most_filed=0)
        room = self._disk_room() if files else 0
        if not room:
            return search
        free = Search(
            costs=replace(costs, disk=_FREE, known={}), nbytes=nbytes, most_kept=most_kept, most_filed=room
        )
        found = search.cheapest(), free.cheapest()
        without, least = search.seconds(found[0]), free.seconds(found[1])
        if least > min(_WORTH * without, without - _WORTH_SECONDS):
            return search
        speed = self._speed()
        if speed is None:
            return search
        return replace(free, costs=replace(costs, disk=speed, known={}), seen={}, others=found)

    def _speed(self) -> DiskSpeed | None:
        """The disk's; None where it fails."""
        try:
            return None if self.folder is None else disk_speed(self.folder)
        except (OSError, CaptureError):
            return None

    def _disk_room(self) -> int:
        """Bytes that nobody has asked for but may be filed: half of what the disk has free."""
        folder = self.folder
        if folder is None or not folder.frees_memory or not os.access(folder.path, os.W_OK | os.X_OK):
            return 0
        try:
            return folder.free_bytes() // 2
        except OSError:
            return 0


def _movable(prepared: Prepared, crossing: frozenset[Node]) -> dict[Node, int]:
    """The bytes of what may be handed on: in tiles, only what has the image's axes apart."""
    streamed = prepared.streamed
    axes = [each.rows for each in (streamed, streamed.across) if each is not None]
    apart = [node for node in streamed.rows if node in crossing]
    if len(axes) > 1:
        apart = [node for node in apart if not any(rows[node].merged for rows in axes)]
    content = layout(streamed, frozenset(apart), frozenset())
    return {node: content.nbytes(node) for node in apart}

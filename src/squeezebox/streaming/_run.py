"""One step over an image, strip by strip."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.utils import _pytree as pytree

from squeezebox.streaming._band import Band
from squeezebox.streaming._graph import Streamed
from squeezebox.streaming._reductions import State
from squeezebox.streaming._rows import Part
from squeezebox.streaming._spool import Store
from squeezebox.streaming._stages import Stage
from squeezebox.streaming._strip import Hands, Read
from squeezebox.streaming._values import Seeds, Values

Context = Callable[[], AbstractContextManager[Any]]


class Run:
    """One step: the states of its reductions, the ``values`` that have no rows, and strips one by one."""

    def __init__(
        self,
        streamed: Streamed,
        read: Read,
        targets: Mapping[Node, Any],
        context: Context | None,
        store: Store,
    ) -> None:
        self.streamed = streamed
        self.states: dict[Node, State] = {}
        self.values = Values(streamed, targets)
        self.room: Callable[[Stage, Sequence[int]], None] | None = None  # for a strip of these sizes
        self.keep_room: Callable[[], object] | None = None  # amid a strip
        self._given, self._context, self._store = read, context, store
        self._begun: list[tuple[Node, int, Part | None, Tensor]] = []
        self._sloped: tuple[Stage, Seeds, dict[Node, State | None]] | None = None

    def begin(self, stage: Stage) -> None:
        """Before a stage's first strip."""
        if not stage.reduces:
            self.values.hand_on(above=stage.number)

    def strip(
        self, stage: Stage, start: int, stop: int, again: bool = False, band: Band | None = None
    ) -> None:
        """One strip, or tile of a band: the image's rows ``start`` to ``stop``."""
        whole = self.streamed.rows[self.streamed.program.image].count
        work, columns = (stage.work, {}) if band is None else (band, band.columns)
        owned = work.parts(start, stop, whole)
        if not owned:
            return
        if self.room is not None:
            self.room(stage, work.sizes(owned))
        if not stage.derives:
            with torch.no_grad():

                def keep(node: Node, x: Tensor) -> None:
                    self._keep(node, owned[node][0], columns.get(node), x)

                work.run(owned, self.values.known, Hands(self._read, keep, self._after))
            return
        made: dict[Node, Tensor] = {}
        with torch.enable_grad(), self._context() if self._context else contextlib.nullcontext():
            run = work.run_again if again else work.run
            run(owned, self.values.for_strips(stage), Hands(self._read, made.__setitem__, self._after))
        if stage.reduces:
            with torch.no_grad():
                for node, x in made.items():
                    self._add(node, owned[node][0], x)
        self._derive(stage, made, {node: (*part, columns.get(node)) for node, part in owned.items()})

    def end(self, stage: Stage, is_last_ahead: bool) -> None:
        """After a stage's last strip."""
        if stage.reduces:
            self.reduce(stage)
            if is_last_ahead:
                self.values.turn()

    def reduce(self, stage: Stage) -> None:
        """Make the reductions' values of the states, and what follows from them."""
        for node in stage.work.reduced:
            self.values.set(node, self.streamed.reductions[node].finish(self.states[node]))
        self.values.compute()

    def pretend(self, stage: Stage, start: int, stop: int, band: Band | None = None) -> None:
        """Make up everything that a strip of the stage reads and is not known yet, to measure the strip.

        Parameters have gradients then, as after a first strip, and what is measured adds to them.
        """
        own = stage.work.ends if stage.reduces else ()
        self.values.pretend(stage, [node for node in self.streamed.reductions if node not in own])
        if not stage.reduces:
            self.strip(replace(stage, reduces=True, derives=False), start, stop, band=band)

    def _after(self, made: list[Any]) -> None:
        """Keep room after an operator, and when backward comes to what it made."""
        keep = self.keep_room
        if keep is None:
            return
        keep()

        def before_backward(_: Tensor) -> None:
            keep()

        for x in pytree.tree_leaves(made):
            if isinstance(x, Tensor) and x.requires_grad:
                x.register_hook(before_backward)

    def _read(self, node: Node, start: int, stop: int, columns: Part | None = None) -> Tensor:
        """A part of the image, of a target, or of what is stored, at which autograd begins then."""
        read = self._store.read if node in self.streamed.operators else self._given
        x = read(node, start, stop, columns)
        if torch.is_grad_enabled() and node in self.streamed.differentiable:
            self._begun.append((node, start, columns, x.requires_grad_()))
        return x

    def _keep(self, node: Node, start: int, columns: Part | None, x: Tensor) -> None:
        if node in self.streamed.reductions:
            self._add(node, start, x)
        else:
            self._store.write(node, start, x, columns)

    def _add(self, node: Node, start: int, x: Tensor) -> None:
        reduction = self.streamed.reductions[node]
        partial = reduction.partial(x.detach(), start)
        self.states[node] = reduction.merge(self.states[node], partial) if node in self.states else partial

    def _derive(
        self, stage: Stage, made: Mapping[Node, Tensor], owned: Mapping[Node, tuple[int, int, Part | None]]
    ) -> None:
        ends: dict[Node, Tensor] = {}
        gradients: dict[Node, Tensor] = {}
        for node, x in made.items():
            gradient = self._gradient(stage, node, x.detach(), owned[node]) if x.requires_grad else None
            if gradient is not None:
                end = stage.work.ends[node]
                ends[end] = x
                gradients[end] = gradient + gradients[end] if end in gradients else gradient
        if ends:
            torch.autograd.backward([*ends.values()], [gradients.pop(end) for end in ends])
        for node, start, columns, leaf in self._begun:
            if leaf.grad is not None:
                self._store.add(node, start, leaf.grad, columns)
        self._begun.clear()

    def _gradient(
        self, stage: Stage, node: Node, x: Tensor, part: tuple[int, int, Part | None]
    ) -> Tensor | None:
        """The loss's derivative by an end's own rows, None if there is none."""
        if node not in self.streamed.reductions:
            return self._store.gradient(node, *part)
        slope = self._slope(stage, node)
        return None if slope is None else self.streamed.reductions[node].gradient(x, slope, part[0])

    def _slope(self, stage: Stage, node: Node) -> State | None:
        """What the stage's strips need of the loss's derivatives by a value that its pass reduces.

        Found when a strip first has rows of it: of a small map a low strip may have none.
        """
        if self._sloped is None or self._sloped[0] is not stage:
            with torch.no_grad():
                self._sloped = stage, self.values.seeds(stage), {}
        _, seeds, slopes = self._sloped
        if node not in slopes:
            own = seeds.get(node, ())
            is_read = any(seed is not None for seed in own)
            with torch.no_grad():
                reduction = self.streamed.reductions[node]
                slopes[node] = reduction.slope(self.states[node], own) if is_read else None
        return slopes[node]

"""Batches run through both sides, and what their differences add up to."""

from __future__ import annotations

import contextlib
import difflib
import functools
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_leaves

from squeezebox.comparing._run import Run
from squeezebox.comparing._sides import Side
from squeezebox.comparing._tape import Call, Kind, Maker, Place, Tape
from squeezebox.comparing._values import Difference, as_tensor, difference, energy_between
from squeezebox.memory import lacks_memory
from squeezebox.reports import wilson
from squeezebox.schema import OptionError, ParityFigures, PlaceParity, SqueezeboxError, in_one_line
from squeezebox.steps import batch_of, described, restored

_ROUNDINGS = 4
"""Of a's dtype, which always count as agreement; and how often a gradient's own rounding does."""
_NAMED = 4  # layers of one side alone, in a note


@contextlib.contextmanager
def left_as_found(*sides: Side) -> Iterator[None]:
    """Put modes, gradients, buffers and random states back afterwards; begin without gradients."""
    modules = list({id(each.module): each.module for side in sides for each in side.layers}.values())
    modes = [(module, module.training) for module in modules]
    states = random.getstate(), np.random.get_state()
    with restored(torch.nn.ModuleList(modules)):
        try:
            for parameter in (each for module in modules for each in module.parameters(recurse=False)):
                if parameter.is_leaf:
                    parameter.grad = None
            yield
        finally:
            for module, mode in modes:
                module.training = mode
            random.setstate(states[0])
            np.random.set_state(states[1])


@dataclass(slots=True)
class _Row:
    """One place over all batches; ``floor`` is what a rounding does to it."""

    maker: Maker
    own: Difference
    free: Difference
    allowed: float
    floor: float = 0.0

    @property
    def agrees(self) -> bool:
        return self.own.size <= self.allowed + _ROUNDINGS * self.floor

    def widen(self, other: _Row) -> None:
        """To the larger of each."""
        self.own = max(self.own, other.own, key=lambda each: each.size)
        self.free = max(self.free, other.free, key=lambda each: each.size)
        self.floor = max(self.floor, other.floor)


@dataclass(slots=True)
class Comparison:
    """Two sides, and the batches compared so far."""

    a: Side
    b: Side
    backward: bool
    tolerance: float
    names: dict[Call, Call] | None = (
        None  # a's call for those of b's that do not have its name; None at first
    )
    written: set[Call] | None = None  # a's calls that write to what they are given
    rows: dict[Place, _Row] = field(default_factory=dict)
    outputs: list[Difference] = field(default_factory=list)
    flips: list[torch.Tensor] = field(default_factory=list)  # whether each prediction is another, by sample
    only: dict[str, dict[str, None]] = field(default_factory=lambda: {"a": {}, "b": {}})
    notes: dict[str, None] = field(default_factory=dict)
    failed: bool = False
    changes: list[float] = field(default_factory=lambda: [0.0, 0.0])  # squared: the output's, the gradients'

    def add(self, batch: Any) -> None:
        """Run a batch through a, through b, and through b with a's inputs."""
        if self.backward and self.written is None:
            self.written = self._run("a", batch, backward=False).written
        kept = self._run("a", batch)
        free = self._free(batch, kept)
        forced = self._run("b", batch, reference=kept, forces=_everywhere)
        found = self._rows_of(kept, free, forced)
        if not all(row.agrees for place, row in found.items() if place.backward):
            moved = self._run("a", batch, reference=kept, forces=_everywhere, jitter=True).differences
            for place, row in found.items():
                if place.backward and place in moved and math.isfinite(moved[place].size):
                    row.floor = moved[place].size
        for place, row in found.items():
            self.rows.setdefault(place, row).widen(row)
        self._add_output(kept, free)

    def figures(self, batches: Sequence[Any]) -> ParityFigures:
        """What all batches tell."""
        first = next((place for place, row in self.rows.items() if not row.agrees), None)
        finite = [each.size for each in self.outputs]
        flips = torch.cat([each.double().flatten(1).mean(1) for each in self.flips]) if self.flips else None
        share = None if flips is None else float(flips.mean())
        low, high = (None, None) if flips is None or share is None else wilson(share, len(flips))
        for side, names in self.only.items():
            if names:
                more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
                self.notes[f"layers of {side} alone: {', '.join([*names][:_NAMED])}{more}"] = None
        return ParityFigures(
            batches=len(batches),
            samples=sum(batch_of((batch, None)) for batch in batches),
            tolerance=self.tolerance,
            layers=len({(place.layer, place.call) for place in self.rows}),
            places=tuple(_figures(place, row) for place, row in self.rows.items()),
            output=max(finite) if finite and math.isfinite(max(finite)) else None,
            share=None if first is None else self._share(first, batches),
            predictions=sum(each.numel() for each in self.flips),
            flipped=share,
            flipped_low=low,
            flipped_high=high,
            notes=tuple(self.notes),
        )

    # --- runs ----------------------------------------------------------------------------------------

    def _made(self, side: str, **options: Any) -> Run:
        usual: dict[str, Any] = {"backward": self.backward, "written": self.written or (), "names": {}}
        if side == "b":
            usual["names"] = self.names or {}
        return Run(self.a if side == "a" else self.b, **usual | options)

    def _run(self, side: str, batch: Any, **options: Any) -> Tape:
        run = self._made(side, **options)
        with left_as_found(self.a, self.b):
            try:
                return run(batch)
            except _MISTAKES as error:
                if isinstance(error, SqueezeboxError) or lacks_memory(error):
                    raise
                raise OptionError(
                    f"{side} fails on a batch of {described(batch)}: {in_one_line(error)}. Give "
                    "what its first stage is called with; several arguments are a tuple."
                ) from error

    def _free(self, batch: Any, kept: Tape) -> Tape:
        """Run b by itself. Where that fails, a's inputs may still show why."""
        run = self._made("b", reference=kept)
        with left_as_found(self.a, self.b):
            try:
                run(batch)
            except _MISTAKES as error:
                if isinstance(error, SqueezeboxError) or lacks_memory(error):
                    raise
                self.failed = True
                self.notes[f"b fails by itself: {in_one_line(error)}"] = None
        if self.names is None:
            self.names = self._matched(kept, run.tape)
            if self.names:
                return self._free(batch, kept)
        return run.tape

    def _matched(self, kept: Tape, free: Tape) -> dict[Call, Call]:
        """By name where half of b's calls have one of a's; else layers without parts by their shapes."""
        found: dict[Call, Call] = {(b, 0): (a, 0) for a, b in _alike(self.a, self.b) if a != b}
        if 2 * sum(call in kept.shapes for call in free.shapes) >= len(free.shapes):
            return found
        found = {call: (f"{call[0]} of b", call[1]) for call in free.shapes} | found
        ours, theirs = (
            [call for call in tape.shapes if call[0] in side.leaves]
            for tape, side in ((kept, self.a), (free, self.b))
        )
        shapes = [kept.shapes[call] for call in ours], [free.shapes[call] for call in theirs]
        for _, i, i_end, j, j_end in difflib.SequenceMatcher(None, *shapes, autojunk=False).get_opcodes():
            if i_end - i == j_end - j:
                found |= dict(zip(theirs[j:j_end], ours[i:i_end], strict=True))
        return found

    def _share(self, first: Place, batches: Sequence[Any]) -> float | None:
        """How much of the final change goes when b has a's values up to a place, and its own from there."""
        total = self.changes[first.backward]
        if self.failed or not math.isfinite(total) or not total:
            return None
        order = {place: number for number, place in enumerate(self.rows)}
        forces = functools.partial(_up_to, order, order[first])
        rest = 0.0
        for batch in batches:
            kept = self._run("a", batch)
            mended = self._run("b", batch, reference=kept, forces=forces)
            rest += mended.gradient_error if first.backward else _change(kept, mended)
        return max(0.0, 1 - math.sqrt(rest / total))

    # --- what they left ------------------------------------------------------------------------------

    def _rows_of(self, kept: Tape, free: Tape, forced: Tape) -> dict[Place, _Row]:
        graded = kept.has_gradients and forced.has_gradients
        if self.backward and not graded:
            side = "b" if kept.has_gradients else "a"
            self.notes[f"the output of {side} has no gradient: backward is not compared"] = None
        names = self.names or {}
        self.only["a"].update(
            dict.fromkeys(
                p.layer for p in kept.values if p.kind is Kind.OUTPUT and p not in forced.differences
            )
        )
        self.only["b"].update(
            dict.fromkeys(
                name
                for name, call in forced.shapes
                if names.get((name, call), (name, call)) not in kept.shapes
            )
        )
        found: dict[Place, _Row] = {}
        for place in kept.values:
            own = forced.differences.get(place)
            if place.backward and not graded:
                continue
            if (
                own is None
                and place.backward
                and place._replace(kind=Kind.OUTPUT, part="") in forced.differences
            ):
                own = Difference(math.inf, why="no gradient in b")
            if own is not None:
                roundings = _ROUNDINGS * own.eps
                if place.kind is not Kind.OUTPUT:
                    roundings = max(roundings, own.other_eps)  # a's values in b's precision
                maker = forced.makers.get(place, kept.makers[place])
                unreached = Difference(math.inf, why="not reached")
                found[place] = _Row(
                    maker, own, free.differences.get(place, unreached), max(self.tolerance, roundings)
                )
        return found

    def _add_output(self, kept: Tape, free: Tape) -> None:
        if self.failed:
            self.outputs.append(Difference(math.inf))
            return
        leaves = tree_leaves(kept.output), tree_leaves(free.output)
        self.outputs.append(difference(*leaves))
        self.changes[0] += _change(kept, free)
        self.changes[1] += free.gradient_error
        for one, other in zip(*leaves, strict=False):
            classes = _classes(one), _classes(other)
            if classes[0] is not None and classes[1] is not None and classes[0].shape == classes[1].shape:
                self.flips.append((classes[0] != classes[1].to(classes[0].device)).cpu())
                return


_MISTAKES = (RuntimeError, ValueError, TypeError, IndexError, AttributeError, KeyError)


def _alike(a: Side, b: Side) -> list[tuple[str, str]]:
    """Stages that have to agree though their names may differ: each, or the last ones of a side of one."""
    names, others = [name for name, _ in a.stages], [name for name, _ in b.stages]
    return list(zip(names, others, strict=True)) if len(names) == len(others) else [(names[-1], others[-1])]


def _everywhere(place: Place) -> bool:
    return True


def _up_to(order: dict[Place, int], last: int, place: Place) -> bool:
    return order.get(place, last + 1) <= last


def _change(one: Tape, other: Tape) -> float:
    return energy_between(tree_leaves(one.output), tree_leaves(other.output))


def _classes(leaf: Any) -> torch.Tensor | None:
    """The largest of two numbers or more: of (N, C), (N, L, C), (N, C, H, W) and so on."""
    tensor = as_tensor(leaf)
    if tensor is None or not tensor.is_floating_point() or tensor.dim() < 2:
        return None
    dim = 2 if tensor.dim() == 3 else 1
    return tensor.argmax(dim)[:, None] if tensor.shape[dim] > 1 and tensor.shape[0] else None


def _figures(place: Place, row: _Row) -> PlaceParity:
    own, free = row.own, row.free
    call = f" (call {place.call + 1})" if place.call else ""
    return PlaceParity(
        layer=row.maker.layer,
        what=row.maker.what + call,
        backward=place.backward,
        own=own.size if math.isfinite(own.size) else None,
        free=free.size if math.isfinite(free.size) else None,
        allowed=row.allowed + _ROUNDINGS * row.floor,
        why=own.why,
    )

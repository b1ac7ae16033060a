"""Offsets for buffers in one arena, verified pair by pair."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from squeezebox.memory._problem import Integers, Problem, Relation, merged, problem_of
from squeezebox.memory._search import search
from squeezebox.schema import Buffer, Layout, OptionError, PlanError

Packer = Callable[[Problem, float], Integers]


def layout(
    buffers: Sequence[Buffer],
    *,
    conflicts: Relation | None = None,
    groups: Sequence[Sequence[str]] = (),
    packer: Packer = search,
    seconds: float = 2.0,
    alignment: int = 64,
) -> Layout:
    """Place every buffer in an arena, as low as the packer can, so that none in conflict overlap.

    Args:
        buffers: what is to be placed.
        conflicts: symmetric, of shape (buffers, buffers): which two may not share bytes. None: those whose
            times overlap.
        groups: names of buffers that lie side by side in that order, as fused collectives need them; a
            group as a whole conflicts with whatever one of its members does.
        packer: ``search``, ``somas``, or another function from a :class:`Problem` and seconds to offsets.
        seconds: what the packer may search.
        alignment: of all offsets, in bytes; sizes are rounded up to it.

    Returns:
        The layout, every pair of which has been checked.

    Raises:
        OptionError: a buffer, a group, the relation or the alignment is wrong.
        PlanError: the packer's offsets are wrong; nothing is laid out.
    """
    problem = problem_of(buffers, conflicts, alignment)
    item_of, inside = _items(buffers, groups, problem.sizes)
    whole = merged(problem, item_of) if groups else problem
    offsets = np.asarray(packer(whole, seconds), np.int64)[item_of] + inside
    result = Layout(
        offsets=tuple((offsets * alignment).tolist()),
        nbytes=int((offsets + problem.sizes).max(initial=0)) * alignment,
        lower_bound_bytes=whole.lower_bound * alignment,
        alignment=alignment,
        packer=packer.__name__,
    )
    verify(buffers, result, conflicts=problem.conflicts)
    return result


def _items(
    buffers: Sequence[Buffer], groups: Sequence[Sequence[str]], sizes: Integers
) -> tuple[Integers, Integers]:
    """Which item each buffer is part of, and its offset within: groups, then the others alone."""
    numbers = {each.name: number for number, each in enumerate(buffers)}
    item_of, inside = np.full(len(buffers), -1, np.int64), np.zeros(len(buffers), np.int64)
    for item, group in enumerate(groups):
        offset = 0
        for name in group:
            if name not in numbers:
                raise OptionError(f"a group names '{name}', which is no buffer; name those of the layout.")
            if item_of[numbers[name]] >= 0:
                raise OptionError(f"buffer '{name}' is in groups twice; it can lie in one place only.")
            item_of[numbers[name]], inside[numbers[name]] = item, offset
            offset += int(sizes[numbers[name]])
    alone = item_of < 0
    item_of[alone] = len(groups) + np.arange(alone.sum())
    return np.unique(item_of, return_inverse=True)[1], inside


def verify(buffers: Sequence[Buffer], layout: Layout, *, conflicts: Relation) -> None:
    """Check a layout pair by pair.

    Args:
        buffers: those the layout was made for.
        layout: their offsets.
        conflicts: as for ``layout``, not None.

    Raises:
        PlanError: two buffers in conflict overlap, or one lies outside the arena or off its alignment.
    """
    starts = np.array(layout.offsets, np.int64)
    ends = starts + np.array([each.nbytes for each in buffers], np.int64)
    outside = (starts < 0) | (ends > layout.nbytes) | (starts % layout.alignment != 0)
    for number in np.flatnonzero(outside)[:1]:
        raise PlanError(
            f"'{buffers[number].name}' at [{starts[number]}, {ends[number]}) is outside the arena of "
            f"{layout.nbytes} bytes or no multiple of {layout.alignment}; packer '{layout.packer}' is wrong."
        )
    for first, (start, end) in enumerate(zip(starts, ends, strict=True)):
        shared = np.minimum(ends[:first], end) - np.maximum(starts[:first], start)
        clashes = conflicts[first, :first] & (shared > 0)
        for second in np.flatnonzero(clashes)[:1]:
            raise PlanError(
                f"'{buffers[first].name}' at [{start}, {end}) and '{buffers[second].name}' at "
                f"[{starts[second]}, {ends[second]}) overlap but may not share bytes; the packer "
                f"'{layout.packer}' is wrong."
            )

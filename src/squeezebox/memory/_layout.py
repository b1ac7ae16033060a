"""Offsets for buffers in one arena, verified pair by pair."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from squeezebox.memory._problem import Integers, Problem, Relation, problem_of
from squeezebox.memory._somas import somas
from squeezebox.schema import Buffer, Layout, PlanError

Packer = Callable[[Problem, float], Integers]


def layout(
    buffers: Sequence[Buffer],
    *,
    conflicts: Relation | None = None,
    packer: Packer | None = None,
    seconds: float = 10.0,
    alignment: int = 64,
) -> Layout:
    """Place every buffer in an arena as low as the packer can, so that none in conflict overlap.

    Args:
        buffers: what is to be placed.
        conflicts: symmetric, of shape (buffers, buffers): which two may not share bytes. None: those whose
            times overlap.
        packer: one of ``packers()``, or any function from a :class:`Problem` and seconds to
            offsets in units of ``alignment``.
        seconds: what a packer that searches may take.
        alignment: of all offsets, in bytes; sizes are rounded up to it.

    Returns:
        The layout, every pair of which has been checked.

    Raises:
        OptionError: a buffer, the relation or the alignment is out of range.
        PlanError: the packer's offsets are wrong; nothing is laid out.
    """
    problem = problem_of(buffers, conflicts, alignment)
    packer = packer or somas
    offsets = np.asarray(packer(problem, seconds), np.int64)
    result = Layout(
        offsets=tuple((offsets * alignment).tolist()),
        nbytes=int((offsets + problem.sizes).max(initial=0)) * alignment,
        lower_bound_bytes=problem.lower_bound * alignment,
        alignment=alignment,
        packer=packer.__name__,
    )
    verify(buffers, result, conflicts=problem.conflicts)
    return result


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
        clashes = conflicts[first, :first] & (starts[:first] < end) & (ends[:first] > start)
        for second in np.flatnonzero(clashes)[:1]:
            raise PlanError(
                f"'{buffers[first].name}' at [{start}, {end}) and '{buffers[second].name}' at "
                f"[{starts[second]}, {ends[second]}) overlap but may not share bytes; the packer "
                f"'{layout.packer}' is wrong."
            )

"""Sets of channels that can only go together, and where each parameter has them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch


@dataclass(eq=False, slots=True)
class Channels:
    """Channels that are narrowed alike, wherever they are. ``fixed`` where something else depends on them."""

    count: int
    fixed: bool = False
    joined: Channels | None = None

    def root(self) -> Channels:
        """The set that this one became a part of."""
        found = self
        while found.joined is not None:
            found = found.joined
        return found


class Segment(NamedTuple):
    """A run of a dimension: each channel has ``inner`` elements next to each other."""

    channels: Channels
    inner: int = 1

    @property
    def size(self) -> int:
        """Elements of the dimension."""
        return self.channels.count * self.inner


Axis = tuple[Segment, ...] | None
"""What a dimension is made of; None where nobody may change its size."""


def fix(axis: Axis) -> None:
    """Nobody may change this dimension's size from here on."""
    for segment in axis or ():
        segment.channels.root().fixed = True


def unite(one: Axis, other: Axis) -> Axis:
    """Two dimensions that have to stay alike."""
    forms = [None if axis is None else [(s.channels.count, s.inner) for s in axis] for axis in (one, other)]
    if one is None or other is None or forms[0] != forms[1]:
        fix(one)
        fix(other)
        return None
    for mine, theirs in zip(one, other, strict=True):
        root, joined = mine.channels.root(), theirs.channels.root()
        if root is not joined:
            root.fixed |= joined.fixed
            joined.joined = root
    return one


@dataclass(slots=True)
class Placements:
    """By a parameter's or buffer's name and dimension: the channels along it."""

    shapes: dict[str, torch.Size]
    axes: dict[tuple[str, int], Axis] = field(default_factory=dict)

    def bind(self, name: str, dim: int, axis: Axis) -> Axis:
        """Say that a dimension has these channels, in addition to what was said before."""
        place = name, dim
        sizes = sum(segment.size for segment in axis or ())
        if axis is not None and sizes != self.shapes[name][dim]:
            fix(axis)
            axis = None
        self.axes[place] = unite(self.axes[place], axis) if place in self.axes else axis
        return self.axes[place]

    def axis(self, name: str, dim: int) -> Axis:
        """The channels along a dimension, new ones where nothing was said of it."""
        if (name, dim) not in self.axes:
            self.axes[name, dim] = (Segment(Channels(self.shapes[name][dim])),)
        return self.axes[name, dim]

    def free(self) -> dict[Channels, list[tuple[str, int]]]:
        """Sets that may be narrowed, with the dimensions that they are along."""
        found: dict[Channels, list[tuple[str, int]]] = {}
        for place, axis in self.axes.items():
            for root in {segment.channels.root() for segment in axis or ()}:
                if not root.fixed and root.count > 1:
                    found.setdefault(root, []).append(place)
        return found

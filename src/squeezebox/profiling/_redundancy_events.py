"""A recorded step as plain data: operators in their order, and the lives of the storages they touch."""

from __future__ import annotations

import enum
import math
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

_TRIFLE = 16  # bytes


class Place(NamedTuple):
    """The innermost line of Python outside torch and Squeezebox, and the innermost module."""

    file: str
    line: int
    function: str
    module: str


class View(NamedTuple):
    """What a strided tensor sees of a storage; storages are numbered, and numbers never used again."""

    storage: int
    offset: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Of its elements."""
        return math.prod(self.sizes) * self.dtype.itemsize

    @property
    def overlaps_itself(self) -> bool:
        """Whether elements share memory because a size was expanded."""
        return any(size > 1 and stride == 0 for size, stride in zip(self.sizes, self.strides, strict=True))


class Trait(enum.Flag):
    """What is known of one call."""

    NONE = 0
    RANDOM = enum.auto()
    EFFECT = enum.auto()  # more than tensors comes of it: numbers for the host, shapes, messages
    OVERWRITES = enum.auto()  # what it writes in place, it does not read
    UNINITIALISED = enum.auto()
    DIFFERENTIATED = enum.auto()  # autograd may keep its tensors
    RECOMPUTED = enum.auto()  # by checkpointing, on purpose
    OWN = enum.auto()  # Squeezebox's, not the user's
    OPAQUE = enum.auto()  # tensors that are not strided, or an operator from elsewhere than torch


@dataclass(kw_only=True, slots=True)
class Event:
    """One operator. ``fresh`` are results in storages of their own; ``waited_bytes`` if the host waits."""

    time: int
    step: int
    operator: str
    place: Place
    phase: str
    reads: tuple[View, ...]
    writes: tuple[View, ...]
    fresh: tuple[View, ...]
    arguments: Hashable | None  # all but the tensors; None where they cannot be compared
    traits: Trait
    seconds: float = 0.0
    waited_bytes: int | None = None

    @property
    def written_bytes(self) -> int:
        """Into new storages and in place."""
        return sum(view.nbytes for view in (*self.fresh, *self.writes))

    @property
    def is_trifle(self) -> bool:
        """Whether it works on a number or two."""
        return self.written_bytes + sum(view.nbytes for view in self.reads) <= _TRIFLE


@dataclass(kw_only=True, slots=True)
class Life:
    """A storage; ``died`` is the time of the operator before its end, None if it outlived the recording."""

    nbytes: int
    device: str
    owned: bool = False  # a module's parameter or buffer
    died: int | None = None
    escaped: bool = False  # numpy or an address has it: reads and writes are not seen


@dataclass(kw_only=True, slots=True)
class StepEvents:
    """Steps one after another; ``ends`` has the time at which each was over."""

    device: torch.device
    events: list[Event] = field(default_factory=list)
    lives: list[Life] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)

    def of_step(self, step: int) -> list[Event]:
        """Its operators."""
        return [event for event in self.events if event.step == step]

    def covers(self, view: View) -> bool:
        """Whether the view is all of its storage."""
        return view.nbytes == self.lives[view.storage].nbytes and not view.overlaps_itself

    def escaped(self, views: tuple[View, ...]) -> bool:
        """Whether others than torch have any of them."""
        return any(self.lives[view.storage].escaped for view in views)

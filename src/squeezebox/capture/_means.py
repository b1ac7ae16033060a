"""What a store holds tensors with, and what was decided of them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch

from squeezebox.capture._arena import Arena
from squeezebox.capture._contracts import Choice, Policy
from squeezebox.capture._device import DeviceBlocks
from squeezebox.capture._entries import Row
from squeezebox.capture._onlooker import Onlooker
from squeezebox.memory import Loans, Reserve, Spill, Staging
from squeezebox.schema import Option, Role


def _no_plan(key: str) -> Option | None:
    return None


@dataclass(eq=False)
class Means:
    """Shared by a :class:`Store`, which is one, and what packs and unpacks for it."""

    policy: Policy
    planned: Callable[[str], Option | None] = _no_plan  # how a plan holds the tensor of a key
    late_values: dict[str, Role] = field(default_factory=dict)  # whose values were asked for after their sign
    refused: dict[str, str] = field(default_factory=dict)  # that were to be packed and are kept, and why
    unweighed: dict[str, str] = field(default_factory=dict)  # whose errors are beyond a float, from then on
    spares: Callable[[Row, Choice], bool] | None = None  # whether nothing is to be lost all the same
    spill: Spill = field(default_factory=Spill)
    staging: Staging | None = None  # where a device's tensors go instead
    arena: Arena = field(default_factory=Arena)  # of unpacked tensors
    reserve: Reserve | None = None  # where packed ones go in the host's memory
    blocks: DeviceBlocks | None = None  # where a device's blocks go,
    room: int = 0  # and how many bytes they get, where a plan says so
    loans: Loans | None = None  # of weights that are elsewhere
    onlookers: tuple[Onlooker, ...] = ()
    ready: Callable[[torch.dtype], bool] | None = None  # whether packing can be; asked where it need not be
    unready: bool = False  # whether a tensor of this step is kept because of it
    unready_steps: int = 0  # and of how many before

    @property
    def measured(self) -> bool:
        """Whether an onlooker measures what could be held."""
        return any(each.measures for each in self.onlookers)

    @contextlib.contextmanager
    def shown_to(self, onlooker: Onlooker) -> Iterator[None]:
        """A context in which it looks on, after those who do already."""
        self.onlookers = (*self.onlookers, onlooker)
        try:
            yield
        finally:
            self.onlookers = tuple(each for each in self.onlookers if each is not onlooker)

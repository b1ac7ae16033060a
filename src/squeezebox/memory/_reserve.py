"""Places for packed tensors in the host's memory, of the same size in every step."""

from __future__ import annotations

import math
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace

import torch

from squeezebox.schema import ArenaRecord, Buffer

_QUANTILE = 0.95  # of a tensor's last sizes, nearest rank
_SIZES = 20  # that are remembered: one of them may be larger than its place
HEADROOM = 1.125  # over that, where sizes vary
_SPARE = 1.5  # times what is wanted: a place that is larger is made smaller
_ALIGNMENT = 64


class Room:
    """A tensor's place in the arena. It stays taken for as long as anything holds the tensor put there."""

    def __init__(self, bytes_: torch.Tensor) -> None:
        self._bytes = bytes_
        self._used = 0

    @property
    def free(self) -> torch.Tensor:
        """The bytes of which nothing has been made yet."""
        return self._bytes[self._used :]

    def take(self, nbytes: int) -> torch.Tensor | None:
        """``nbytes`` of its bytes; None if there are fewer."""
        free = self.free
        if nbytes > free.numel():
            return None
        self._used = min(aligned(self._used + nbytes), self._bytes.numel())
        return free[:nbytes]

    def put(self, part: torch.Tensor) -> torch.Tensor | None:
        """A flat part here: where it lies already, or as a copy; None if it does not fit."""
        place = self.take(part.nbytes)
        if place is None or (part.nbytes and part.data_ptr() == place.data_ptr()):
            return None if place is None else part
        return place.view(part.dtype).copy_(part)


@dataclass(slots=True)
class _Life:
    """One tensor's bytes and times within one step."""

    nbytes: int
    lower: int
    upper: int = 0


@dataclass(frozen=True, slots=True)
class _Block:
    """One allocation, and where each tensor goes in it. Its storage lives on with what lies there."""

    memory: torch.Tensor
    places: dict[str, tuple[int, int]]  # offset and bytes
    occupied: dict[int, tuple[int, int]] = field(default_factory=dict)  # start and end, by number

    def claim(self, key: str) -> Room | None:
        """The place, unless some of its bytes are in use."""
        start, nbytes = self.places.get(key, (0, 0))
        end = start + nbytes
        in_use = list(self.occupied.values())  # of which some may end meanwhile
        if not nbytes or any(lower < end and start < upper for lower, upper in in_use):
            return None
        # An array's view ends when the last tensor on it does; a slice of the tensor would share its storage.
        view = self.memory.numpy()[start:end]
        self.occupied[id(view)] = (start, end)
        weakref.finalize(view, self.occupied.pop, id(view)).atexit = False
        return Room(torch.from_numpy(view))  # a storage of its own, which holds the view


def _pageable(nbytes: int) -> torch.Tensor:
    return torch.empty(nbytes, dtype=torch.uint8, device="cpu")


class Reserve:
    """The arena of one session: a step at a time, from :meth:`start_step` to the next.

    Every tensor has a place, as large in every step. It is memory of its own, allocated when the tensor is
    about to be packed and given back when nobody refers to what was put there: what is there at a moment is
    the same in every step, and nothing stays for the others. A ``lasting`` arena, for tensors whose sizes do
    not vary, is one block instead, which is kept; those that are never there together share bytes.

    Sizes are known from :meth:`plan`, or else from the first step in which a tensor is packed. They leave an
    eighth over 95 % of the last twenty steps' sizes. What does not fit, has no place, or would lie where
    bytes of a lasting arena are still in use (a graph that was kept, lifetimes in another order) is spilled:
    left in memory of its own, and counted. For the next step, too small a place is made larger; one that
    was more than half too large for twenty steps, smaller.

    ``allocate(nbytes)`` gives that much of the host's memory.
    """

    def __init__(self, allocate: Callable[[int], torch.Tensor] = _pageable, *, lasting: bool = False) -> None:
        self._allocate = allocate
        self._lasting = lasting
        self._headroom = 1.0 if lasting else HEADROOM
        self._block: _Block | None = None  # of a lasting one
        self._places: dict[str, int] = {}
        self._sizes: dict[str, deque[int]] = {}
        self._known: dict[str, _Life] = {}  # of each tensor, the last
        self._lives: dict[str, _Life] = {}  # of the running step
        self._clock = 0
        self._number = 0  # of the running step
        self.record = ArenaRecord()  # of the running step

    @property
    def places(self) -> Mapping[str, int]:
        """Bytes that each tensor's place has."""
        return self._places

    def plan(self, sizes: Mapping[str, int], headroom: float = 1.0) -> None:
        """Give tensors places of ``sizes`` bytes; the first one named is packed first and needed last.

        ``headroom``: over its sizes, for a place that turns out too small; 1: none, as nobody has counted it.
        """
        self._headroom = headroom
        # Lifetimes nest, as backward needs tensors in the opposite order.
        for number, (key, nbytes) in enumerate(sizes.items()):
            self._known[key] = _Life(nbytes, number, 2 * len(sizes) - number)
        places = {key: aligned(nbytes) for key, nbytes in sizes.items()}
        if not places.items() <= self._places.items():
            self._lay_out(places)

    def start_step(self, *, learn: bool = True) -> None:
        """The step before is over, and what it has left undone stays where it is.

        ``learn``: its sizes tell those of the next ones.
        """
        if learn:
            self._learn()
        self._lives, self._clock, self._number = {}, 0, self._number + 1
        self.record = replace(self.record, tensors=0, spills=0, spilled_bytes=0)

    def claim(self, key: str) -> Room | None:
        """The place for the tensor of that name, which is about to be packed; None: there is none now."""
        if self._lasting:
            return None if self._block is None else self._block.claim(key)
        nbytes = self._places.get(key)
        return None if nbytes is None else Room(self._allocate(nbytes))

    def note(self, key: str, parts: Iterable[int], owner: object, *, placed: bool) -> None:
        """``key`` was packed into ``parts``, bytes each; they are in use for as long as ``owner`` lives."""
        sizes = list(parts)
        if key not in self._lives:
            self._lives[key] = _Life(sum(map(aligned, sizes)), self._tick())
            if self._lasting:
                weakref.finalize(owner, self._released, self._number, key).atexit = False
        spilled = bool(self._places) and not placed
        self.record = replace(
            self.record,
            tensors=self.record.tensors + placed,
            spills=self.record.spills + spilled,
            spilled_bytes=self.record.spilled_bytes + sum(sizes) * spilled,
            total_spills=self.record.total_spills + spilled,
        )

    def _released(self, number: int, key: str) -> None:
        if number == self._number:
            self._lives[key].upper = self._tick()

    def _tick(self) -> int:
        self._clock += 1
        return self._clock

    def _learn(self) -> None:
        for key, life in self._lives.items():
            self._sizes.setdefault(key, deque(maxlen=_SIZES)).append(life.nbytes)
            life.upper = life.upper or self._clock + 1  # what was not released by now
        self._known |= self._lives
        places = {key: self._place(key) for key in self._lives}
        in_use = self._block is not None and self._block.occupied
        if not in_use and not places.items() <= self._places.items():
            self._lay_out(places)

    def _place(self, key: str) -> int:
        """Bytes that the tensor wants: those that its place has, if that serves."""
        sizes, place = self._sizes[key], self._places.get(key, 0)
        least = sorted(sizes)[math.ceil(_QUANTILE * len(sizes)) - 1]
        wanted = aligned(math.ceil(self._headroom * least))
        serves = place <= _SPARE * wanted or len(sizes) < _SIZES
        return place if least <= place and serves else wanted

    def _lay_out(self, places: Mapping[str, int]) -> None:
        self._places |= places
        nbytes = sum(self._places.values())
        if self._lasting:
            from squeezebox.memory._layout import layout  # here, for it loads numba

            self._block = None  # before the next one is made
            buffers = [
                Buffer(name=key, lower=life.lower, upper=life.upper, nbytes=self._places[key])
                for key, life in self._known.items()
            ]
            found = layout(buffers, alignment=_ALIGNMENT)
            starts = zip(buffers, found.offsets, strict=True)
            nbytes = found.nbytes
            self._block = _Block(self._allocate(nbytes), {b.name: (start, b.nbytes) for b, start in starts})
        self.record = replace(self.record, nbytes=nbytes, layouts=self.record.layouts + 1)


def aligned(nbytes: int) -> int:
    """Bytes of a place that holds ``nbytes``."""
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT

"""Packed tensors in one preallocated block of the host's memory, at places learned from the steps before."""

from __future__ import annotations

import itertools
import math
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch

from squeezebox.memory._layout import layout
from squeezebox.schema import ArenaRecord, Buffer

_LEARNING = 3  # steps before the first layout, after the very first, in which bounds are not known yet
_QUANTILE = 0.95  # of a tensor's sizes so far, nearest rank: the largest of the first twenty
_HEADROOM = 1.0625  # over that
_SIZES = 64  # of the last steps, that count
_ALIGNMENT = 64
_TOLERATED = 0.02  # of the arena, spilled, and
_SPARE = 1.5  # times what is needed: beyond these in
_PATIENCE = 4  # steps on end a new layout is made


class Room:
    """A tensor's place in the arena. What is put there keeps it occupied, whoever holds it."""

    def __init__(self, bytes_: torch.Tensor) -> None:
        self._bytes = bytes_
        self._used = 0

    @property
    def free(self) -> torch.Tensor:
        """The bytes of which nothing has been made yet."""
        return self._bytes[self._used :]

    def take(self, nbytes: int) -> torch.Tensor | None:
        """So many of them; None if there are fewer."""
        free = self.free
        if nbytes > free.numel():
            return None
        self._used = min(_aligned(self._used + nbytes), self._bytes.numel())
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
        view = self.memory.numpy()[start:end]
        self.occupied[id(view)] = (start, end)
        weakref.finalize(view, self.occupied.pop, id(view)).atexit = False
        return Room(torch.from_numpy(view))  # a storage of its own, which holds the view


def _pageable(nbytes: int) -> torch.Tensor:
    return torch.empty(nbytes, dtype=torch.uint8, device="cpu")


class Reserve:
    """The arena of one session: a step at a time, from :meth:`start_step` to the next.

    The first four steps' tensors lie in memory of their own, and tell sizes and lifetimes. Then one block is
    allocated and kept. A tensor's place is a sixteenth larger than 95 % of its sizes. What does not fit, has
    no place, or would lie where bytes are still in use (a graph that was kept, lifetimes in another order) is
    spilled: left in memory of its own, and counted. After four steps that all spilled more than a fiftieth of
    the arena, or needed less than two thirds of it, it is laid out anew.

    ``allocate`` gives so many bytes of the host's memory.
    """

    def __init__(self, allocate: Callable[[int], torch.Tensor] = _pageable) -> None:
        self._allocate = allocate
        self._block: _Block | None = None
        self._sizes: dict[str, deque[int]] = {}
        self._lives: dict[str, _Life] = {}  # of the running step
        self._clock = 0
        self._number = 0  # of the running step
        self._learned = 0  # steps
        self._misfits = 0  # steps on end that it was too small or too large for
        self.record = ArenaRecord()  # of the running step

    @property
    def tensors(self) -> Sequence[torch.Tensor]:
        """What it holds whether it is used or not."""
        return () if self._block is None else (self._block.memory,)

    def start_step(self) -> None:
        """The step before is over, and what it has left undone stays where it is."""
        if self._lives:
            self._learn()
        self._lives, self._clock, self._number = {}, 0, self._number + 1
        self.record = replace(self.record, tensors=0, spills=0, spilled_bytes=0)

    def claim(self, key: str) -> Room | None:
        """The place for the tensor of that name, which is about to be packed; None: there is none now."""
        return None if self._block is None else self._block.claim(key)

    def note(self, key: str, nbytes: int, owner: object, *, placed: bool) -> None:
        """So many bytes were packed, in the arena or not, and live as long as ``owner``."""
        if key not in self._lives:
            self._lives[key] = _Life(nbytes, self._tick())
            weakref.finalize(owner, self._released, self._number, key).atexit = False
        spilled = self._block is not None and not placed
        self.record = replace(
            self.record,
            tensors=self.record.tensors + placed,
            spills=self.record.spills + spilled,
            spilled_bytes=self.record.spilled_bytes + nbytes * spilled,
            total_spills=self.record.total_spills + spilled,
        )

    def _released(self, number: int, key: str) -> None:
        if number == self._number:
            self._lives[key].upper = self._tick()

    def _tick(self) -> int:
        self._clock += 1
        return self._clock

    def _learn(self) -> None:
        self._learned += 1
        if self._learned == 1:
            return
        for key, life in self._lives.items():
            self._sizes.setdefault(key, deque(maxlen=_SIZES)).append(life.nbytes)
        if self._block is None:
            if self._learned > _LEARNING:
                self._lay_out()
            return
        self._misfits = 0 if self._fits(self._block.memory.nbytes) else self._misfits + 1
        if self._misfits >= _PATIENCE and not self._block.occupied:
            for sizes in self._sizes.values():
                while len(sizes) > _PATIENCE:
                    sizes.popleft()
            self._lay_out()

    def _fits(self, nbytes: int) -> bool:
        """Whether the arena is neither too small for the running step nor far too large."""
        return self.record.spilled_bytes <= _TOLERATED * nbytes <= _TOLERATED * _SPARE * self._needed()

    def _needed(self) -> float:
        """The most bytes that were there at the same time, and what is added to them."""
        changes = [0] * (self._clock + 2)
        for life in self._lives.values():
            changes[life.lower] += life.nbytes
            changes[life.upper or self._clock + 1] -= life.nbytes
        return _HEADROOM * max(itertools.accumulate(changes))

    def _lay_out(self) -> None:
        self._block, self._misfits = None, 0  # before the next one is made
        buffers = list(self._buffers())
        found = layout(buffers, alignment=_ALIGNMENT)
        named = zip(buffers, found.offsets, strict=True)
        places = {buffer.name: (offset, buffer.nbytes) for buffer, offset in named}
        self._block = _Block(self._allocate(found.nbytes), places)
        self.record = replace(self.record, nbytes=found.nbytes, layouts=self.record.layouts + 1)

    def _buffers(self) -> Iterator[Buffer]:
        """Of the last step's tensors; what it has not released by now lasts to its end."""
        for key, life in self._lives.items():
            yield Buffer(
                name=key,
                lower=life.lower,
                upper=life.upper or self._clock + 1,
                nbytes=_aligned(math.ceil(_HEADROOM * _quantile(self._sizes[key]))),
            )


def _quantile(sizes: Sequence[int]) -> int:
    return sorted(sizes)[math.ceil(_QUANTILE * len(sizes)) - 1]


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT

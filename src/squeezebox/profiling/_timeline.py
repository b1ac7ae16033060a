"""A step's allocations with marks between them, and what they say of every saved tensor's life."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch

from squeezebox.memory import Recording
from squeezebox.schema import OptionError

_PREFIX = "squeezebox "
_SAVE, _SAVED, _USE, _USED, _RELEASE = "save", "saved", "use", "used", "release"
_CALL, _CALLED = "call", "called"
_LOSS, _FREED = "loss", "freed"
_GRADIENT, _UPDATED = "gradient", "updated"
_LEND, _LENT, _BACK = "lend", "lent", "given back"


@dataclass(slots=True)
class Life:
    """Positions of one saved tensor: packed, original freed, first and last needed by backward."""

    saved_at: int
    dropped_at: int
    first_use: int
    last_use: int
    decoded_bytes: int = 0  # allocated when it was unpacked; buffers that were there already do not count
    packing_bytes: int = 0  # the most that packing had allocated beyond what it left
    idle_until: int = -1  # its buffer is freed by the next request after it, or at the step's end
    gaps: list[tuple[int, int]] = field(default_factory=list)  # between uses, in which it has none


@dataclass(frozen=True, slots=True)
class Trace:
    """``base_bytes``: the most that each position holds apart from what packing and unpacking allocate.

    A position is the time between two marks, or between a mark and the end of a saved tensor's original.
    ``moments`` says of each what began it, as (phase, event, tensor); ``gradient_bytes`` how much of its base
    was gradients when it was highest. ``peak_bytes`` is the most of the whole step, codecs' allocations too.
    """

    base_bytes: tuple[int, ...]
    gradient_bytes: tuple[int, ...]
    moments: tuple[tuple[str, str, int], ...]
    lives: dict[int, Life]
    gradients_at: dict[
        int, int
    ]  # where each parameter's gradient is complete, which is a position of its own
    call_bytes: dict[int, int]  # the most that an operator held, its result included, beyond what there was
    loans: dict[int, list[tuple[int, int]]]  # (first, last) positions at which each frozen weight is read
    peak_bytes: int


class Timeline:
    """Marks one step: which allocations belong to packing, which to everything else.

    Between :meth:`save` and :meth:`saved`, and between :meth:`use` and :meth:`used`, allocations are
    those of codecs. Tensors are numbered by the caller.
    """

    def __init__(self, device: torch.device) -> None:
        self._recording = Recording(device)

    def start(self) -> None:
        """Begin.

        Raises:
            OptionError: another profiler is active.
        """
        if not self._recording.start():
            raise OptionError(
                "a step cannot be profiled while another profiler is running; end that one first. A session "
                "measures the peaks of some steps: run the backward that it waits for, or detach() it."
            )

    def loss(self) -> None:
        """The model has returned and the loss begins."""
        self._mark(_LOSS, -1)

    def save(self, number: int, tensor: torch.Tensor) -> None:
        """Packing of a tensor begins; ``tensor`` is the original."""
        self._mark(_SAVE, number, tensor.untyped_storage().data_ptr())

    def saved(self, number: int) -> None:
        """Packing of a tensor has ended."""
        self._mark(_SAVED, number)

    def use(self, number: int) -> None:
        """Unpacking of a tensor begins."""
        self._mark(_USE, number)

    def used(self, number: int, unpacked: Iterable[int]) -> None:
        """Unpacking of a tensor has ended; there are buffers of those ``unpacked``."""
        self._mark(_USED, number, *unpacked)

    def release(self, number: int) -> None:
        """Nobody will ask for the tensor again."""
        self._mark(_RELEASE, number)

    def call(self, number: int) -> None:
        """An operator begins; operators have numbers of their own."""
        self._mark(_CALL, number)

    def called(self, number: int) -> None:
        """It has ended."""
        self._mark(_CALLED, number)

    def gradient(self, number: int) -> None:
        """Backward has all of a parameter's gradient; parameters have numbers of their own."""
        self._mark(_GRADIENT, number)
        self._mark(_UPDATED, number)

    def lend(self, number: int) -> None:
        """A frozen weight comes into memory, in one block; such weights have numbers of their own."""
        self._mark(_LEND, number)

    def lent(self, number: int) -> None:
        """It is there, until the block is free."""
        self._mark(_LENT, number)

    def stop(self, held: int, gradients: Iterable[torch.Tensor] = ()) -> Trace:
        """End; ``held`` bytes lived before and go on living, ``gradients`` are what the step has left."""
        reading = _Reading(base=[held], now=held)
        events = self._recording.events()
        last = {address: number for number, (_, address, nbytes) in enumerate(events) if nbytes > 0}
        left = {last.get(gradient.untyped_storage().data_ptr()) for gradient in gradients}
        for number, (name, address, nbytes) in enumerate(events):
            if name.startswith(_PREFIX):
                reading.mark(name.removeprefix(_PREFIX).split())
            elif nbytes:
                reading.allocation(address, nbytes, number in left)
        reading.end()
        return Trace(
            base_bytes=tuple(reading.base),
            gradient_bytes=tuple(reading.gradients),
            moments=tuple(reading.moments),
            lives=reading.lives,
            gradients_at=reading.gradients_at,
            call_bytes=reading.calls,
            loans=reading.loans,
            peak_bytes=held + reading.most,
        )

    def close(self) -> None:
        """End without reading; safe to call twice."""
        self._recording.close()

    def _mark(self, *words: object) -> None:
        self._recording.mark(_PREFIX + " ".join(map(str, words)))


@dataclass(slots=True)
class _Reading:
    """The events so far."""

    base: list[int]
    now: int
    gradients: list[int] = field(default_factory=lambda: [0])
    moments: list[tuple[str, str, int]] = field(default_factory=lambda: [("forward", "", -1)])
    lives: dict[int, Life] = field(default_factory=dict)
    gradients_at: dict[int, int] = field(default_factory=dict)
    calls: dict[int, int] = field(default_factory=dict)
    loans: dict[int, list[tuple[int, int]]] = field(default_factory=dict)
    most: int = 0  # bytes of all blocks
    _all: int = 0
    _sizes: dict[int, int] = field(default_factory=dict)  # address -> bytes
    _call: tuple[int, int] = (-1, 0)  # the running operator, and the bytes there were before it
    _phase: str = "forward"
    _of_loss: set[int] = field(default_factory=set)  # tensors that the loss has saved
    _gradients_now: int = 0
    _inside: int = 0
    _blocks: dict[int, int] = field(default_factory=dict)  # address -> bytes that count
    _originals: dict[int, int] = field(default_factory=dict)  # address -> tensor
    _using: int | None = None
    _scratch: dict[int, int] = field(default_factory=dict)  # address -> bytes, since packing began
    _most_scratch: int = 0
    _decoded: int = 0  # bytes allocated since its use began
    _idle: list[int] = field(default_factory=list)  # tensors whose buffer nobody has asked for since
    _used_at: int = 0
    _unpacked: set[int] = field(default_factory=set)  # tensors that have a buffer
    _gone: dict[int, int] = field(default_factory=dict)  # tensor -> from when on it has none any more
    _lending: int | None = None
    _lent: dict[int, tuple[int, int]] = field(default_factory=dict)  # address -> weight, and from when on

    def mark(self, words: Sequence[str]) -> None:
        kind, number = words[0], int(words[1])
        if kind in (_CALL, _CALLED):
            self._call = (number if kind == _CALL else -1, self.now)
        elif kind in (_GRADIENT, _UPDATED):
            self._turn(kind, -1)
            self.gradients_at.setdefault(number, len(self.base) - 1)
        elif kind in (_LEND, _LENT):
            if not self._inside:  # else for a trial, which no step makes
                self._turn(kind, -1)
                self._lending = number if kind == _LEND else None
        else:
            self._tensor(kind, number, words)

    def _tensor(self, kind: str, number: int, words: Sequence[str]) -> None:
        """A mark of a saved tensor's."""
        self._enter(kind, number)
        self._turn(kind, number)
        position = len(self.base) - 1
        self._inside += (kind in (_SAVE, _USE)) - (kind in (_SAVED, _USED))
        if kind == _SAVE:
            self._scratch, self._most_scratch = {}, 0
            if number not in self.lives:
                self.lives[number] = Life(position, 1 << 62, 1 << 62, position)
                self._originals[int(words[2])] = number
        elif kind == _SAVED:
            life = self.lives[number]
            beyond = self._most_scratch - sum(self._scratch.values())
            life.packing_bytes = max(life.packing_bytes, beyond)
        elif kind == _USE:
            life = self.lives[number]
            life.first_use = min(life.first_use, position)
            gone = self._gone.pop(number, position)
            life.gaps += [(gone, position - 1)] if gone < position else []
            self._using, self._decoded, self._used_at = number, 0, position
            while self._idle:
                self.lives[self._idle.pop()].idle_until = position - 1
        elif kind == _USED:
            life = self.lives[number]
            life.decoded_bytes = max(life.decoded_bytes, self._decoded)
            self._using = None
            unpacked = set(map(int, words[2:]))
            self._gone |= dict.fromkeys(self._unpacked - unpacked, self._used_at)
            self._unpacked = unpacked
        elif kind == _RELEASE:
            self._idle.append(number)
        if number in self.lives and kind in (_USE, _USED, _RELEASE):
            self.lives[number].last_use = position - (kind == _RELEASE)  # it is gone by the mark

    def allocation(self, address: int, nbytes: int, gradient: bool) -> None:
        self._all -= self._sizes.pop(address, 0)
        if nbytes > 0:
            self._sizes[address] = nbytes
            self._all += nbytes
            self.most = max(self.most, self._all)
            if self._lending is not None:
                self._lent[address] = (self._lending, len(self.base) - 1)
                self._lending = None
                return
            counted = 0 if self._inside else nbytes
            self.now += counted - self._blocks.pop(address, 0)  # freed where no profiler saw it
            self._blocks[address] = counted
            self._gradients_now += counted if gradient else 0
            if self.now > self.base[-1]:
                self.base[-1], self.gradients[-1] = self.now, self._gradients_now
            call, before = self._call
            self.calls[call] = max(self.calls.get(call, 0), self.now - before)
            if self._using is not None:
                self._decoded += nbytes
            elif self._inside:
                self._scratch[address] = nbytes
                self._most_scratch = max(self._most_scratch, sum(self._scratch.values()))
            return
        if address in self._lent:
            self._give_back(address)
            return
        self._scratch.pop(address, 0)
        self.now -= self._blocks.pop(address, 0)
        number = self._originals.pop(address, None)
        if number is not None:
            self._turn(_FREED, number)
            self.lives[number].dropped_at = len(self.base) - 1

    def _give_back(self, address: int) -> None:
        number, since = self._lent.pop(address)
        self._turn(_BACK, -1)
        self.loans.setdefault(number, []).append((since, len(self.base) - 2))

    def end(self) -> None:
        """A tensor that was never used is used where it ends; buffers still idle are there to the end."""
        for address in [*self._lent]:
            self._give_back(address)
        for number, life in self.lives.items():
            life.first_use = min(life.first_use, life.last_use)
            if number in self._idle:
                life.idle_until = len(self.base)

    def _enter(self, kind: str, number: int) -> None:
        """The loss lasts until backward asks for the first tensor that the model has saved."""
        if kind == _LOSS:
            self._phase = "loss"
        elif kind == _SAVE and self._phase == "loss":
            self._of_loss.add(number)
        elif kind == _USE and number not in self._of_loss:
            self._phase = "backward"

    def _turn(self, event: str, number: int) -> None:
        self.base.append(self.now)
        self.gradients.append(self._gradients_now)
        self.moments.append((self._phase, event, number))

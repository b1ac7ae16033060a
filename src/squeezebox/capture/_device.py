"""Where the blocks of one step go on a device, and what came of them: never waiting for it."""

from __future__ import annotations

from collections import Counter, deque

import torch

from squeezebox import codecs
from squeezebox.memory import is_capturing
from squeezebox.schema import CaptureError

_HEADROOM = 1.25  # of an arena over what any of the
_RECENT = 8  # last steps' blocks took
_SPARE = 1.6  # beyond which an arena is made smaller
_SPILL_SHARE = 0.25  # of an arena, in pinned memory: that is slow to come by, and not the host's any more
_SPILL_GROWTH = 2  # over what the last step's blocks took of that
_TENSORS = 4096  # of a step that have a size of their own


class _Now:
    """An event of a device that is never behind."""

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def query(self) -> bool:
        """Has happened."""
        return True


class _Sizes:
    """Bytes of one step's tensors, by slot: before packing, and packed into memory of their own."""

    def __init__(self) -> None:
        self.given: Counter[int] = Counter()
        self.apart: Counter[int] = Counter()
        self.expected = 0.0  # in the arena
        self.slot = -1

    def next(self, nbytes: int) -> int:
        self.slot = min(self.slot + 1, _TENSORS - 1)
        self.given[self.slot] += nbytes
        return self.slot


class DeviceBlocks:
    """One arena a step, as large as the steps before say; what does not fit goes to pinned memory.

    A step that is ``measured``, and the first one, packs every tensor into memory of its own, for which the
    host waits; then sizes are known. All later ones learn their sizes one step late, from a copy that the
    device makes when it gets there. Tensors that are larger than last time, so that there would be no room
    if they packed as well as then, go into memory of their own too. So pinned memory is for those that pack
    worse: a quarter of the arena, or twice what the last step needed, and as much as the arena before that.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.arena: codecs.Arena | None = None  # of the running step; None while it is measured
        self.use: codecs.ArenaUse | None = None  # of the last step that is known
        self._kept: codecs.Arena | None = None
        self._prepared: codecs.Arena | None = None
        self._recent: deque[int] = deque(maxlen=_RECENT)  # bytes of the last steps' blocks
        self._planned = 0
        self._sizes = _Sizes()  # of the running step
        self._sent = _Sizes()  # of the step whose counters are on their way
        self._rates: dict[int, float] = {}  # packed bytes over given ones, by slot, as last known
        self._counters: torch.Tensor | None = None  # on their way to the host
        self._arrived: torch.cuda.Event | _Now | None = None

    def prepare(self, nbytes: int) -> None:
        """Have an arena at hand that the next step uses, though it be measured."""
        self._prepared = self._arena(nbytes)

    def start_step(self, planned: int = 0, *, measured: bool, in_use: bool) -> None:
        """Before a step's first tensor; ``in_use``: another step's blocks are still to be unpacked.

        ``planned`` are the arena's bytes, if they are known beforehand.

        Raises:
            CaptureError: an earlier step's blocks found no room anywhere.
        """
        self._read(wait=False)
        self._sizes = _Sizes()
        if planned != self._planned:  # other tensors than before
            self._planned, self._kept = planned, None
            self._rates.clear()
        self.arena, self._prepared = self._prepared, None
        least = planned or max(self._recent, default=0)
        if self.arena is not None or measured or not least:
            self._kept = None
            return
        if self._kept is None or in_use or not self._serves(self._kept, least):
            self._kept = None  # before the next one is made
            self._kept = self._arena(planned or int(_HEADROOM * least))
        else:
            self._kept.reset()
        self.arena = self._kept

    def place(self, nbytes: int) -> codecs.Arena | None:
        """The arena for blocks of a tensor of ``nbytes``; None: they need memory of their own."""
        slot = self._sizes.next(nbytes)
        if self.arena is None:
            return None
        expected = self._sizes.expected + nbytes * self._rates.get(slot, 0.0 if self._planned else 1.0)
        if expected > self.arena.nbytes + self.arena.spill.nbytes / 2:
            self.arena.next_slot()  # stays empty
            return None
        self._sizes.expected = expected
        return self.arena

    def note(self, nbytes: int) -> None:
        """The last tensor was packed into memory of its own."""
        self._sizes.apart[self._sizes.slot] += nbytes

    def end_step(self) -> None:
        """After a step's backward."""
        if self.arena is None:
            if self._sizes.apart:
                self._recent.clear()
                self._learn(self._sizes, None)
            return
        self._read(wait=True)  # of the step before: the host is no more than a step ahead
        if is_capturing(self.device):  # an event of a graph tells nobody anything
            return
        if self._counters is None:
            pinned = self.device.type == "cuda"
            self._counters = torch.empty_like(self.arena.counters, device="cpu", pin_memory=pinned)
        self._sent = self._sizes
        self._counters.copy_(self.arena.counters, non_blocking=True)
        if self.device.type == "cuda":
            self._arrived = torch.cuda.Event()
            self._arrived.record(torch.cuda.current_stream(self.device))
        else:
            self._arrived = _Now()

    def settle(self) -> codecs.ArenaUse | None:
        """What the last step took, slot by slot; waits until that is known."""
        self._read(wait=True)
        return self.use

    @property
    def notes(self) -> tuple[str, ...]:
        """What a report should say of the last step that is known."""
        if self.use is None or not self.use.spilled_bytes:
            return ()
        return (
            f"{self.use.spilled_bytes} of {self.use.nbytes} bytes of blocks found no room on the device and "
            "went to pinned memory of the host, which is slower",
        )

    def _arena(self, nbytes: int) -> codecs.Arena:
        room = min(nbytes, codecs.Arena.MOST_BYTES)
        return codecs.Arena(room, self.device, spill_bytes=self._wanted_spill(room), tensors=_TENSORS)

    def _wanted_spill(self, room: int) -> int:
        """Bytes of pinned memory for an arena of ``room``: as much again, until a step has been seen."""
        return min(room, max(int(_SPILL_SHARE * room), self._spilled())) if self._rates else room

    def _spilled(self) -> int:
        """Bytes of pinned memory that the last step asks for."""
        return _SPILL_GROWTH * self.use.spilled_bytes if self.use is not None else 0

    def _serves(self, arena: codecs.Arena, least: int) -> bool:
        """Whether the arena is neither too small nor far too large."""
        fits = min(least, codecs.Arena.MOST_BYTES) <= arena.nbytes <= _SPARE * least
        spill = arena.spill.nbytes
        spare = self._rates and spill > max(0.5 * arena.nbytes, self._spilled())
        return fits and not spare and spill >= min(self._spilled(), arena.nbytes)

    def _learn(self, sizes: _Sizes, use: codecs.ArenaUse | None) -> None:
        """Note how a step's tensors packed: those in the arena that was used so, and all others."""
        for slot, given in sizes.given.items():
            packed = sizes.apart[slot] + (use.tensors[slot] if use is not None else 0)
            self._rates[slot] = packed / max(given, 1)
        self._recent.append(max(sizes.apart.total() + (use.nbytes if use is not None else 0), 1))

    def _read(self, *, wait: bool) -> None:
        if self._arrived is None or self._counters is None or is_capturing(self.device):
            return
        if wait:
            self._arrived.synchronize()
        if not self._arrived.query():
            return
        self._arrived = None
        self.use = codecs.ArenaUse.of(self._counters)
        self._learn(self._sent, self.use)
        if self.use.lost:
            raise CaptureError(
                f"{self.use.lost} blocks of saved tensors found no room: the step needed {self.use.nbytes} "
                "bytes, far more than the one before it. Its gradients hold NaN. Load your last checkpoint."
            )


def table_bytes(packed: codecs.Packed) -> int:
    """Bytes of a packed tensor that are neither an arena's words nor their overflow."""
    return sum(part.nbytes for part in packed.payload[2:])

"""Where the blocks of one step go on a device, and what came of them: never waiting for it."""

from __future__ import annotations

import torch

from squeezebox import codecs
from squeezebox.schema import CaptureError

_HEADROOM = 1.25  # of an arena over what the last step's blocks took
_SPARE = 1.6  # beyond which an arena is made smaller
_TENSORS = 4096  # of a step that have a size of their own in the report


class _Now:
    """An event of a device that is never behind."""

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def query(self) -> bool:
        """Has happened."""
        return True


class DeviceBlocks:
    """One arena a step, as large as the step before says; what does not fit goes to pinned memory.

    A step that is ``measured``, and the first one, packs every tensor into memory of its own, for which the
    host waits; then sizes are known. All later ones learn their sizes one step late, from a copy that the
    device makes when it gets there.
    """

    def __init__(self, device: torch.device) -> None:
        self.arena: codecs.Arena | None = None  # of the running step; None while it is measured
        self.use: codecs.ArenaUse | None = None  # of the last step that is known
        self._device = device
        self._kept: codecs.Arena | None = None
        self._needed = 0
        self._measured = 0
        self._counters: torch.Tensor | None = None  # on their way to the host
        self._arrived: torch.cuda.Event | _Now | None = None

    def start_step(self, planned: int = 0, *, measured: bool, in_use: bool) -> None:
        """Before a step's first tensor; ``in_use``: another step's blocks are still to be unpacked.

        ``planned`` are the arena's bytes, if they are known beforehand.

        Raises:
            CaptureError: an earlier step's blocks found no room anywhere.
        """
        self._read(wait=False)
        self.arena = None
        least = planned or self._needed
        if measured or not least:
            self._kept = None
            return
        if self._kept is None or in_use or not least <= self._kept.nbytes <= _SPARE * least:
            self._kept = None  # before the next one is made
            room = planned or int(_HEADROOM * least)
            self._kept = codecs.Arena(room, self._device, spill_bytes=room, tensors=_TENSORS)
        else:
            self._kept.reset()
        self.arena = self._kept

    def note(self, nbytes: int) -> None:
        """A tensor was packed into memory of its own."""
        self._measured += nbytes

    def end_step(self) -> None:
        """After a step's backward."""
        if self.arena is None:
            self._needed, self._measured = self._measured or self._needed, 0
            return
        self._read(wait=True)  # of the step before: the host is no more than a step ahead
        if self._counters is None:
            pinned = self._device.type == "cuda"
            self._counters = torch.empty_like(self.arena.counters, device="cpu", pin_memory=pinned)
        self._counters.copy_(self.arena.counters, non_blocking=True)
        if self._device.type == "cuda":
            self._arrived = torch.cuda.Event()
            self._arrived.record(torch.cuda.current_stream(self._device))
        else:
            self._arrived = _Now()

    def settle(self) -> codecs.ArenaUse | None:
        """What the last step took, slot by slot; waits until that is known."""
        self._read(wait=True)
        return self.use

    def _read(self, *, wait: bool) -> None:
        if self._arrived is None or self._counters is None or _is_capturing(self._device):
            return
        if wait:
            self._arrived.synchronize()
        if not self._arrived.query():
            return
        self._arrived = None
        self.use = codecs.ArenaUse.of(self._counters)
        self._needed = max(self.use.nbytes, 1)
        if self.use.lost:
            raise CaptureError(
                f"{self.use.lost} blocks of saved tensors found no room: the step needed {self.use.nbytes} "
                "bytes, far more than the one before it. Its gradients hold NaN. Load your last checkpoint."
            )


def _is_capturing(device: torch.device) -> bool:
    """Whether a graph is recorded, during which nothing may be asked or waited for."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()

"""The most memory that this process comes to hold, as Linux counts it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from squeezebox.memory._room import live_bytes, return_all

_CLEAR, _STATUS = Path("/proc/self/clear_refs"), Path("/proc/self/status")
_FORGET_HIGHEST = "5"  # of proc(5)
_AMID_BYTES = 4 << 20  # above a ceiling are let pass amid work, whose pages would be wanted again soon


class ProcessMeter:
    """What the process holds at its highest beyond what it held at :meth:`start`, freed memory left out.

    That is more than its tensors: the C library keeps freed blocks, and operators have memory of their own.
    ``jump_bytes`` are the most that it grew by from one :meth:`mark` to a moment before the next.
    It sets back what the system shows as the process's highest (VmHWM).
    """

    def __init__(self) -> None:
        self._is_shown = False
        self._before = self._held = self._highest = self.jump_bytes = 0

    def start(self) -> None:
        """Begin: freed memory is returned first."""
        return_all()
        self._is_shown = _highest() > 0
        self._hold()
        self._before = self._highest = self._held

    def mark(self) -> None:
        """Between two pieces of work."""
        highest = _highest()
        self._highest = max(self._highest, highest)
        self.jump_bytes = max(self.jump_bytes, highest - self._held)
        self._hold()

    def stop(self) -> int | None:
        """Bytes; None where the system does not say."""
        return max(_highest(), self._highest) - self._before if self._is_shown else None

    def _hold(self) -> None:
        """What is held now; the highest counts from here on, where the system lets it."""
        self._held = live_bytes(torch.device("cpu")) or 0
        try:
            _CLEAR.write_text(_FORGET_HIGHEST)
        except OSError:
            self._is_shown = False


def _highest() -> int:
    """The process's highest, by the system; 0 where it does not say."""
    try:
        lines = _STATUS.read_text().splitlines()
    except OSError:
        return 0
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM:")), 0)


class Ceiling:
    """Has freed memory returned to the system where the process would else grow by more than ``nbytes``.

    Returning all of it before every piece of work would take page faults that most pieces need not have.
    """

    def __init__(self, nbytes: int) -> None:
        return_all()
        self._most = (live_bytes(torch.device("cpu")) or 0) + nbytes
        self._before: tuple[object, Sequence[int]] = None, ()

    def make_room(self, nbytes: int, kind: object = None, sizes: Sequence[int] = ()) -> None:
        """Before work that takes this many bytes, or what the work before has freed, if the two are alike.

        They are if they are of one kind, not None, and their sizes differ by two rows at most.
        """
        held = live_bytes(torch.device("cpu"))
        before, self._before = self._before, (kind, sizes)
        is_alike = kind is not None and kind == before[0] and len(sizes) == len(before[1])
        is_alike = is_alike and all(abs(a - b) <= 2 for a, b in zip(sizes, before[1], strict=True))
        if held is not None and held + (0 if is_alike else nbytes) > self._most:
            return_all()

    def keep(self) -> bool:
        """Amid work, which may leave gaps where work before it did not. False if it holds too much itself."""
        if self._is_kept():
            return True
        return_all()
        return self._is_kept()

    def _is_kept(self) -> bool:
        held = live_bytes(torch.device("cpu"))
        return held is None or held <= self._most + _AMID_BYTES

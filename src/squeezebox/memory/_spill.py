"""Tensors in a temporary file that has no name, so that nothing is left of it however the process ends."""

from __future__ import annotations

import os
import shutil
import tempfile
import weakref
from collections.abc import Callable
from typing import IO

import torch

from squeezebox.schema import CaptureError


class Slot:
    """A place in the file; it is free again when the slot is gone."""

    __slots__ = ("__weakref__", "before", "nbytes", "offset")

    def __init__(self, offset: int, nbytes: int, before: Callable[[], Slot | None]) -> None:
        self.offset = offset
        self.nbytes = nbytes
        self.before = before  # the slot written before this one, while it lives


class Spill:
    """Writes flat CPU tensors to a file in the folder for temporary ones (TMPDIR) and reads them back."""

    def __init__(self) -> None:
        self._file: IO[bytes] | None = None
        self._end = 0
        self._living = 0
        self._last: Callable[[], Slot | None] = lambda: None
        self._free: dict[int, list[int]] = {}  # size -> offsets of that size that nobody uses

    def write(self, flat: torch.Tensor) -> Slot:
        """Store a flat tensor.

        Raises:
            CaptureError: the file cannot be made, or the disk is full; says how much is missing where.
                Everything written before can be read all the same.
        """
        nbytes = flat.nbytes
        offsets = self._free.get(nbytes)
        offset = offsets.pop() if offsets else self._end
        try:
            if self._file is None:
                self._file = tempfile.TemporaryFile(buffering=0)
                weakref.finalize(self, self._file.close)
            _write(self._file.fileno(), flat, offset)
        except OSError as error:
            if offsets is not None and offset < self._end:
                offsets.append(offset)
            raise CaptureError(_full(nbytes, self._end, error)) from error
        self._end = max(self._end, offset + nbytes)
        self._living += 1
        slot = Slot(offset, nbytes, self._last)
        self._last = weakref.ref(slot)
        weakref.finalize(slot, self._release, offset, nbytes).atexit = False
        return slot

    def read(self, slot: Slot, out: torch.Tensor) -> None:
        """Fill ``out``, a flat tensor of as many bytes.

        Raises:
            CaptureError: the file cannot be read.
        """
        view, done = out.view(torch.uint8).numpy().data, 0
        while self._file is not None and done < slot.nbytes:
            count = os.preadv(self._file.fileno(), [view[done:]], slot.offset + done)
            if count <= 0:
                raise CaptureError(
                    f"the offload file ends {slot.nbytes - done} bytes early; it was truncated."
                )
            done += count
        self._advise(slot.before())

    def _advise(self, following: Slot | None) -> None:
        """Have the system fetch what was written before: backward asks in reverse. Takes no memory here."""
        if following is not None and self._file is not None and hasattr(os, "posix_fadvise"):
            place = (following.offset, following.nbytes)
            os.posix_fadvise(self._file.fileno(), *place, os.POSIX_FADV_WILLNEED)

    def _release(self, offset: int, nbytes: int) -> None:
        self._living -= 1
        self._free.setdefault(nbytes, []).append(offset)
        if self._living == 0:
            self._end = 0
            self._free.clear()


def _full(nbytes: int, there: int, error: OSError) -> str:
    """What was wanted, what is left and what helps."""
    try:
        folder = tempfile.gettempdir()
        free = f"has {shutil.disk_usage(folder).free} bytes free"
    except OSError:
        folder, free = "the folder for temporary files", "cannot be looked at"
    return (
        f"{nbytes} bytes could not be offloaded to {folder}, which {free}; {there} bytes are there already: "
        f"{error}. Free space there, set TMPDIR to another folder before the program starts, or make a plan "
        "with a larger budget, which offloads less or nothing."
    )


def _write(descriptor: int, flat: torch.Tensor, offset: int) -> None:
    view, done = flat.view(torch.uint8).numpy().data, 0
    while done < len(view):
        done += os.pwrite(descriptor, view[done:], offset + done)

"""Tensors in a temporary file that has no name, so that nothing is left of it however the process ends."""

from __future__ import annotations

import os
import tempfile
import weakref
from typing import IO

import torch

from squeezebox.schema import CaptureError


class Slot:
    """A place in the file; it is free again when the slot is gone."""

    __slots__ = ("__weakref__", "nbytes", "offset")

    def __init__(self, offset: int, nbytes: int) -> None:
        self.offset = offset
        self.nbytes = nbytes


class Spill:
    """Writes flat CPU tensors to a temporary file and reads them back."""

    def __init__(self, folder: str | os.PathLike[str] | None = None) -> None:
        """Use ``folder``, or the system's own for temporary files."""
        self._folder = folder
        self._file: IO[bytes] | None = None
        self._end = 0
        self._living = 0

    def write(self, flat: torch.Tensor) -> Slot:
        """Store a flat tensor.

        Raises:
            CaptureError: the file cannot be made, or the disk is full.
        """
        try:
            if self._file is None:
                self._file = tempfile.TemporaryFile(dir=self._folder, buffering=0)
                weakref.finalize(self, self._file.close)
            slot = Slot(self._end, flat.nbytes)
            _write(self._file.fileno(), flat, slot.offset)
        except OSError as error:
            raise CaptureError(
                f"{flat.nbytes} bytes could not be offloaded to {self._folder or tempfile.gettempdir()}, "
                f"which holds {self._end} already: {error}. Free space there, or name another "
                "folder."
            ) from error
        self._end += slot.nbytes
        self._living += 1
        weakref.finalize(slot, self._free).atexit = False
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

    def _free(self) -> None:
        self._living -= 1
        if self._living == 0:
            self._end = 0


def _write(descriptor: int, flat: torch.Tensor, offset: int) -> None:
    view, done = flat.view(torch.uint8).numpy().data, 0
    while done < len(view):
        done += os.pwrite(descriptor, view[done:], offset + done)

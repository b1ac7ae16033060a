"""A temporary file without a name, wholly reserved, and the same mapped."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from typing import IO, Any

import numpy as np

from squeezebox.schema import OutputError


def nameless_file(
    folder: Path, nbytes: int, what: str, option: str = "folder=", *, name: str | None = None
) -> IO[bytes]:
    """A new file of zeros, open to read and write; it goes when it is closed, or with the process.

    The disk's bytes are reserved, so that a full disk is an error now and not in the middle of a step.

    Args:
        folder: where the file is.
        nbytes: how long it is.
        what: what it is for, for messages: "layers' outputs".
        option: what names the folder, for messages.
        name: of a file that stays, in place of one of this name.

    Raises:
        OutputError: the folder is missing or not writable, or the disk has not enough room.
    """
    try:
        free = shutil.disk_usage(folder).free
        if free < nbytes:
            raise OutputError(
                f"{what} take {nbytes:,} bytes of disk; {folder} has {free:,} free. Make room, or give "
                f"{option} a folder on another disk."
            )
        file: IO[bytes] = (
            tempfile.TemporaryFile(dir=folder, buffering=0)
            if name is None
            else (folder / name).open("w+b", buffering=0)
        )
        try:
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(file.fileno(), 0, nbytes)
            else:
                file.truncate(nbytes)
        except OSError:
            file.close()
            if name is not None:
                (folder / name).unlink()
            raise
    except OSError as error:
        if isinstance(error, OutputError):
            raise
        raise OutputError(
            f"no temporary file of {nbytes:,} bytes could be made in {folder}: {error}. Give {option} a "
            "folder that can be written to."
        ) from error
    return file


def mapped_file(folder: Path, nbytes: int, what: str) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """The bytes of a new file, all zero; it goes with the last array that views it.

    Args:
        folder: where the file is.
        nbytes: how long it is.
        what: what it is for, for messages: "layers' outputs".

    Raises:
        OutputError: the folder is missing or not writable, or the disk has not enough room.
    """
    if not nbytes:
        return np.zeros(0, np.uint8)
    with nameless_file(folder, nbytes, what) as file:
        return np.memmap(file, np.uint8, "r+", shape=(nbytes,))

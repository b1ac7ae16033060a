"""A temporary file without a name, mapped and wholly reserved."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from squeezebox.schema import OutputError


def mapped_file(folder: Path, nbytes: int, what: str) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """The bytes of a new file, all zero; it goes with the last array that views it.

    The disk's bytes are reserved, as a full disk would kill a process that writes to a map.

    Args:
        folder: where the file is.
        nbytes: how long it is.
        what: what it is for, for messages: "layers' outputs".

    Raises:
        OutputError: the folder is missing or not writable, or the disk has not enough room.
    """
    if not nbytes:
        return np.zeros(0, np.uint8)
    try:
        free = shutil.disk_usage(folder).free
    except OSError as error:
        raise _unmade(folder, nbytes, error) from error
    if free < nbytes:
        raise OutputError(
            f"{what} take {nbytes:,} bytes of disk; {folder} has {free:,} free. Make room, or give folder= "
            "on another disk."
        )
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            os.posix_fallocate(file.fileno(), 0, nbytes)
            return np.memmap(file, np.uint8, "r+", shape=(nbytes,))
    except OSError as error:
        raise _unmade(folder, nbytes, error) from error


def _unmade(folder: Path, nbytes: int, error: OSError) -> OutputError:
    return OutputError(
        f"no temporary file of {nbytes:,} bytes could be made in {folder}: {error}. Give folder= one that "
        "can be written to."
    )

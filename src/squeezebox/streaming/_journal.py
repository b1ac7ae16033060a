"""What a file held at the last checkpoint, of all that has been overwritten since."""

from __future__ import annotations

import os
import struct
from pathlib import Path
from typing import IO, Any

from squeezebox.memory import nameless_file
from squeezebox.schema import FormatError
from squeezebox.streaming._files import read_at, write_at

_HEAD = struct.Struct("<qq")  # where, and how many bytes
_BOOT = Path("/proc/sys/kernel/random/boot_id")


def kept_file(path: Path, nbytes: int, found: dict[str, Any] | None) -> tuple[IO[bytes], Journal]:
    """A file that outlasts the process, with its journal: new, or as it was at the checkpoint ``found``.

    Raises:
        OutputError: the folder is missing or not writable, or the disk has not enough room.
        FormatError: the file or its journal is not there, or the machine was started since, which may have
            lost bytes of it.
    """
    if found is None:
        file = nameless_file(path.parent, nbytes, "what passes hand on", "spool=", name=path.name)
        return file, Journal(file, path)
    is_there = path.exists() and path.stat().st_size == nbytes and _records(path, found["number"]).exists()
    if not is_there or found["boot"] != boot():
        raise FormatError(
            f"{path.name} or its journal, which spool= keeps for the checkpoint, is not there, or "
            "the machine has started again since. Remove the checkpoint, so that the step begins at its "
            "first strip."
        )
    file = path.open("r+b", buffering=0)
    journal = Journal(file, path)
    journal.put_back(found["number"])
    return file, journal


def boot() -> str:
    """Which start of the machine this is, where the system says so."""
    return _BOOT.read_text() if _BOOT.exists() else ""


class Journal:
    """Old bytes of a file, in a second one next to it, number by number with the checkpoints.

    A record is written whole before its bytes are overwritten. So a process may end anywhere: the file is as
    at the checkpoint once the records of that checkpoint's number have been put back, the last one first.

    Args:
        file: the file.
        path: where it is.

    Attributes:
        number: of the checkpoint that what is kept belongs to, 0 before the first.
        settled: of the last checkpoint that was written, 0 if there is none.
    """

    def __init__(self, file: IO[bytes], path: Path) -> None:
        self._file, self._path = file, path
        self.number = self.settled = 0
        self._records: IO[bytes] | None = None

    def begin(self) -> None:
        """What is overwritten from now on belongs to the next number; nothing is kept before the first."""
        self.close()
        self.number += 1
        self._records = self._of(self.number).open("w+b", buffering=0)

    def settle(self) -> None:
        """The checkpoint of this number is there, so the records of the one before are of no use."""
        self.settled = self.number
        self._of(self.number - 1).unlink(missing_ok=True)

    def keep(self, offset: int, nbytes: int) -> None:
        """Keep bytes of the file that are about to be overwritten.

        Raises:
            OSError: the disk has no room for them; nothing is to be overwritten then.
        """
        if self._records is not None:
            at = os.fstat(self._records.fileno()).st_size
            write_at(self._records.fileno(), memoryview(_HEAD.pack(offset, nbytes)), at)
            write_at(self._records.fileno(), _part(self._file, offset, nbytes), at + _HEAD.size)

    def put_back(self, number: int) -> None:
        """Bring the file back to the checkpoint of this number, and go on from there."""
        self.number = self.settled = number
        self._of(number + 1).unlink(missing_ok=True)  # of a checkpoint that was not written
        with self._of(number).open("r+b", buffering=0) as records:
            places, at, end = [], 0, os.fstat(records.fileno()).st_size
            while at + _HEAD.size <= end:
                offset, nbytes = _HEAD.unpack(os.pread(records.fileno(), _HEAD.size, at))
                places.append((at + _HEAD.size, offset, nbytes))
                at += _HEAD.size + nbytes
            for place, offset, nbytes in reversed(places):
                if place + nbytes <= end:  # else its bytes have not been overwritten
                    write_at(self._file.fileno(), _part(records, place, nbytes), offset)
        self._records = self._of(number).open("w+b", buffering=0)

    def remove(self) -> None:
        """Remove both files."""
        self.close()
        for path in (self._path, self._of(self.number), self._of(self.number - 1)):
            path.unlink(missing_ok=True)

    def close(self) -> None:
        """Close the records."""
        if self._records is not None:
            self._records.close()
            self._records = None

    def _of(self, number: int) -> Path:
        return _records(self._path, number)


def _part(file: IO[bytes], offset: int, nbytes: int) -> memoryview:
    found = memoryview(bytearray(nbytes))
    read_at(file.fileno(), found, offset)
    return found


def _records(path: Path, number: int) -> Path:
    return path.with_name(f"{path.name}.{number}")

"""Tensors in a file on a disk, written as the step goes on and fetched before backward wants them."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterator
from typing import Generic, TypeVar

import torch

from squeezebox.memory._chunks import CHUNK_BYTES, CHUNKS, Bytes, Chunks, sectors
from squeezebox.memory._disk import usual_folder
from squeezebox.memory._elsewhere import Area, Elsewhere
from squeezebox.schema import CaptureError, OffloadRecord

Key = TypeVar("Key")


class Successors(Generic[Key]):
    """Says what comes next, by what came after the same two in a row the last time.

    Two tell forward from backward: a weight's neighbours come in the other order there.
    """

    def __init__(self) -> None:
        self._next: dict[tuple[Key | None, Key | None], Key] = {}
        self._last: tuple[Key | None, Key | None] = (None, None)

    def note(self, key: Key) -> None:
        """This one is asked for now."""
        self._next[self._last] = key
        self._last = (self._last[1], key)

    def following(self, most: int) -> Iterator[Key]:
        """Up to ``most`` that should come next, in order."""
        pair = self._last
        for _ in range(most):
            key = self._next.get(pair)
            if key is None:
                return
            yield key
            pair = (pair[1], key)


class Slot:
    """A place in the file; it is free again when the slot is gone."""

    __slots__ = ("__weakref__", "nbytes", "number", "offset", "was_read")

    def __init__(self, offset: int, nbytes: int, number: int) -> None:
        self.offset = offset
        self.nbytes = nbytes
        self.number = number  # of slots before it
        self.was_read = False

    def parts(self) -> Iterator[tuple[int, int]]:
        """Begin and end of its chunks, the last first: those are in memory the longest."""
        starts = range(0, self.nbytes, CHUNK_BYTES)
        return ((start, min(start + CHUNK_BYTES, self.nbytes)) for start in reversed(starts))


class Spill:
    """Writes flat CPU tensors to a file without a name, and reads them back.

    It goes past the system's cache, through at most 16 MiB of buffers. Writing waits for a buffer and not for
    the disk. While tensors are read, those written before them are fetched: backward asks in reverse.

    Args:
        folder: where the file is made when the first tensor comes; see :func:`usual_folder`.
    """

    def __init__(self, folder: Elsewhere | None = None) -> None:
        self.folder = folder  # of the next file
        self._file: Area | None = None
        self._chunks: Chunks | None = None
        self._end = 0
        self._living = 0
        self._is_ending = False
        self._past: OffloadRecord | None = None  # of the file that is closed
        self._most_bytes = 0
        self._slots: list[weakref.ref[Slot]] = []  # in the order in which they were written
        self._free: dict[int, list[int]] = {}  # size -> offsets of that size that nobody uses

    @property
    def record(self) -> OffloadRecord | None:
        """Where tensors are, and what that takes; None as long as there was none."""
        if self.folder is None or self._file is None:
            return self._past
        return offload_record(self.folder, self._most_bytes, direct=self._file.direct)

    def write(self, flat: torch.Tensor) -> Slot:
        """Store a flat tensor.

        Raises:
            CaptureError: the file cannot be made, or the disk is full; says how much is missing where.
                Everything written before can be read all the same.
        """
        if self._living == 0:
            self._start()
        offset = self._place(flat.nbytes)
        slot = Slot(offset, flat.nbytes, len(self._slots))
        assert self._chunks is not None
        data = flat.view(torch.uint8).numpy()
        for start in range(0, flat.nbytes, CHUNK_BYTES):
            self._chunks.put(offset + start, data[start : start + CHUNK_BYTES])
        self._living += 1
        self._slots.append(weakref.ref(slot))
        weakref.finalize(slot, self._release, offset, flat.nbytes).atexit = False
        return slot

    def read(self, slot: Slot, out: torch.Tensor) -> None:
        """Fill ``out``, a flat tensor of as many bytes.

        Raises:
            CaptureError: the file cannot be read.
        """
        slot.was_read = True
        assert self._file is not None and self.folder is not None  # as long as a slot lives
        data = out.view(torch.uint8).numpy()
        try:
            (self._read_at_once if self._file.fills_anything else self._read_in_turn)(slot, data)
        except OSError as error:
            raise CaptureError(
                f"{slot.nbytes} bytes offloaded to {self.folder} do not come back: {error}. "
                f"{self.folder.advice[1]}"
            ) from error

    def _read_in_turn(self, slot: Slot, data: Bytes) -> None:
        assert self._chunks is not None
        for start, stop in slot.parts():
            self._chunks.get(slot.offset + start, data[start:stop])
            self._fetch_ahead(slot, start)

    def _read_at_once(self, slot: Slot, data: Bytes) -> None:
        assert self._chunks is not None
        parts: list[tuple[int, int]] = []  # chunks in buffers, and what lies between them
        for start, stop in slot.parts():
            is_held = self._chunks.holds(slot.offset + start)
            if not is_held and parts and parts[-1][0] == stop and not self._chunks.holds(slot.offset + stop):
                stop = parts.pop()[1]
            parts.append((start, stop))
        arriving = [self._chunks.begin_get(slot.offset + start, data[start:stop]) for start, stop in parts]
        self._fetch_ahead(slot, 0)
        for each in reversed(arriving):  # they come in order, so that one wait is enough
            each.result()

    def settle(self) -> None:
        """Wait until everything is on the disk, from where it is read from now on."""
        if self._chunks is not None:
            self._chunks.settle()

    def rest(self) -> None:
        """Give them back for now, if nobody needs a tensor that is there: the next one finds a new file."""
        if self._living == 0:
            self._end_all(wait=False)

    def close(self) -> None:
        """Give the disk's bytes, threads and buffers back, once nobody needs a tensor that is there."""
        self._is_ending = True
        if self._living == 0:
            self._end_all(wait=True)

    def _end_all(self, *, wait: bool) -> None:
        """The file is closed when the last thread is done with it."""
        self._past = self.record
        if self._chunks is not None:
            self._chunks.close(wait=wait)
        self._chunks = self._file = None

    def _start(self) -> None:
        """Nothing is in the file: begin at its start."""
        if self._chunks is not None:
            self._chunks.settle()
        self._end = 0
        self._free.clear()
        self._slots.clear()

    def _place(self, nbytes: int) -> int:
        """The offset of ``nbytes`` bytes that it reserves."""
        offsets = self._free.get(nbytes)
        if offsets:
            return offsets.pop()
        try:
            file = self._opened()
            if self._end + sectors(nbytes) > self._most_bytes:
                file.reserve(self._end, sectors(nbytes))
        except OSError as error:
            raise CaptureError(full(nbytes, self._end, self.folder or usual_folder(), error)) from error
        offset, self._end = self._end, self._end + sectors(nbytes)
        self._most_bytes = max(self._most_bytes, self._end)
        return offset

    def _opened(self) -> Area:
        if self._file is None:
            self.folder = self.folder or usual_folder()
            self._file, self._most_bytes = self.folder.open(), 0
            self._chunks = Chunks(self._file)
        return self._file

    def _fetch_ahead(self, slot: Slot, start: int) -> None:
        """Fetch what is read next, as far as there are buffers."""
        assert self._chunks is not None
        rest = ((slot, part) for part in slot.parts() if part[0] < start)
        for each, (begin, end) in itertools.chain(rest, self._before(slot)):
            if not self._chunks.fetch(each.offset + begin, end - begin):
                return

    def _before(self, slot: Slot) -> Iterator[tuple[Slot, tuple[int, int]]]:
        """Parts of the slots written before this one that nobody has read."""
        for number in range(slot.number - 1, -1, -1):
            earlier = self._slots[number]() if number < len(self._slots) else None
            if earlier is not None and not earlier.was_read:
                yield from ((earlier, part) for part in earlier.parts())

    def _release(self, offset: int, nbytes: int) -> None:
        self._living -= 1
        self._free.setdefault(nbytes, []).append(offset)
        if self._is_ending and self._living == 0:
            self._end_all(wait=False)  # this may be one of those threads
        if self._chunks is not None:
            for start in range(0, nbytes, CHUNK_BYTES):
                self._chunks.drop(offset + start)


BUFFER_BYTES = CHUNKS * CHUNK_BYTES


def offload_record(folder: Elsewhere, file_bytes: int, *, direct: bool) -> OffloadRecord:
    """What ``file_bytes`` in that folder take; ``direct`` writes past the system's cache."""
    return OffloadRecord(
        folder=folder.path,
        filesystem=folder.filesystem,
        file_bytes=file_bytes,
        buffer_bytes=BUFFER_BYTES,
        cache_bytes=0 if direct else BUFFER_BYTES,
    )


def full(nbytes: int, there: int, folder: Elsewhere, error: OSError) -> str:
    """What was wanted, what is left and what helps."""
    try:
        free = f"has {folder.free_bytes()} bytes free"
    except OSError:
        free = "cannot be looked at"
    return (
        f"{nbytes} bytes could not be offloaded to {folder}, which {free}; {there} bytes are there already: "
        f"{error}. {folder.advice[0]}"
    )

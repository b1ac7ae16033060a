"""Buffers between tensors and what is elsewhere, written and filled while the step goes on."""

from __future__ import annotations

import mmap
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from squeezebox.memory._disk import SECTOR
from squeezebox.memory._elsewhere import Area

Bytes = NDArray[np.uint8]
CHUNK_BYTES = 1 << 21
CHUNKS = 8


@dataclass(slots=True, eq=False)
class _Chunk:
    """One buffer: what is at ``offset`` of the file, or on its way there or from there."""

    # torch's fused SGD reads past the end of bfloat16: a page more is there to be read
    memory: mmap.mmap = field(default_factory=lambda: _pages(CHUNK_BYTES + SECTOR))
    offset: int = -1
    written: bool = False  # into the file, rather than filled from it
    wanted: bool = False  # by somebody who may still ask for what is in it
    lent: bool = False  # to somebody who works in it
    done: Future[None] | None = None

    @property
    def is_pending(self) -> bool:
        """Whether it is still on its way."""
        return self.done is not None and not self.done.done()

    def data(self, nbytes: int) -> Bytes:
        return np.frombuffer(self.memory, np.uint8, nbytes)


class Chunks:
    """Moves up to :data:`CHUNK_BYTES` at a time, through at most :data:`CHUNKS` buffers.

    What was put is served from its buffer while that has no other use. What was got is not held any longer.
    """

    def __init__(self, file: Area) -> None:
        self._file = file
        self._used: dict[int, _Chunk] = {}  # offset -> chunk, the oldest first
        self._free: list[_Chunk] = []  # which may still be being filled
        self._lost: dict[int, OSError] = {}  # offsets that could not be written

    def put(self, offset: int, data: Bytes) -> None:
        """Have bytes written; waits for a buffer only."""
        chunk = self._take(offset)
        np.copyto(chunk.data(len(data)), data)  # by this thread alone: torch's would wait for all others
        self._start(chunk, len(data), written=True)

    def fetch(self, offset: int, nbytes: int) -> bool:
        """Have bytes read, if there is a buffer for them; whether there is."""
        if offset not in self._used:
            self._reclaim()
            if not self._free and len(self._used) >= CHUNKS:
                return False
            self._start(self._take(offset), nbytes, written=False)
        return True

    def holds(self, offset: int) -> bool:
        """Whether bytes are in a buffer, or were lost with one."""
        return offset in self._used or offset in self._lost

    def begin_get(self, offset: int, out: Bytes) -> Future[None]:
        """As :meth:`get`, of an area that fills anything: what is in no buffer needs none."""
        if not self.holds(offset):
            return self._file.begin_read(out.data, offset)
        self.get(offset, out)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def get(self, offset: int, out: Bytes) -> None:
        """Fill ``out``; raises OSError if the bytes could not be written or cannot be read."""
        if offset in self._lost:
            raise self._lost[offset]
        chunk = self._used.get(offset)
        if chunk is None:
            chunk = self._take(offset)
            self._start(chunk, len(out), written=False)
        chunk.wanted = False
        if not chunk.written:
            assert chunk.done is not None
            chunk.done.result()
        np.copyto(out, chunk.data(len(out)))

    def lend(self, offset: int, nbytes: int, *, filled: bool) -> Bytes:
        """The buffer of these bytes itself, ``filled`` from the file or to be filled, until it is given back.

        Raises OSError as :meth:`get`.
        """
        if filled and offset in self._lost:
            raise self._lost[offset]
        chunk = self._used.get(offset)
        if chunk is None or not filled:
            chunk = self._take(offset)
            if filled:
                self._start(chunk, nbytes, written=False)
        if chunk.done is not None and (chunk.written or filled):
            chunk.done.result()
        chunk.wanted = chunk.lent = True
        return chunk.data(nbytes)

    def give_back(self, offset: int, nbytes: int, *, changed: bool) -> None:
        """End of :meth:`lend`: have the bytes written if they are to stay as they are now, or forget them."""
        chunk = self._used[offset]
        chunk.wanted = chunk.lent = False
        if changed:
            self._start(chunk, nbytes, written=True)
        else:
            self._free.append(self._used.pop(offset))

    def drop(self, offset: int) -> None:
        """Nobody wants these bytes from their buffer."""
        chunk = self._used.get(offset)
        if chunk is not None:
            chunk.wanted = False

    def settle(self) -> None:
        """Wait until everything put is on the disk, and forget what is in the buffers."""
        for chunk in [*self._used.values()]:
            self._wait(chunk)
            chunk.wanted = False
        self._reclaim()

    def close(self, *, wait: bool) -> None:
        """Begin nothing more; ``wait`` for what was begun, and give the buffers up."""
        self._file.finish(wait=wait)
        if wait:
            self._used.clear()
            self._free.clear()

    def _reclaim(self) -> None:
        """Free the buffers that nobody wants; one that is being written stays, and its place with it."""
        for offset, chunk in [*self._used.items()]:
            if not chunk.wanted and not (chunk.written and chunk.is_pending):
                if chunk.written:
                    self._wait(chunk)  # it is done: note whether the bytes are lost
                self._free.append(self._used.pop(offset))

    def _take(self, offset: int) -> _Chunk:
        """A buffer for these bytes: the one they are in, a free one, a new one, or the oldest."""
        chunk = self._used.pop(offset, None)
        if chunk is None:
            self._reclaim()
        if chunk is None and self._free:
            chunk = self._free.pop()
        if chunk is None and len(self._used) < CHUNKS:
            chunk = _Chunk()
        if chunk is None:
            chunk = self._used.pop(next(key for key, each in self._used.items() if not each.lent))
        self._wait(chunk)
        chunk.offset, chunk.wanted = offset, True
        self._used[offset] = chunk
        return chunk

    def _wait(self, chunk: _Chunk) -> None:
        if chunk.done is None:
            return
        error = chunk.done.exception()
        if chunk.written and isinstance(error, OSError):
            self._lost[chunk.offset] = error

    def _start(self, chunk: _Chunk, nbytes: int, *, written: bool) -> None:
        view = memoryview(chunk.memory)[: sectors(nbytes)]
        chunk.written = written
        if written:
            self._lost.pop(chunk.offset, None)
        begin = self._file.begin_write if written else self._file.begin_read
        chunk.done = begin(view, chunk.offset)


def sectors(nbytes: int) -> int:
    """The bytes that a place of ``nbytes`` takes in the file."""
    return -(-nbytes // SECTOR) * SECTOR


def _pages(nbytes: int) -> mmap.mmap:
    """Memory at a page's start, which costs nothing before it is written."""
    return mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)

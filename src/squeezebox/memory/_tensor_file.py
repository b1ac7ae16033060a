"""Tensors that live in a file and are read whenever torch computes with them."""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from squeezebox.memory._chunks import CHUNK_BYTES, CHUNKS, Chunks, sectors
from squeezebox.memory._disk import DiskFolder
from squeezebox.memory._spill import Successors, full
from squeezebox.memory._stored import Absent, MovedWeight, StoredTensor, flat_in_memory
from squeezebox.schema import CaptureError

_BY_ROWS, _BY_COLUMNS = (torch.sparse_csr, torch.sparse_bsr), (torch.sparse_csc, torch.sparse_bsc)


def parts_of(tensor: Tensor) -> Iterator[Tensor]:
    """The tensor itself; of a sparse one its indices and values; of one held otherwise what is in memory."""
    if isinstance(tensor, MovedWeight):
        yield from parts_of(tensor.lender.stand_in)
    elif isinstance(tensor, Absent):
        yield from tensor.parts()
    elif tensor.layout == torch.sparse_coo:
        yield tensor._indices()
        yield tensor._values()
    elif tensor.layout in _BY_ROWS:
        yield from (tensor.crow_indices(), tensor.col_indices(), tensor.values())
    elif tensor.layout in _BY_COLUMNS:
        yield from (tensor.ccol_indices(), tensor.row_indices(), tensor.values())
    else:
        yield tensor


@dataclass(frozen=True, slots=True)
class Place:
    """Bytes of a file that belong to one tensor."""

    offset: int
    nbytes: int

    def parts(self) -> Iterable[tuple[int, int]]:
        """Begin and end of its chunks."""
        starts = range(0, self.nbytes, CHUNK_BYTES)
        return ((start, min(start + CHUNK_BYTES, self.nbytes)) for start in starts)


class TensorFile:
    """A file of flat CPU tensors, each at a place of its own.

    It goes past the system's cache, as :class:`Spill` does, through as many buffers.

    Args:
        folder: where it is made.
        reads_on: after :meth:`read`, fetch what was read next the last time.
    """

    def __init__(self, folder: DiskFolder, *, reads_on: bool = False) -> None:
        self.folder = folder
        self._order: Successors[Place] | None = Successors() if reads_on else None
        self._file = folder.open()
        self._chunks = Chunks(self._file)
        self._end = 0
        self._is_closed = False
        self._free: dict[int, list[int]] = {}  # bytes -> offsets of such places
        self._round: dict[int, int] = {}  # offset -> bytes of what was lent, in that order, in this round;
        self._past: list[tuple[int, int]] = []  # and in the last one,
        self._numbers: dict[int, int] = {}  # of which these are the numbers
        self._after = -1  # the number of what was lent last

    def place(self, nbytes: int) -> Place:
        """Reserve ``nbytes`` in the file, until :meth:`free`; CaptureError if the disk is full."""
        freed = self._free.get(nbytes)
        if freed:
            return Place(freed.pop(), nbytes)
        room = sectors(max(nbytes, 1))
        try:
            self._file.reserve(self._end, room)
        except OSError as error:
            raise CaptureError(full(nbytes, self._end, self.folder, error)) from error
        found = Place(self._end, nbytes)
        self._end += room
        return found

    def free(self, place: Place) -> None:
        """Nobody needs these bytes any more."""
        self._free.setdefault(place.nbytes, []).append(place.offset)

    def write(self, place: Place, tensor: torch.Tensor) -> None:
        """Store a dense tensor; waits for buffers, not for the disk."""
        data = tensor.reshape(-1).view(torch.uint8).numpy()
        for start, stop in place.parts():
            self._chunks.put(place.offset + start, data[start:stop])
            self._chunks.drop(place.offset + start)

    def read(self, place: Place, out: torch.Tensor) -> None:
        """Fill a contiguous tensor; CaptureError if the disk does not give the bytes."""
        data = out.view(-1).view(torch.uint8).numpy()
        if self._order is not None:
            self._order.note(place)
        with self._explained(place):
            for start, stop in place.parts():
                self._chunks.get(place.offset + start, data[start:stop])
                self._fetch_following(place, stop)

    def lend(self, place: Place, start: int, stop: int, dtype: torch.dtype, *, filled: bool) -> torch.Tensor:
        """The buffer itself of one of the place's chunks, as a flat tensor, until :meth:`give_back`.

        ``filled``: with what is in the file; else it is to be filled. What was lent next in the last round is
        read ahead.
        """
        offset = place.offset + start
        with self._explained(place):
            data = self._chunks.lend(offset, stop - start, filled=filled)
        if filled:
            self._round[offset] = stop - start
        self._after = self._numbers.get(offset, self._after)
        self.fetch()
        return torch.from_numpy(data).view(dtype)

    def give_back(self, place: Place, start: int, stop: int, *, changed: bool) -> None:
        """End of :meth:`lend`; what was changed goes to the file."""
        self._chunks.give_back(place.offset + start, stop - start, changed=changed)

    def _fetch_following(self, place: Place, start: int) -> None:
        """Fetch the rest of what is read, from ``start`` on, and what is read next, as there are buffers."""
        if self._order is None:
            return
        following = itertools.chain([(place, start)], ((each, 0) for each in self._order.following(CHUNKS)))
        for each, begin in following:
            for first, stop in each.parts():
                if first >= begin and not self._chunks.fetch(each.offset + first, stop - first):
                    return

    def fetch(self) -> None:
        """Read what is lent next ahead, as far as there are buffers."""
        for offset, nbytes in self._past[self._after + 1 : self._after + 1 + CHUNKS]:
            if not self._chunks.fetch(offset, nbytes):
                return

    def end_round(self) -> None:
        """A step is over: the next one will want the same in the same order."""
        self._past, self._round = list(self._round.items()), {}
        self._numbers = {offset: number for number, (offset, _) in enumerate(self._past)}
        self._after = -1
        self.fetch()

    @contextlib.contextmanager
    def _explained(self, place: Place) -> Iterator[None]:
        if self._is_closed:
            raise CaptureError(
                f"a tensor of {place.nbytes} bytes was in the file of a session that is detached. What the "
                "optimizer and the parameters have is in memory again; read it from there."
            )
        try:
            yield
        except OSError as error:
            raise CaptureError(
                f"{place.nbytes} bytes of optimizer state, gradients or weights in {self.folder} do not come "
                f"back: {error}. Look after that disk, or make the plan with offload=False."
            ) from error

    def close(self) -> None:
        """End the threads and give the disk's bytes back; nothing can be read any more."""
        self._is_closed = True
        self._chunks.close(wait=True)
        self._file.close()


class FileTensor(StoredTensor):
    """A tensor in a :class:`TensorFile`: every operator reads it, and one that works in place writes it back.

    To multiply it in place by a number is put off to the next reading, and a norm that is known is not
    computed again. Results are those of a tensor in memory, to the bit.

    Args:
        like: dense; its shape and layout are taken. There are no elements before :meth:`store`.
        file: where they go.
    """

    def __init__(self, like: torch.Tensor, file: TensorFile) -> None:
        self.file = file
        self.place = file.place(like.numel() * like.element_size())
        weakref.finalize(self, file.free, self.place).atexit = False
        self._factors: list[Any] = []
        self.norm_known: torch.Tensor | None = None  # the Euclidean one

    def store(self, value: torch.Tensor, norm: torch.Tensor | None = None) -> None:
        """Take these elements; ``norm``: their Euclidean one, if somebody will ask for it."""
        self._factors, self.norm_known = [], norm
        self.file.write(self.place, flat_in_memory(value, self))

    def load(self) -> torch.Tensor:
        """The elements, in memory of their own."""
        flat = torch.empty(self.numel(), dtype=self.dtype, device="cpu")
        self.file.read(self.place, flat)
        return self._scaled(flat.as_strided(self.shape, self.stride()))

    def multiply_later(self, factor: Any) -> FileTensor:
        """Multiply it in place by a number, or a tensor of one, when its elements are read."""
        self._factors.append(factor.clone() if isinstance(factor, torch.Tensor) else factor)
        self.norm_known = None
        return self

    @contextlib.contextmanager
    def lent(
        self, start: int, stop: int, *, changed: bool = True, filled: bool = True
    ) -> Iterator[torch.Tensor]:
        """A chunk's elements, in the file's buffer; where one is ``changed``, all are, in order."""
        begin, end = start * self.element_size(), stop * self.element_size()
        piece = self.file.lend(self.place, begin, end, self.dtype, filled=filled)
        try:
            yield self._scaled(piece) if filled else piece
        finally:
            self.file.give_back(self.place, begin, end, changed=changed)
            if changed and stop == self.numel():
                self._factors, self.norm_known = [], None

    def _scaled(self, elements: torch.Tensor) -> torch.Tensor:
        """Multiplied in place by what was put off."""
        for factor in self._factors:
            elements.mul_(factor)
        return elements

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        first = args[0] if args else None
        if isinstance(first, FileTensor) and func in _MULTIPLY and _is_number(args[1]):
            return first.multiply_later(args[1])
        asks_norm = func is _NORM and args[1:] in ((), (2,), (2.0,)) and not kwargs
        if asks_norm and isinstance(first, FileTensor) and first.norm_known is not None:
            return first.norm_known.clone()
        return super().__torch_dispatch__(func, types, args, kwargs)


_aten = torch.ops.aten
_MULTIPLY = (_aten.mul_.Tensor, _aten.mul_.Scalar)
_NORM = _aten.linalg_vector_norm.default


def _is_number(value: object) -> bool:
    return not isinstance(value, Absent) and (not isinstance(value, torch.Tensor) or value.dim() == 0)

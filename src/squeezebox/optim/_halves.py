"""A float32 weight as the bfloat16 one that autocast reads, and the 16 bits that it leaves over."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager

import numpy as np
import torch

from squeezebox.memory import CHUNK_BYTES, FileTensor, TensorFile

_SIZE = CHUNK_BYTES // 4  # elements of a piece


class Halves:
    """Float32 elements in two tensors of 16 bits each, from which they come back to the bit.

    ``code`` is the nearest bfloat16, as a cast makes it. The rest is how far the element's bits, as a number,
    are from those of ``code``. Where that is no signed number of 16 bits (half of the ties, one in 131,072 of
    random elements, and some NaN) the element itself is kept besides.

    Args:
        like: dense; its shape and layout are taken. There are no elements before :meth:`store`.
        file: for the rest; memory without one.
    """

    def __init__(self, like: torch.Tensor, file: TensorFile | None = None) -> None:
        self.code = torch.empty_strided(like.shape, like.stride(), dtype=torch.bfloat16, device="cpu")
        rest = self.code.view(torch.int16)
        self._rest = torch.empty_like(rest) if file is None else FileTensor(rest, file)
        self._besides: dict[int, tuple[torch.Tensor | None, torch.Tensor]] = {}  # by a piece's start
        self._whole: torch.Tensor | None = None

    def parts(self) -> Iterable[torch.Tensor]:
        """What is in memory of it."""
        if self._whole is not None:
            return (self._whole,)
        rest = () if isinstance(self._rest, FileTensor) else (self._rest,)
        kept = (each for pair in self._besides.values() for each in pair if each is not None)
        return (self.code, *rest, *kept)

    @property
    def is_settled(self) -> bool:
        """Whether :meth:`settle` was called."""
        return self._whole is not None

    def cast(self) -> torch.Tensor:
        """The weight in bfloat16, in this memory: it stays as it is when the weight changes."""
        return self.code.detach() if self._whole is None else self._whole.bfloat16()

    def load(self) -> torch.Tensor:
        """The elements, in memory of their own until :meth:`settle`."""
        if self._whole is not None:
            return self._whole
        out = torch.empty_strided(self.code.shape, self.code.stride(), dtype=torch.float32, device="cpu")
        flat = _flat(out)
        for start, stop in pieces(len(flat)):
            self._restore(start, flat[start:stop])
        return out

    def store(self, value: torch.Tensor) -> None:
        """Take these elements, of the same shape and strides."""
        if self._whole is not None:
            if value is not self._whole:
                self._whole.copy_(value)
            return
        flat = _flat(value)
        with self.changing():
            for start, stop in pieces(len(flat)):
                self._split(start, flat[start:stop])

    def settle(self) -> torch.Tensor:
        """The elements are in float32 from now on, in the tensor returned."""
        self._whole = self.load()
        self.code = self._rest = self._whole.new_empty(0)
        self._besides.clear()
        return self._whole

    @contextlib.contextmanager
    def changing(self) -> Iterator[None]:
        """Around changes: a cast of before stays as it was for those that hold it, as if it were a copy."""
        if _holders(self.code) > _ALONE:
            self.code = self.code.clone()
        yield

    @contextlib.contextmanager
    def lent(self, start: int, stop: int) -> Iterator[torch.Tensor]:
        """One of the :func:`pieces` in float32, to be changed in place; within :meth:`changing`."""
        piece = torch.empty(stop - start, dtype=torch.float32, device="cpu")
        self._restore(start, piece)
        yield piece
        self._split(start, piece)

    def _restore(self, start: int, out: torch.Tensor) -> None:
        stop = start + len(out)
        out.copy_(_flat(self.code)[start:stop])
        with self._rest_lent(start, stop, changed=False) as rest:
            out.view(torch.int32).add_(rest)
        if start in self._besides:
            where, values = self._besides[start]
            if where is None:
                out.copy_(values)
            else:
                out[where] = values

    def _split(self, start: int, value: torch.Tensor) -> None:
        stop = start + len(value)
        code = _flat(self.code)[start:stop]
        beyond = code.copy_(value).float().view(torch.int32)
        torch.sub(value.view(torch.int32), beyond, out=beyond)
        with self._rest_lent(start, stop, changed=True) as rest:
            rest.copy_(beyond)
            wrong = np.flatnonzero(beyond.numpy() != rest.numpy())  # where torch is ten times as slow
        where = torch.from_numpy(wrong)
        self._besides.pop(start, None)
        if len(where) > len(value) // 8:  # an index takes twice an element
            self._besides[start] = None, value.clone()
        elif len(where):
            self._besides[start] = where, value[where]

    def _rest_lent(self, start: int, stop: int, *, changed: bool) -> AbstractContextManager[torch.Tensor]:
        if isinstance(self._rest, FileTensor):
            return self._rest.lent(start, stop, changed=changed, filled=not changed)
        return contextlib.nullcontext(_flat(self._rest)[start:stop])


def pieces(numel: int) -> Iterator[tuple[int, int]]:
    """Begin and end of the pieces that a tensor's elements are split in."""
    return ((start, min(start + _SIZE, numel)) for start in range(0, numel, _SIZE))


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.as_strided((tensor.numel(),), (1,))


def _holders(tensor: torch.Tensor) -> int:
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))


_ALONE = _holders(torch.empty(0))

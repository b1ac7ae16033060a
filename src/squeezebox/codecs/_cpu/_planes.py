"""`planes` on the CPU: jobs for compiled loops, whose threads take a piece of a tensor each time.

Only bfloat16 and float16, which torch has to convert, go through Python piece by piece.
"""

from __future__ import annotations

import ctypes
from functools import lru_cache, partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from squeezebox.codecs import _workers
from squeezebox.codecs._cpu._arrays import WIDE, fill, numbers
from squeezebox.codecs._reference import _planes

_CONVERTED = 512  # blocks that are converted at a time: they stay in the cache until they are packed
_LONG = 1 << 14  # blocks that a thread takes at most, so that little memory is enough to pack them to
_FEW = 64  # blocks: fewer are not worth a thread
_SHARES = 2  # pieces for each thread, so that one that was held up does less
_RAW = _planes.RAW
_ONE = torch.ones(1, device="cpu")
_Job = ctypes.c_int64 * 17


@lru_cache(maxsize=1024)
def _how(bound: float, keep_sign: bool, dtype: torch.dtype) -> tuple[object, int]:
    """A unit's step, the least and largest step, what codes are ahead of it; and where these are."""
    kind = ctypes.c_double if dtype == torch.float64 else ctypes.c_float
    kept = (kind * 4)(*_planes.usable_steps(bound, dtype), _planes.AHEAD if keep_sign else 0.0)
    return kept, ctypes.addressof(kept)


@lru_cache(maxsize=2)
def _tasks(double: bool) -> tuple[_workers.Native, _workers.Native]:
    """What threads run to pack, and to unpack."""
    from squeezebox.codecs._cpu import _plane_loops

    pack, unpack = (_workers.native(each) for each in _plane_loops.tasks(double))
    return pack, unpack


class _Work:
    """Jobs of one tensor: what they have in common, which lives as long as they."""

    def __init__(
        self, flat: Tensor, heads: Tensor, bound: float, sign: bool, scale: Tensor | None, inner: int
    ) -> None:
        factors = _ONE if scale is None else scale.detach().contiguous()
        self._flat, self._heads, self._factors = flat, heads, factors
        self._how = _how(bound, sign, flat.dtype)
        self._layout = factors.numel(), 1 if factors.numel() == 1 else inner
        self._most = _planes.LARGEST[flat.dtype]
        self.tasks = _tasks(flat.dtype == torch.float64)
        self.blocks = len(heads)
        self.item = flat.element_size()

    @property
    def size(self) -> int:
        """Blocks of a piece."""
        threads = torch.get_num_threads()
        pieces = _SHARES * threads if threads > 1 else 1
        return min(max(_FEW, -(-self.blocks // pieces)), _LONG)

    def piece(self, first: int, blocks: int) -> Tensor:
        """The elements of some blocks."""
        return self._flat[first * _planes.BLOCK : (first + blocks) * _planes.BLOCK]

    def job(
        self, first: int, last: int, size: int, packed: int, room: int, values: int = 0
    ) -> tuple[Any, Any]:
        """A job, and room for its results; where ``values`` are, if not in the tensor."""
        results = (ctypes.c_int64 * -(-(last - first) // size))()
        start = first * _planes.BLOCK
        address, count = self._flat.data_ptr() + start * self.item, self._flat.numel() - start
        places = (values or address, address, self._heads.data_ptr(), packed, ctypes.addressof(results))
        extent = 0, len(results), size, first, min(count, (last - first) * _planes.BLOCK), self.item
        numbers = *extent, *self._layout, self._most, room, self._how[1], self._factors.data_ptr(), *places
        return _Job(*numbers), results


def pack_planes(
    flat: Tensor, bound: float, keep_sign: bool, scale: Tensor | None, inner: int
) -> tuple[Tensor, Tensor]:
    """Heads and bytes."""
    flat = flat.detach().contiguous()
    heads = torch.empty(-(-flat.numel() // _planes.BLOCK), dtype=torch.int16, device="cpu")
    work = _Work(flat, heads, bound, keep_sign, scale, inner)
    pack, most = _packed if flat.dtype in WIDE else _converted, _LONG * torch.get_num_threads()
    parts: list[NDArray[np.uint64]] = []
    for first in range(0, work.blocks, most):
        made = pack(work, first, min(first + most, work.blocks))
        parts += made if work.blocks <= most else [part.copy() for part in made]
    packed = torch.empty(8 * sum(part.size for part in parts), dtype=torch.uint8, device="cpu")
    if parts:
        np.concatenate(parts, out=packed.numpy().view(np.uint64))
    return heads, packed


def _packed(work: _Work, first: int, last: int) -> list[NDArray[np.uint64]]:
    """Words of some blocks, piece by piece, in scratch."""
    words = _planes.BLOCK * work.item // 8
    size = min(work.size, last - first)
    room = _workers.scratch("planes", (last - first) * words, np.uint64)
    job, taken = work.job(first, last, size, _address(room), size * words)
    _workers.run_native(work.tasks[0], job, len(taken))
    return [room[size * words * piece :][:count] for piece, count in enumerate(taken)]


def _converted(work: _Work, first: int, last: int) -> list[NDArray[np.uint64]]:
    """The same of a dtype that torch converts."""
    words = _planes.BLOCK * work.item // 8
    room = _workers.scratch("planes", (last - first) * words, np.uint64)

    def one(index: int) -> NDArray[np.uint64]:
        begin = index * _CONVERTED
        blocks = min(_CONVERTED, last - first - begin)
        own = room[begin * words :][: blocks * words]
        values = _address(numbers(work.piece(first + begin, blocks)))
        job, taken = work.job(first + begin, first + begin + blocks, blocks, _address(own), own.size, values)
        _workers.run_native(work.tasks[0], job, 1)
        return own[: taken[0]]

    return _workers.run(one, -(-(last - first) // _CONVERTED))


def _address(array: NDArray[Any]) -> int:
    return int(array.__array_interface__["data"][0])


def unpack_planes(
    heads: Tensor,
    packed: Tensor,
    bound: float,
    keep_sign: bool,
    scale: Tensor | None,
    inner: int,
    out: Tensor,
) -> None:
    """Values, into ``out``."""
    work, place, words = (
        _Work(out, heads, bound, keep_sign, scale, inner),
        packed.data_ptr(),
        packed.numel() // 8,
    )
    if out.dtype in WIDE:
        job, raw = work.job(0, work.blocks, max(work.size, 1), place, words)
        _workers.run_native(work.tasks[1], job, len(raw))
    else:
        raw = _workers.run(partial(_widen, work, place, words), -(-work.blocks // _CONVERTED))
    if any(raw):
        _fill_raw(heads.numpy(), packed.numpy(), out)


def _widen(work: _Work, place: int, words: int, index: int) -> int:
    """Unpack a piece that torch then converts; how many of its blocks are raw."""
    first = index * _CONVERTED
    blocks = min(_CONVERTED, work.blocks - first)

    def make(values: NDArray[Any]) -> int:
        job, raw = work.job(first, first + blocks, blocks, place, words, _address(values))
        _workers.run_native(work.tasks[1], job, 1)
        return int(raw[0])

    return fill(work.piece(first, blocks), make)


def _fill_raw(heads: NDArray[np.int16], data: NDArray[np.uint8], out: Tensor) -> None:
    """Raw blocks as they are, NaN and all."""
    widths, size = (heads & _RAW).astype(np.int64), _planes.BLOCK * out.element_size()
    ends = np.cumsum(np.where(widths == _RAW, size, _planes.LANES * widths))
    raw = out.detach().view(torch.uint8).numpy()
    for block in np.flatnonzero(widths == _RAW):
        own = raw[block * size : (block + 1) * size]
        own[:] = data[ends[block] - size :][: own.size]

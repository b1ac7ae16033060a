"""`planes` on the CPU: pieces of a tensor over the worker threads, their bytes one after the other."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from squeezebox.codecs import _workers
from squeezebox.codecs._cpu._arrays import fill, numbers, scalar
from squeezebox.codecs._reference import _planes

_BLOCKS = 512  # of a piece: what it is converted and packed to stays in the cache
_SIZE = _BLOCKS * _planes.BLOCK
_FEW = 1024  # channels next to each other are repeated up to here, so that loops are long enough
_EVERY = 1 << 62  # neighbours of one channel, where there is one
_RAW = _planes.RAW


@lru_cache(maxsize=256)
def _one_step(bound: float, dtype: torch.dtype) -> NDArray[Any]:
    return _usable(np.ones(1, scalar(dtype)), bound, dtype)


def _usable(scale: NDArray[Any], bound: float, dtype: torch.dtype) -> NDArray[Any]:
    """Each channel's step, NaN where it is not usable."""
    unit, least, most = _planes.usable_steps(bound, dtype)
    kind = scalar(dtype)
    with np.errstate(over="ignore", invalid="ignore"):  # no such step is usable
        steps = scale * kind(unit)
    return np.where((steps >= kind(least)) & (steps <= kind(most)), steps, kind(np.nan))


def _channels(bound: float, scale: Tensor | None, inner: int, dtype: torch.dtype) -> tuple[NDArray[Any], int]:
    """Each channel's step, and how many neighbours share one."""
    if scale is None:
        return _one_step(bound, dtype), _EVERY
    steps = _usable(scale.numpy(), bound, dtype)
    if steps.size == 1:
        return steps, _EVERY
    if inner == 1 and steps.size < _FEW:
        steps = np.tile(steps, -(-_FEW // steps.size))
    return steps, inner


def _scratch(dtype: torch.dtype, count: int) -> tuple[NDArray[Any], ...]:
    """Blocks to compute with, a block's codes, and its bytes, the last also as 64-bit words."""
    blocks = tuple(np.empty(_planes.BLOCK, scalar(dtype)) for _ in range(count))
    words = np.empty(_planes.BLOCK // 8, np.uint64)
    return *blocks, np.empty(_planes.BLOCK, np.int32), words.view(np.uint8), words


def _ahead(keep_sign: bool, dtype: torch.dtype) -> Any:
    return scalar(dtype)(_planes.AHEAD if keep_sign else 0.0)


def pack_planes(
    flat: Tensor, bound: float, keep_sign: bool, scale: Tensor | None, inner: int
) -> tuple[Tensor, Tensor]:
    """Heads and bytes."""
    from squeezebox.codecs._cpu import _plane_loops

    steps, inner = _channels(bound, scale, inner, flat.dtype)
    inverses = steps.dtype.type(1) / steps
    item, ahead, most = flat.element_size(), _ahead(keep_sign, flat.dtype), _planes.LARGEST[flat.dtype]
    heads = torch.empty(-(-flat.numel() // _planes.BLOCK), dtype=torch.int16, device="cpu")
    found, raw = heads.numpy(), flat.detach().view(torch.uint8).numpy()

    def work(index: int) -> NDArray[np.uint8]:
        start, end = index * _SIZE, min((index + 1) * _SIZE, flat.numel())
        here = found[index * _BLOCKS : (index + 1) * _BLOCKS]
        room = _workers.scratch("planes", here.size * _planes.BLOCK * item, np.uint8)
        how = start, inverses, inner, ahead, most, _scratch(flat.dtype, 2)
        own = raw[start * item : end * item]
        taken = _plane_loops.pack(numbers(flat[start:end]), own, *how, here, room, room.view(np.uint64))
        return room[:taken].copy()

    parts = _workers.run(work, -(-found.size // _BLOCKS))
    if len(parts) == 1:
        return heads, torch.from_numpy(parts[0])
    packed = torch.empty(sum(part.size for part in parts), dtype=torch.uint8, device="cpu")
    if parts:
        np.concatenate(parts, out=packed.numpy())
    return heads, packed


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
    from squeezebox.codecs._cpu import _plane_loops

    steps, inner = _channels(bound, scale, inner, out.dtype)
    ahead, found, data, item = _ahead(keep_sign, out.dtype), heads.numpy(), packed.numpy(), out.element_size()
    widths = (found & _RAW).astype(np.int64)
    sizes = np.where(widths == _RAW, _planes.BLOCK * item, _planes.LANES * widths)
    ends = np.cumsum(sizes)

    def work(index: int) -> None:
        start, end = index * _SIZE, min((index + 1) * _SIZE, out.numel())
        blocks = slice(index * _BLOCKS, min((index + 1) * _BLOCKS, found.size))
        first, last = ends[blocks.start] - sizes[blocks.start], ends[blocks.stop - 1]
        words = data[first : first + (last - first) // 8 * 8].view(np.uint64)
        how = start, steps, inner, ahead, _scratch(out.dtype, 1), item
        fill(out[start:end], lambda values: _plane_loops.unpack(found[blocks], words, *how, values))

    _workers.run(work, -(-found.size // _BLOCKS))
    raw = out.detach().view(torch.uint8).numpy()
    for block in np.flatnonzero(widths == _RAW):  # as they are, NaN and all
        first = block * _planes.BLOCK * item
        own = raw[first : first + _planes.BLOCK * item]
        own[:] = data[ends[block] - sizes[block] :][: own.size]

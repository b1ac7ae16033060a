"""`planes` on the CPU: pieces of a tensor over the worker threads, their bytes one after the other."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from squeezebox.codecs import _workers
from squeezebox.codecs._cpu._arrays import array, block, scalar
from squeezebox.codecs._reference import _planes

_BLOCKS = 2048  # of a piece: what it packs to stays in the cache until it is copied
_FEW = 1024  # channels next to each other are repeated up to here, so that loops are long enough
_EVERY = 1 << 62  # neighbours of one channel, where there is one
_Scratch = tuple[NDArray[Any], NDArray[Any], NDArray[Any], NDArray[Any]]


def _channels(bound: float, scale: Tensor | None, inner: int, dtype: torch.dtype) -> tuple[NDArray[Any], int]:
    """Each channel's step, NaN where it is not usable, and how many neighbours share one."""
    unit, least, most = _planes.usable_steps(bound, dtype)
    kind = scalar(dtype)
    with np.errstate(over="ignore", invalid="ignore"):  # no such step is usable
        steps = np.full(1, unit, kind) if scale is None else scale.numpy() * kind(unit)
    steps = np.where((steps >= kind(least)) & (steps <= kind(most)), steps, kind(np.nan))
    if steps.size == 1:
        return steps, _EVERY
    if inner == 1 and steps.size < _FEW:
        steps = np.tile(steps, -(-_FEW // steps.size))
    return steps, inner


def _scratch(dtype: torch.dtype) -> _Scratch:
    return *block(dtype, _planes.BLOCK), np.empty(_planes.BLOCK, np.int32), np.empty(_planes.BLOCK, np.uint8)


def _ahead(keep_sign: bool, dtype: torch.dtype) -> Any:
    return scalar(dtype)(_planes.AHEAD if keep_sign else 0.0)


def _sizes(heads: NDArray[Any], item_bytes: int) -> NDArray[Any]:
    """Bytes of each piece."""
    widths = heads & _planes.RAW
    blocks = np.where(
        widths == _planes.RAW, _planes.BLOCK * item_bytes, _planes.LANES * widths.astype(np.int64)
    )
    return np.add.reduceat(blocks, np.arange(0, heads.size, _BLOCKS))


def pack_planes(
    flat: Tensor, bound: float, keep_sign: bool, scale: Tensor | None, inner: int
) -> tuple[Tensor, Tensor]:
    """Heads and bytes."""
    from squeezebox.codecs._cpu import _plane_loops

    steps, inner = _channels(bound, scale, inner, flat.dtype)
    inverses = steps.dtype.type(1) / steps
    source, ahead, most = array(flat), _ahead(keep_sign, flat.dtype), _planes.LARGEST[flat.dtype]
    heads = torch.empty(-(-flat.numel() // _planes.BLOCK), dtype=torch.int16, device="cpu")
    found = heads.numpy()

    def work(index: int) -> NDArray[np.uint8]:
        first = index * _BLOCKS
        piece = source[first * _planes.BLOCK : (first + _BLOCKS) * _planes.BLOCK]
        room = _workers.scratch("planes", _BLOCKS * _planes.BLOCK * flat.element_size(), np.uint8)
        here, start = found[first : first + _BLOCKS], first * _planes.BLOCK
        taken = _plane_loops.pack(
            piece, start, inverses, inner, ahead, most, _scratch(flat.dtype), here, room
        )
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
    target, ahead, found, data = array(out), _ahead(keep_sign, out.dtype), heads.numpy(), packed.numpy()
    sizes = _sizes(found, out.element_size())
    ends = np.cumsum(sizes)

    def work(index: int) -> None:
        first = index * _BLOCKS
        piece = target[first * _planes.BLOCK : (first + _BLOCKS) * _planes.BLOCK]
        here, bytes_ = found[first : first + _BLOCKS], data[ends[index] - sizes[index] : ends[index]]
        start = first * _planes.BLOCK
        _plane_loops.unpack(here, bytes_, start, steps, inner, ahead, _scratch(out.dtype), piece)

    _workers.run(work, len(ends))

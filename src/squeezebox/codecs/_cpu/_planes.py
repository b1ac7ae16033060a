"""`planes` on the CPU: a share of a tensor for each thread, their bytes one after the other."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from squeezebox.codecs import _workers
from squeezebox.codecs._cpu._arrays import WIDE, fill, numbers, scalar
from squeezebox.codecs._reference import _planes

_CONVERTED = 512  # blocks that are converted at a time: they stay in the cache until they are packed
_LONG = 1 << 14  # blocks that a thread takes at most, so that little memory is enough to pack them to
_FEW = 64  # blocks: fewer are not worth a thread
_RAW = _planes.RAW
_ONE = np.ones(1, np.float32)


@lru_cache(maxsize=1024)
def _how(bound: float, keep_sign: bool, dtype: torch.dtype) -> tuple[Any, ...]:
    """The step of a scale of 1, its least and its largest value, and what codes are ahead of it."""
    kind = scalar(dtype)
    steps = (kind(each) for each in _planes.usable_steps(bound, dtype))
    return (*steps, kind(_planes.AHEAD if keep_sign else 0.0))


def _channels(scale: Tensor | None, inner: int) -> tuple[NDArray[Any], int]:
    """Each channel's scale, and how many neighbours share one; 1 where all do."""
    if scale is None:
        return _ONE, 1
    return scale.numpy(), 1 if scale.numel() == 1 else inner


def _pieces(blocks: int, dtype: torch.dtype) -> list[slice]:
    """Runs of blocks: one for each thread, as far as they are not too long."""
    most = _LONG if dtype in WIDE else _CONVERTED
    size = min(max(_FEW, -(-blocks // torch.get_num_threads())), most)
    return [slice(first, min(first + size, blocks)) for first in range(0, blocks, size)]


def pack_planes(
    flat: Tensor, bound: float, keep_sign: bool, scale: Tensor | None, inner: int
) -> tuple[Tensor, Tensor]:
    """Heads and bytes."""
    from squeezebox.codecs._cpu import _plane_loops

    factors, inner = _channels(scale, inner)
    how, most = _how(bound, keep_sign, flat.dtype), _planes.LARGEST[flat.dtype]
    item, words = flat.element_size(), _planes.BLOCK * flat.element_size() // 8
    heads = torch.empty(-(-flat.numel() // _planes.BLOCK), dtype=torch.int16, device="cpu")
    found, raw = heads.numpy(), flat.detach().view(torch.uint8).numpy()
    pieces = _pieces(len(heads), flat.dtype)
    held = min(len(heads), _LONG * torch.get_num_threads())  # blocks that are packed before they are copied
    room = _workers.scratch("planes", held * words, np.uint64)

    def work(piece: slice) -> NDArray[np.uint64]:
        start, end = piece.start * _planes.BLOCK, min(piece.stop * _planes.BLOCK, flat.numel())
        out = room[piece.start % held * words :][: (piece.stop - piece.start) * words]
        values, own = numbers(flat[start:end]), raw[start * item : end * item]
        taken: int = _plane_loops.pack(values, own, start, factors, inner, how, most, found[piece], out)
        return out[:taken]

    parts: list[NDArray[np.uint64]] = []
    at_once = -(-held // pieces[0].stop) if pieces else 1
    for first in range(0, len(pieces), at_once):
        here = pieces[first : first + at_once]
        made = _workers.run(partial(_one, work, here), len(here))
        parts += made if len(made) == len(pieces) else [part.copy() for part in made]
    packed = torch.empty(8 * sum(part.size for part in parts), dtype=torch.uint8, device="cpu")
    if parts:
        np.concatenate(parts, out=packed.numpy().view(np.uint64))
    return heads, packed


def _one(work: Callable[[slice], NDArray[np.uint64]], pieces: list[slice], index: int) -> NDArray[np.uint64]:
    return work(pieces[index])


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

    factors, inner = _channels(scale, inner)
    how, found, words = _how(bound, keep_sign, out.dtype), heads.numpy(), packed.numpy().view(np.uint64)
    item, pieces = out.element_size(), _pieces(len(heads), out.dtype)

    def work(index: int) -> int:
        piece = pieces[index]
        start, end = piece.start * _planes.BLOCK, min(piece.stop * _planes.BLOCK, out.numel())
        where = found, words, piece.start, start, factors, inner, how, item
        raw: int = fill(out[start:end], lambda values: _plane_loops.unpack(*where, values))
        return raw

    if sum(_workers.run(work, len(pieces))):
        _fill_raw(found, packed.numpy(), out)


def _fill_raw(heads: NDArray[np.int16], data: NDArray[np.uint8], out: Tensor) -> None:
    """Raw blocks as they are, NaN and all."""
    widths, size = (heads & _RAW).astype(np.int64), _planes.BLOCK * out.element_size()
    ends = np.cumsum(np.where(widths == _RAW, size, _planes.LANES * widths))
    raw = out.detach().view(torch.uint8).numpy()
    for block in np.flatnonzero(widths == _RAW):
        own = raw[block * size : (block + 1) * size]
        own[:] = data[ends[block] - size :][: own.size]

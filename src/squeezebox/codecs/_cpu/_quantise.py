"""The entropy codecs' three loops on the CPU, as ``_chunks.Kernels`` wants them."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from squeezebox.codecs import _chunks
from squeezebox.codecs._cpu._arrays import array, block, scalar
from squeezebox.codecs._reference._quantise import INTEGERS, inverse

# Elements computed at a time: few enough for the innermost cache, enough to hide each block's set-up.
BLOCK = 1024


def extent(flat: Tensor) -> tuple[float, float]:
    """Smallest and largest element of a chunk, or NaN twice."""
    from squeezebox.codecs._cpu import _quantise_loops

    edges = np.empty(2, scalar(flat.dtype))
    _quantise_loops.extent(array(flat), *block(flat.dtype, BLOCK), edges)
    low, high = float(edges[0]), float(edges[1])
    return (low, high) if np.isfinite(edges).all() else (float("nan"), float("nan"))


def narrow(flat: Tensor, step: float, limit: float, keep_sign: bool) -> Tensor | None:
    """As the reference's ``narrow``."""
    from squeezebox.codecs._cpu import _quantise_loops

    loop = _quantise_loops.narrow_signed if keep_sign else _quantise_loops.narrow_nearest
    codes = torch.empty(flat.numel(), dtype=torch.int8)
    scalars = (np.float32(value) for value in (step, inverse(step, flat.dtype), limit))
    return codes if loop(flat.detach().numpy(), *scalars, codes.numpy()) else None


def quantise(flat: Tensor, step: float, limit: float, keep_sign: bool, width: int, lag: int) -> Tensor | None:
    """Codes or their differences; None where an element would miss ``limit``."""
    from squeezebox.codecs._cpu import _quantise_loops

    kind = scalar(flat.dtype)
    codes = torch.empty(flat.numel(), dtype=INTEGERS[width])
    target = codes.numpy()
    scratch = (*block(flat.dtype, BLOCK), *block(flat.dtype, BLOCK), np.empty(BLOCK, target.dtype))
    rounded = array(torch.empty(BLOCK, dtype=flat.dtype))
    scalars = kind(step), kind(inverse(step, flat.dtype)), kind(limit)
    if not _quantise_loops.quantise(array(flat), *scalars, keep_sign, scratch, rounded, target):
        return None
    return difference(codes, lag)


def difference(codes: Tensor, lag: int) -> Tensor:
    """As the reference's ``difference``."""
    from squeezebox.codecs._cpu import _quantise_loops

    if lag == 0 or lag >= codes.numel():
        return codes
    changes = torch.empty_like(codes)
    _quantise_loops.difference(codes.numpy(), lag, changes.numpy())
    return changes


def dequantise(codes: Tensor, step: float, keep_sign: bool, lag: int, out: Tensor) -> None:
    """Values of a chunk, into ``out``; ``codes`` are overwritten."""
    from squeezebox.codecs._cpu import _quantise_loops

    source = codes.numpy()
    if 0 < lag < codes.numel():
        _quantise_loops.accumulate(source, lag)
    _quantise_loops.dequantise(
        source, scalar(out.dtype)(step), keep_sign, *block(out.dtype, BLOCK), array(out)
    )


def multiply(source: Tensor, start: int, factors: Tensor, inner: int, out: Tensor) -> None:
    """As the reference's ``multiply``."""
    from squeezebox.codecs._cpu import _quantise_loops

    _quantise_loops.multiply(source.numpy(), start, factors.numpy(), inner, out.numpy())


class _Huffman:
    """The compiled Huffman loops, under the reference's names."""

    def __getattr__(self, name: str) -> Any:
        from squeezebox.codecs._cpu import _huffman_loops

        return getattr(_huffman_loops, name)


LOOPS = _chunks.Kernels(
    narrow=narrow,
    difference=difference,
    extent=extent,
    quantise=quantise,
    dequantise=dequantise,
    multiply=multiply,
    huffman=_Huffman(),
)


def pack_chunks(
    flat: Tensor, bound: float, keep_sign: bool, lag: int, scale: Tensor | None, inner: int
) -> tuple[Tensor, Tensor]:
    """The operator's kernel: ``_chunks.pack_chunks`` with these loops."""
    return _chunks.pack_chunks(LOOPS, flat, bound, keep_sign, lag, scale, inner)


def unpack_chunks(
    blob: Tensor, table: Tensor, keep_sign: bool, lag: int, scale: Tensor | None, inner: int, out: Tensor
) -> None:
    """The operator's kernel: ``_chunks.unpack_chunks`` with these loops."""
    _chunks.unpack_chunks(LOOPS, blob, table, keep_sign, lag, scale, inner, out)

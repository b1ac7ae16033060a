"""The entropy codecs' loops on the CPU, as ``_chunks.Kernels`` wants them."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from squeezebox.codecs import _chunks
from squeezebox.codecs._cpu._arrays import array, block, scalar
from squeezebox.codecs._reference._quantise import INTEGERS, inverse
from squeezebox.codecs._workers import scratch

# Elements computed at a time: few enough for the innermost cache, enough to hide each block's set-up.
BLOCK = 1024


def extent(flat: Tensor) -> tuple[float, float]:
    """Smallest and largest element of a chunk, or NaN twice."""
    from squeezebox.codecs._cpu import _quantise_loops

    edges = np.empty(2, scalar(flat.dtype))
    _quantise_loops.extent(array(flat), *block(flat.dtype, BLOCK), edges)
    low, high = float(edges[0]), float(edges[1])
    return (low, high) if np.isfinite(edges).all() else (float("nan"), float("nan"))


def narrow(
    flat: Tensor, start: int, inner: int, inverses: Tensor, dither: int, keep_sign: bool, width: int
) -> Tensor | None:
    """As the reference's ``narrow``."""
    from squeezebox.codecs._cpu import _quantise_loops

    codes = torch.from_numpy(scratch("codes", flat.numel(), f"int{width}"))
    most = np.float32((1 << (width - 1)) - 1)
    fits = _quantise_loops.narrow(
        flat.numpy(), start, inner, inverses.numpy(), dither, keep_sign, most, codes.numpy()
    )
    return codes if fits else None


def widen(
    codes: Tensor, start: int, inner: int, steps: Tensor, dither: int, keep_sign: bool, out: Tensor
) -> None:
    """As the reference's ``widen``."""
    from squeezebox.codecs._cpu import _quantise_loops

    _quantise_loops.widen(codes.numpy(), start, inner, steps.numpy(), dither, keep_sign, out.numpy())


def _by_width(codes: Tensor) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
    """The codes as the one of three arrays that has their width; one kernel then serves all widths."""
    bytes_, halves, words = (np.empty(0, f"int{width}") for width in INTEGERS)
    found = codes.numpy()
    if found.itemsize == 1:
        return found, halves, words
    return (bytes_, found, words) if found.itemsize == 2 else (bytes_, halves, found)


def quantise(flat: Tensor, step: float, limit: float, keep_sign: bool, width: int) -> Tensor | None:
    """Codes; None where an element would miss ``limit``."""
    from squeezebox.codecs._cpu import _quantise_loops

    kind = scalar(flat.dtype)
    codes = torch.empty(flat.numel(), dtype=INTEGERS[width], device="cpu")
    space = (*block(flat.dtype, BLOCK), *block(flat.dtype, BLOCK), np.empty(BLOCK, np.int32))
    rounded = array(torch.empty(BLOCK, dtype=flat.dtype, device="cpu"))
    scalars = kind(step), kind(inverse(step, flat.dtype)), kind(limit)
    target = _by_width(codes)
    if not _quantise_loops.quantise(array(flat), *scalars, keep_sign, space, rounded, target):
        return None
    return codes


def difference(codes: Tensor, lag: int) -> Tensor:
    """As the reference's ``difference``."""
    if lag == 0 or lag >= codes.numel():
        return codes
    changes = scratch("changes", codes.numel(), codes.numpy().dtype)
    values = codes.numpy()
    changes[:lag] = values[:lag]
    np.subtract(values[lag:], values[:-lag], out=changes[lag:])
    return torch.from_numpy(changes)


def accumulate(codes: Tensor, lag: int) -> Tensor:
    """As the reference's ``accumulate``; ``codes`` are overwritten."""
    from squeezebox.codecs._cpu import _quantise_loops

    if 0 < lag < codes.numel():
        _quantise_loops.accumulate(codes.numpy(), lag)
    return codes


def dequantise(codes: Tensor, step: float, keep_sign: bool, out: Tensor) -> None:
    """Values of a chunk, into ``out``."""
    from squeezebox.codecs._cpu import _quantise_loops

    kind = scalar(out.dtype)
    space = (*block(out.dtype, BLOCK), np.empty(BLOCK, np.int32))
    _quantise_loops.dequantise(_by_width(codes), kind(step), keep_sign, space, array(out))


class _Huffman:
    """The compiled Huffman loops, under the reference's names."""

    def __getattr__(self, name: str) -> Any:
        from squeezebox.codecs._cpu import _huffman_loops

        return getattr(_huffman_loops, name)


LOOPS = _chunks.Kernels(
    narrow=narrow,
    widen=widen,
    difference=difference,
    accumulate=accumulate,
    extent=extent,
    quantise=quantise,
    dequantise=dequantise,
    huffman=_Huffman(),
)

pack_chunks, unpack_chunks = _chunks.operators(LOOPS)

"""The entropy codecs' loops on the CPU, as ``_chunks.Kernels`` wants them."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from squeezebox.codecs import _chunks
from squeezebox.codecs._cpu._arrays import fill, numbers, scalar
from squeezebox.codecs._reference._quantise import INTEGERS, inverse
from squeezebox.codecs._workers import scratch

# Elements computed at a time: few enough for the innermost cache, enough to hide each block's set-up.
BLOCK = 1024
_ROUNDING = {torch.bfloat16: 1, torch.float16: 2}  # of what is decoded: see ``_blocks.round_block``


def extent(flat: Tensor) -> tuple[float, float]:
    """Smallest and largest element of a chunk, or NaN twice."""
    from squeezebox.codecs._cpu import _entropy_loops

    values, edges = numbers(flat), np.empty(2, scalar(flat.dtype))
    integer = f"int{8 * edges.itemsize}"
    _entropy_loops.extent(values.view(integer), edges.view(integer))
    low, high = float(edges[0]), float(edges[1])
    return (low, high) if np.isfinite(edges).all() else (float("nan"), float("nan"))


def _blocks() -> tuple[NDArray[Any], NDArray[Any]]:
    return np.empty(BLOCK, np.float32), np.empty(BLOCK, np.float32)


def narrow(
    flat: Tensor, start: int, inner: int, inverses: Tensor, dither: int, keep_sign: bool, width: int
) -> Tensor | None:
    """As the reference's ``narrow``."""
    from squeezebox.codecs._cpu import _entropy_loops

    codes = torch.from_numpy(scratch("codes", flat.numel(), f"int{width}"))
    most = np.float32((1 << (width - 1)) - 1)
    how = start, inner, inverses.numpy(), dither, keep_sign, most, _blocks()
    return codes if _entropy_loops.narrow(flat.numpy(), *how, codes.numpy()) else None


def widen(
    codes: Tensor, start: int, inner: int, steps: Tensor, dither: int, keep_sign: bool, out: Tensor
) -> None:
    """As the reference's ``widen``."""
    from squeezebox.codecs._cpu import _entropy_loops

    known = codes if codes.dtype == torch.int8 else codes.int()  # one loop for those that are rare
    how = start, inner, steps.numpy(), dither, keep_sign, _blocks()
    _entropy_loops.widen(known.numpy(), *how, out.numpy())


def quantise(flat: Tensor, step: float, limit: float, keep_sign: bool, width: int) -> Tensor | None:
    """Codes; None where an element would miss ``limit``."""
    from squeezebox.codecs._cpu import _entropy_loops

    kind = scalar(flat.dtype)
    codes = scratch("wide codes", flat.numel(), np.int32)
    block, decoded = np.empty(BLOCK, kind), np.empty(BLOCK, kind)
    space = block, decoded, decoded.view(f"int{8 * decoded.itemsize}"), np.empty(BLOCK, np.int32)
    scalars = kind(step), kind(inverse(step, flat.dtype)), kind(limit)
    rounding = _ROUNDING.get(flat.dtype, 0)
    if not _entropy_loops.quantise(numbers(flat), *scalars, keep_sign, space, rounding, codes):
        return None
    return torch.from_numpy(codes).to(INTEGERS[width])


def dequantise(codes: Tensor, step: float, keep_sign: bool, out: Tensor) -> None:
    """Values of a chunk, into ``out``."""
    from squeezebox.codecs._cpu import _entropy_loops

    wide, kind = codes.int().numpy(), scalar(out.dtype)
    fill(out, lambda values: _entropy_loops.dequantise(wide, kind(step), keep_sign, values))


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
    from squeezebox.codecs._cpu import _entropy_loops

    if not 0 < lag < codes.numel():
        return codes
    if codes.dtype == torch.int16:  # rare: sums of int32 have the same last 16 bits
        return accumulate(codes.int(), lag).to(torch.int16)
    _entropy_loops.accumulate(codes.numpy(), lag)
    return codes


class _Huffman:
    """The compiled Huffman loops, under the reference's names."""

    def __getattr__(self, name: str) -> Any:
        from squeezebox.codecs._cpu import _entropy_loops

        return getattr(_entropy_loops, name)


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

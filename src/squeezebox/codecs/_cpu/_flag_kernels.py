"""The flag operators' CPU kernels: every function computes what that of the same name in ``_reference`` does.

The loops are imported inside, so that numba is loaded by the first call and not before.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from squeezebox.codecs import _workers
from squeezebox.codecs._codec import FLOATS
from squeezebox.codecs._cpu._arrays import PIECE, fill, new_codes, numbers, over_groups, rounded
from squeezebox.codecs._reference import _bits
from squeezebox.codecs._reference._groups import compute_dtype

_INTEGERS = {4: np.int32, 8: np.int64}


def _between(
    flat: Tensor, lower: float, upper: float, inclusive: bool, compared: torch.dtype, zero: float = 0.0
) -> tuple[Tensor, bool]:
    """Bits of lying in an interval, and whether all others are this zero."""
    from squeezebox.codecs._cpu import _flag_loops

    codes = new_codes(_bits.group_count(flat.numel()), 1)
    edges = rounded(lower, compared), rounded(upper, compared)
    other = np.array(zero, type(edges[0])).view(_INTEGERS[edges[0].itemsize])[()]

    def work(own: slice, groups: slice) -> bool:
        values = numbers(flat[own])
        flags = _workers.scratch("flags", values.size, np.uint8)
        whole = _flag_loops.between(values, values.view(other.dtype), *edges, inclusive, other, flags)
        _flag_loops.pack_codes(flags, 1, codes[32 * groups.start : 32 * groups.stop].numpy())
        return bool(whole)

    return codes, all(over_groups(work, flat.numel()))


def pack_nonzero(flat: Tensor, value: float, negative: bool) -> tuple[Tensor, Tensor]:
    """Bits of ``x == value``, and whether all others are zeros of one sign."""
    if flat.dtype not in FLOATS:
        return _bits.pack_nonzero(flat, value, negative)
    codes, whole = _between(flat, value, value, True, flat.dtype, -0.0 if negative else 0.0)
    return codes, torch.tensor(whole, device="cpu")


def pack_positive(flat: Tensor) -> Tensor:
    """Bits of ``not (x <= 0)``: no x is above NaN."""
    if flat.dtype not in FLOATS:
        return _bits.pack_positive(flat)
    return _between(flat, 0.0, float("nan"), False, flat.dtype)[0]


def pack_between(flat: Tensor, lower: float, upper: float, inclusive: bool) -> Tensor:
    """Bits of lying in an interval."""
    if flat.dtype not in FLOATS:
        return _bits.pack_between(flat, lower, upper, inclusive)
    return _between(flat, lower, upper, inclusive, flat.dtype if inclusive else compute_dtype(flat.dtype))[0]


def unpack_bits(packed: Tensor, zero: float, one: float, out: Tensor) -> None:
    """One of two values for each bit, into ``out``."""
    from squeezebox.codecs._cpu import _flag_loops

    if out.dtype == torch.uint8 and (zero, one) == (0.0, 1.0):
        _unpack_codes(packed, 1, out)
        return
    if out.dtype not in FLOATS:
        _bits.unpack_bits(packed, zero, one, out)
        return
    pair = rounded(zero, out.dtype), rounded(one, out.dtype)

    def work(own: slice, groups: slice) -> None:
        flags = _workers.scratch("flags", own.stop - own.start, np.uint8)
        _flag_loops.unpack_codes(packed[32 * groups.start : 32 * groups.stop].numpy(), 1, flags)
        fill(out[own], lambda values: _flag_loops.choose(flags, *pair, values))

    over_groups(work, out.numel())


def pack_codes(codes: Tensor, bits: int) -> Tensor:
    """Bytes to lanes of ``bits`` bits."""
    from squeezebox.codecs._cpu import _flag_loops

    packed, width = new_codes(_bits.group_count(codes.numel()), bits), 32 * bits
    source, target = codes.numpy(), packed.numpy()
    over_groups(
        lambda own, groups: _flag_loops.pack_codes(
            source[own], bits, target[width * groups.start : width * groups.stop]
        ),
        codes.numel(),
    )
    return packed


def unpack_codes(packed: Tensor, bits: int, numel: int) -> Tensor:
    """Lanes of ``bits`` bits to bytes."""
    codes = torch.empty(numel, dtype=torch.uint8, device="cpu")
    _unpack_codes(packed, bits, codes)
    return codes


def _unpack_codes(packed: Tensor, bits: int, codes: Tensor) -> None:
    from squeezebox.codecs._cpu import _flag_loops

    source, target, width = packed.numpy(), codes.numpy(), 32 * bits
    over_groups(
        lambda own, groups: _flag_loops.unpack_codes(
            source[width * groups.start : width * groups.stop], bits, target[own]
        ),
        codes.numel(),
    )


def pack_offsets(indices: Tensor, base: Tensor, places: Tensor, inner: int) -> tuple[Tensor, Tensor]:
    """The place of each index in its window, and whether all have one."""
    from squeezebox.codecs._cpu import _flag_loops

    codes = torch.empty(indices.numel(), dtype=torch.uint8, device="cpu")
    arrays = indices.numpy(), base.numpy(), places.numpy(), inner, codes.numpy()
    parts = _workers.spans(indices.numel() // (base.numel() * inner), _least_planes(base, inner))
    missing = sum(_workers.run(lambda index: _flag_loops.pack_offsets(*arrays, *parts[index]), len(parts)))
    return codes, torch.tensor(missing == 0, device="cpu")


def unpack_offsets(codes: Tensor, base: Tensor, places: Tensor, inner: int, out: Tensor) -> None:
    """Indices of places, into ``out``."""
    from squeezebox.codecs._cpu import _flag_loops

    arrays = codes.numpy(), base.numpy(), places.numpy(), inner, out.numpy()
    planes = codes.numel() // max(1, base.numel() * inner)
    parts = _workers.spans(planes, _least_planes(base, inner))
    _workers.run(lambda index: _flag_loops.unpack_offsets(*arrays, *parts[index]), len(parts))


def _least_planes(base: Tensor, inner: int) -> int:
    return -(-PIECE * 256 // max(1, base.numel() * inner))

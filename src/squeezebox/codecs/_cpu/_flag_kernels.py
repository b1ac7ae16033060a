"""The operators' CPU kernels: allocate, split over threads, run the compiled loops.

Every function computes what the function of the same name in ``_reference`` does. The loops are imported
inside, so that numba is loaded by the first call and not before.
"""

from __future__ import annotations

import torch
from torch import Tensor

from squeezebox.codecs._cpu._arrays import (
    READABLE,
    array,
    block,
    patterns,
    rounded,
)
from squeezebox.codecs._cpu._split import LEAST_GROUPS, new_codes, over_groups
from squeezebox.codecs._reference import _bits
from squeezebox.codecs._reference._groups import compute_dtype


def pack_nonzero(flat: Tensor, value: float, negative: bool) -> tuple[Tensor, Tensor]:
    """Bits of ``x == value``, and whether all others are zeros of one sign."""
    if flat.dtype not in READABLE:
        return _bits.pack_nonzero(flat, value, negative)
    from squeezebox.codecs._cpu import _flag_loops

    groups = _bits.group_count(flat.numel())
    codes, wanted = new_codes(groups, 1), rounded(value, flat.dtype)
    source, packed = array(flat), codes.numpy()

    def work(first: int, last: int) -> int:
        scratch = block(flat.dtype)
        others: int = _flag_loops.pack_nonzero(source, wanted, negative, *scratch, packed, first, last)
        return others

    return codes, torch.tensor(sum(over_groups(work, groups)) == 0, device="cpu")


def pack_positive(flat: Tensor) -> Tensor:
    """Bits of ``not (x <= 0)``."""
    if flat.dtype not in READABLE:
        return _bits.pack_positive(flat)
    from squeezebox.codecs._cpu import _flag_loops

    groups = _bits.group_count(flat.numel())
    codes = new_codes(groups, 1)
    source, packed = array(flat), codes.numpy()
    over_groups(
        lambda first, last: _flag_loops.pack_positive(source, *block(flat.dtype), packed, first, last),
        groups,
    )
    return codes


def pack_between(flat: Tensor, lower: float, upper: float, inclusive: bool) -> Tensor:
    """Bits of lying in an interval."""
    if flat.dtype not in READABLE:
        return _bits.pack_between(flat, lower, upper, inclusive)
    from squeezebox.codecs._cpu import _flag_loops

    groups = _bits.group_count(flat.numel())
    compared = flat.dtype if inclusive else compute_dtype(flat.dtype)
    codes, edges = new_codes(groups, 1), (rounded(lower, compared), rounded(upper, compared))
    source, packed = array(flat), codes.numpy()

    def work(first: int, last: int) -> None:
        scratch = block(flat.dtype)
        _flag_loops.pack_between(source, *edges, inclusive, *scratch, packed, first, last)

    over_groups(work, groups)
    return codes


def unpack_bits(packed: Tensor, zero: float, one: float, out: Tensor) -> None:
    """One of two values for each bit, into ``out``."""
    from squeezebox.codecs._cpu import _flag_loops

    pair = torch.tensor([zero, one], dtype=torch.float64, device="cpu").to(out.dtype)
    low, high = patterns(pair)
    bits, target = packed.numpy(), patterns(out)
    over_groups(
        lambda first, last: _flag_loops.unpack_bits(bits, low, high, target, first, last),
        packed.numel() // 32,
    )


def pack_codes(codes: Tensor, bits: int) -> Tensor:
    """Bytes to lanes of ``bits`` bits."""
    from squeezebox.codecs._cpu import _flag_loops

    groups = _bits.group_count(codes.numel())
    packed = new_codes(groups, bits)
    source, target = codes.numpy(), packed.numpy()
    over_groups(lambda first, last: _flag_loops.pack_codes(source, bits, target, first, last), groups)
    return packed


def unpack_codes(packed: Tensor, bits: int, numel: int) -> Tensor:
    """Lanes of ``bits`` bits to bytes."""
    from squeezebox.codecs._cpu import _flag_loops

    codes = torch.empty(numel, dtype=torch.uint8, device="cpu")
    source, target = packed.numpy(), codes.numpy()
    over_groups(
        lambda first, last: _flag_loops.unpack_codes(source, bits, target, first, last),
        _bits.group_count(numel),
    )
    return codes


def pack_offsets(indices: Tensor, base: Tensor, places: Tensor, inner: int) -> tuple[Tensor, Tensor]:
    """The place of each index in its window, and whether all have one."""
    from squeezebox.codecs._cpu import _flag_loops

    codes = torch.empty(indices.numel(), dtype=torch.uint8, device="cpu")
    arrays = indices.numpy(), base.numpy(), places.numpy(), inner, codes.numpy()
    planes = indices.numel() // (base.numel() * inner)

    def work(first: int, last: int) -> int:
        missing: int = _flag_loops.pack_offsets(*arrays, first, last)
        return missing

    missing = sum(over_groups(work, planes, _least_planes(base, inner)))
    return codes, torch.tensor(missing == 0, device="cpu")


def unpack_offsets(codes: Tensor, base: Tensor, places: Tensor, inner: int, out: Tensor) -> None:
    """Indices of places, into ``out``."""
    from squeezebox.codecs._cpu import _flag_loops

    arrays = codes.numpy(), base.numpy(), places.numpy(), inner, out.numpy()
    planes = codes.numel() // max(1, base.numel() * inner)
    over_groups(
        lambda first, last: _flag_loops.unpack_offsets(*arrays, first, last),
        planes,
        _least_planes(base, inner),
    )


def _least_planes(base: Tensor, inner: int) -> int:
    return -(-LEAST_GROUPS * 256 // max(1, base.numel() * inner))

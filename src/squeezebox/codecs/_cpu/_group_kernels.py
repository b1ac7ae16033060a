"""The operators' CPU kernels: allocate, split over threads, run the compiled loops.

Every function computes what the function of the same name in ``_reference`` does. The loops are imported
inside, so that numba is loaded by the first call and not before.
"""

from __future__ import annotations

from torch import Tensor

from squeezebox.codecs._cpu._arrays import (
    array,
    floor,
    largest,
    new_scales,
    space,
)
from squeezebox.codecs._cpu._split import new_codes, over_groups
from squeezebox.codecs._reference import _bits


def pack_zero(flat: Tensor, bits: int, stochastic: bool, seed: int) -> tuple[Tensor, Tensor]:
    """Codes and scales of `zero*`."""
    from squeezebox.codecs._cpu import _group_loops

    groups = _bits.group_count(flat.numel())
    codes, scales = new_codes(groups, bits), new_scales(flat, groups)
    source, low, packed, scale = array(flat), floor(flat.dtype), codes.numpy(), scales.numpy()

    def work(first: int, last: int) -> None:
        scratch = space(flat.dtype)
        _group_loops.pack_zero(source, bits, stochastic, seed, low, scratch, packed, scale, first, last)

    over_groups(work, groups)
    return codes, scales


def unpack_zero(codes: Tensor, scales: Tensor, bits: int, stochastic: bool, out: Tensor) -> None:
    """Values of `zero*`, into ``out``."""
    from squeezebox.codecs._cpu import _group_loops

    packed, scale, target = codes.numpy(), scales.numpy(), array(out)
    limit = largest(out.dtype)

    def work(first: int, last: int) -> None:
        scratch = space(out.dtype)
        _group_loops.unpack_zero(packed, scale, bits, stochastic, limit, scratch, target, first, last)

    over_groups(work, scales.numel())


def pack_minmax(flat: Tensor, bits: int, stochastic: bool, seed: int) -> tuple[Tensor, Tensor]:
    """Codes and scales of `minmax*`."""
    from squeezebox.codecs._cpu import _minmax_loops

    groups = _bits.group_count(flat.numel())
    codes, scales = new_codes(groups, bits), new_scales(flat, 2 * groups)
    source, low, packed, scale = array(flat), floor(flat.dtype), codes.numpy(), scales.numpy()

    def work(first: int, last: int) -> None:
        scratch = space(flat.dtype)
        _minmax_loops.pack_minmax(source, bits, stochastic, seed, low, scratch, packed, scale, first, last)

    over_groups(work, groups)
    return codes, scales


def unpack_minmax(codes: Tensor, scales: Tensor, bits: int, out: Tensor) -> None:
    """Values of `minmax*`, into ``out``."""
    from squeezebox.codecs._cpu import _minmax_loops

    packed, scale, target = codes.numpy(), scales.numpy(), array(out)
    limit = largest(out.dtype)

    def work(first: int, last: int) -> None:
        scratch = space(out.dtype)
        _minmax_loops.unpack_minmax(packed, scale, bits, limit, scratch, target, first, last)

    over_groups(work, scales.numel() // 2)

"""The operators' CPU kernels: allocate, split over threads, run the compiled loops.

Every function computes what the function of the same name in ``_reference`` does. The loops are imported
inside, so that numba is loaded by the first call and not before.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

from squeezebox.codecs import _workers
from squeezebox.codecs._cpu._arrays import (
    READABLE,
    array,
    block,
    floor,
    new_scales,
    patterns,
    rounded,
    scalar,
    space,
)
from squeezebox.codecs._reference import _bits

Result = TypeVar("Result")
LEAST_GROUPS = 256


def _over_groups(work: Callable[[int, int], Result], count: int, least: int = LEAST_GROUPS) -> list[Result]:
    pieces = _workers.spans(count, least)
    return _workers.run(lambda index: work(*pieces[index]), len(pieces))


def _codes(groups: int, bits: int) -> Tensor:
    return torch.empty(groups * 32 * bits, dtype=torch.uint8)


def pack_zero(flat: Tensor, bits: int, stochastic: bool, seed: int) -> tuple[Tensor, Tensor]:
    from squeezebox.codecs._cpu import _group_loops

    groups = _bits.group_count(flat.numel())
    codes, scales = _codes(groups, bits), new_scales(flat, groups)
    source, low, packed, scale = array(flat), floor(flat.dtype), codes.numpy(), scales.numpy()

    def work(first: int, last: int) -> None:
        scratch = space(flat.dtype)
        _group_loops.pack_zero(
            source, bits, stochastic, seed, low, scratch, packed, scale, first, last
        )

    _over_groups(work, groups)
    return codes, scales


def unpack_zero(codes: Tensor, scales: Tensor, bits: int, stochastic: bool, out: Tensor) -> None:
    from squeezebox.codecs._cpu import _group_loops

    packed, scale, target = codes.numpy(), scales.numpy(), array(out)

    def work(first: int, last: int) -> None:
        scratch = space(out.dtype)
        _group_loops.unpack_zero(packed, scale, bits, stochastic, scratch, target, first, last)

    _over_groups(work, scales.numel())


def pack_minmax(flat: Tensor, bits: int, stochastic: bool, seed: int) -> tuple[Tensor, Tensor]:
    from squeezebox.codecs._cpu import _minmax_loops

    groups = _bits.group_count(flat.numel())
    codes, scales = _codes(groups, bits), new_scales(flat, 2 * groups)
    source, low, packed, scale = array(flat), floor(flat.dtype), codes.numpy(), scales.numpy()

    def work(first: int, last: int) -> None:
        scratch = space(flat.dtype)
        _minmax_loops.pack_minmax(
            source, bits, stochastic, seed, low, scratch, packed, scale, first, last
        )

    _over_groups(work, groups)
    return codes, scales


def unpack_minmax(codes: Tensor, scales: Tensor, bits: int, out: Tensor) -> None:
    from squeezebox.codecs._cpu import _minmax_loops

    packed, scale, target = codes.numpy(), scales.numpy(), array(out)
    limit = scalar(out.dtype)(torch.finfo(out.dtype).max)

    def work(first: int, last: int) -> None:
        scratch = space(out.dtype)
        _minmax_loops.unpack_minmax(packed, scale, bits, limit, scratch, target, first, last)

    _over_groups(work, scales.numel() // 2)


def pack_nonzero(flat: Tensor, value: float) -> tuple[Tensor, Tensor]:
    if flat.dtype not in READABLE:
        return _bits.pack_nonzero(flat, value)
    from squeezebox.codecs._cpu import _flag_loops

    groups = _bits.group_count(flat.numel())
    codes, wanted = _codes(groups, 1), rounded(value, flat.dtype)
    source, packed = array(flat), codes.numpy()

    def work(first: int, last: int) -> int:
        others: int = _flag_loops.pack_nonzero(source, wanted, *block(flat.dtype), packed, first, last)
        return others

    return codes, torch.tensor(sum(_over_groups(work, groups)) == 0)


def pack_positive(flat: Tensor) -> Tensor:
    if flat.dtype not in READABLE:
        return _bits.pack_positive(flat)
    from squeezebox.codecs._cpu import _flag_loops

    groups = _bits.group_count(flat.numel())
    codes = _codes(groups, 1)
    source, packed = array(flat), codes.numpy()
    _over_groups(
        lambda first, last: _flag_loops.pack_positive(source, *block(flat.dtype), packed, first, last),
        groups,
    )
    return codes


def pack_between(flat: Tensor, lower: float, upper: float, inclusive: bool) -> Tensor:
    if flat.dtype not in READABLE:
        return _bits.pack_between(flat, lower, upper, inclusive)
    from squeezebox.codecs._cpu import _flag_loops

    groups = _bits.group_count(flat.numel())
    codes, edges = _codes(groups, 1), (rounded(lower, flat.dtype), rounded(upper, flat.dtype))
    source, packed = array(flat), codes.numpy()

    def work(first: int, last: int) -> None:
        scratch = block(flat.dtype)
        _flag_loops.pack_between(source, *edges, inclusive, *scratch, packed, first, last)

    _over_groups(work, groups)
    return codes


def unpack_bits(packed: Tensor, zero: float, one: float, out: Tensor) -> None:
    from squeezebox.codecs._cpu import _flag_loops

    pair = torch.tensor([zero, one], dtype=torch.float64).to(out.dtype)
    low, high = patterns(pair)
    bits, target = packed.numpy(), patterns(out)
    _over_groups(
        lambda first, last: _flag_loops.unpack_bits(bits, low, high, target, first, last),
        packed.numel() // 32,
    )


def pack_codes(codes: Tensor, bits: int) -> Tensor:
    from squeezebox.codecs._cpu import _flag_loops

    groups = _bits.group_count(codes.numel())
    packed = _codes(groups, bits)
    source, target = codes.numpy(), packed.numpy()
    _over_groups(
        lambda first, last: _flag_loops.pack_codes(source, bits, target, first, last), groups
    )
    return packed


def unpack_codes(packed: Tensor, bits: int, numel: int) -> Tensor:
    from squeezebox.codecs._cpu import _flag_loops

    codes = torch.empty(numel, dtype=torch.uint8)
    source, target = packed.numpy(), codes.numpy()
    _over_groups(
        lambda first, last: _flag_loops.unpack_codes(source, bits, target, first, last),
        _bits.group_count(numel),
    )
    return codes


def pack_offsets(indices: Tensor, base: Tensor, places: Tensor, inner: int) -> tuple[Tensor, Tensor]:
    from squeezebox.codecs._cpu import _flag_loops

    codes = torch.empty(indices.numel(), dtype=torch.uint8)
    arrays = indices.numpy(), base.numpy(), places.numpy(), inner, codes.numpy()
    planes = indices.numel() // (base.numel() * inner)

    def work(first: int, last: int) -> int:
        missing: int = _flag_loops.pack_offsets(*arrays, first, last)
        return missing

    missing = sum(_over_groups(work, planes, _least_planes(base, inner)))
    return codes, torch.tensor(missing == 0)


def unpack_offsets(codes: Tensor, base: Tensor, places: Tensor, inner: int, out: Tensor) -> None:
    from squeezebox.codecs._cpu import _flag_loops

    arrays = codes.numpy(), base.numpy(), places.numpy(), inner, out.numpy()
    planes = codes.numel() // max(1, base.numel() * inner)
    _over_groups(
        lambda first, last: _flag_loops.unpack_offsets(*arrays, first, last),
        planes,
        _least_planes(base, inner),
    )


def _least_planes(base: Tensor, inner: int) -> int:
    return -(-LEAST_GROUPS * 256 // max(1, base.numel() * inner))

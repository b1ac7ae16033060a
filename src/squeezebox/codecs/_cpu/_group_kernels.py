"""Groups of 256 on the CPU: flags, codes of few bits, pool indices, `zero*`, `minmax*` and optimizer state.

Every function computes what that of the same name in ``_reference`` does. The loops are imported inside, so
that numba is loaded by the first call and not before.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from squeezebox.codecs import _workers
from squeezebox.codecs._codec import FLOATS
from squeezebox.codecs._cpu._arrays import (
    GROUP,
    PIECE,
    fill,
    new_codes,
    new_scales,
    numbers,
    over_groups,
    rounded,
    scalar,
)
from squeezebox.codecs._reference import _groups
from squeezebox.codecs._reference._groups import FLOORS, compute_dtype

_INTEGERS = {4: np.int32, 8: np.int64}


def _between(
    flat: Tensor, lower: float, upper: float, inclusive: bool, compared: torch.dtype, zero: float = 0.0
) -> tuple[Tensor, bool]:
    """Bits of lying in an interval, and whether all others are this zero."""
    from squeezebox.codecs._cpu import _group_loops

    codes = new_codes(_groups.group_count(flat.numel()), 1)
    edges = rounded(lower, compared), rounded(upper, compared)
    other = np.array(zero, type(edges[0])).view(_INTEGERS[edges[0].itemsize])[()]

    def work(own: slice, groups: slice) -> bool:
        values = numbers(flat[own])
        flags = _workers.scratch("flags", values.size, np.uint8)
        whole = _group_loops.between(values, values.view(other.dtype), *edges, inclusive, other, flags)
        _lanes(flags, 1, codes.numpy()[32 * groups.start : 32 * groups.stop])
        return bool(whole)

    return codes, all(over_groups(work, flat.numel()))


def pack_nonzero(flat: Tensor, value: float, negative: bool) -> tuple[Tensor, Tensor]:
    """Bits of ``x == value``, and whether all others are zeros of one sign."""
    if flat.dtype not in FLOATS:
        return _groups.pack_nonzero(flat, value, negative)
    codes, whole = _between(flat, value, value, True, flat.dtype, -0.0 if negative else 0.0)
    return codes, torch.tensor(whole, device="cpu")


def pack_positive(flat: Tensor) -> Tensor:
    """Bits of ``not (x <= 0)``: no x is above NaN."""
    if flat.dtype not in FLOATS:
        return _groups.pack_positive(flat)
    return _between(flat, 0.0, float("nan"), False, flat.dtype)[0]


def pack_between(flat: Tensor, lower: float, upper: float, inclusive: bool) -> Tensor:
    """Bits of lying in an interval."""
    if flat.dtype not in FLOATS:
        return _groups.pack_between(flat, lower, upper, inclusive)
    return _between(flat, lower, upper, inclusive, flat.dtype if inclusive else compute_dtype(flat.dtype))[0]


def unpack_bits(packed: Tensor, zero: float, one: float, out: Tensor) -> None:
    """One of two values for each bit, into ``out``."""
    from squeezebox.codecs._cpu import _group_loops

    if out.dtype == torch.uint8 and (zero, one) == (0.0, 1.0):
        _unpack_codes(packed, 1, out)
        return
    if out.dtype not in FLOATS:
        _groups.unpack_bits(packed, zero, one, out)
        return
    pair = rounded(zero, out.dtype), rounded(one, out.dtype)

    def work(own: slice, groups: slice) -> None:
        flags = _workers.scratch("flags", own.stop - own.start, np.uint8)
        _bytes(packed.numpy()[32 * groups.start : 32 * groups.stop], 1, flags)
        fill(out[own], lambda values: _group_loops.choose(flags, *pair, values))

    over_groups(work, out.numel())


def _space() -> tuple[NDArray[Any], NDArray[Any]]:
    """A group's codes in 64-bit words, and as bytes. numba takes a second and more to compile a view."""
    words = np.empty(GROUP // 8, np.uint64)
    return words, words.view(np.uint8)


def _lanes(codes: NDArray[Any], bits: int, packed: NDArray[Any]) -> None:
    from squeezebox.codecs._cpu import _group_loops

    _group_loops.pack_codes(codes, bits, packed.view(np.uint64), _space())


def _bytes(packed: NDArray[Any], bits: int, codes: NDArray[Any]) -> None:
    from squeezebox.codecs._cpu import _group_loops

    _group_loops.unpack_codes(packed.view(np.uint64), bits, codes, _space())


def pack_codes(codes: Tensor, bits: int) -> Tensor:
    """Bytes to lanes of ``bits`` bits."""
    packed, width = new_codes(_groups.group_count(codes.numel()), bits), 32 * bits
    source, target = codes.numpy(), packed.numpy()
    over_groups(
        lambda own, groups: _lanes(source[own], bits, target[width * groups.start : width * groups.stop]),
        codes.numel(),
    )
    return packed


def unpack_codes(packed: Tensor, bits: int, numel: int) -> Tensor:
    """Lanes of ``bits`` bits to bytes."""
    codes = torch.empty(numel, dtype=torch.uint8, device="cpu")
    _unpack_codes(packed, bits, codes)
    return codes


def _unpack_codes(packed: Tensor, bits: int, codes: Tensor) -> None:
    source, target, width = packed.numpy(), codes.numpy(), 32 * bits
    over_groups(
        lambda own, groups: _bytes(source[width * groups.start : width * groups.stop], bits, target[own]),
        codes.numel(),
    )


def pack_offsets(indices: Tensor, base: Tensor, places: Tensor, inner: int) -> tuple[Tensor, Tensor]:
    """The place of each index in its window, and whether all have one."""
    from squeezebox.codecs._cpu import _group_loops

    codes = torch.empty(indices.numel(), dtype=torch.uint8, device="cpu")
    arrays = indices.numpy(), base.numpy(), places.numpy(), inner, codes.numpy()
    parts = _workers.spans(indices.numel() // (base.numel() * inner), _least_planes(base, inner))
    missing = sum(_workers.run(lambda index: _group_loops.pack_offsets(*arrays, *parts[index]), len(parts)))
    return codes, torch.tensor(missing == 0, device="cpu")


def unpack_offsets(codes: Tensor, base: Tensor, places: Tensor, inner: int, out: Tensor) -> None:
    """Indices of places, into ``out``."""
    from squeezebox.codecs._cpu import _group_loops

    arrays = codes.numpy(), base.numpy(), places.numpy(), inner, out.numpy()
    planes = codes.numel() // max(1, base.numel() * inner)
    parts = _workers.spans(planes, _least_planes(base, inner))
    _workers.run(lambda index: _group_loops.unpack_offsets(*arrays, *parts[index]), len(parts))


def _least_planes(base: Tensor, inner: int) -> int:
    return -(-PIECE * 256 // max(1, base.numel() * inner))


def pack_zero(flat: Tensor, bits: int, stochastic: bool, seed: int) -> tuple[Tensor, Tensor]:
    """Codes and scales of `zero*`."""
    return _pack("pack_zero", 1, flat, bits, stochastic, seed)


def pack_minmax(flat: Tensor, bits: int, stochastic: bool, seed: int) -> tuple[Tensor, Tensor]:
    """Codes and scales of `minmax*`."""
    return _pack("pack_minmax", 2, flat, bits, stochastic, seed)


def _pack(
    loop: str, count: int, flat: Tensor, bits: int, stochastic: bool, seed: int
) -> tuple[Tensor, Tensor]:
    """By the loop of that name, which makes ``count`` scales a group."""
    from squeezebox.codecs._cpu import _group_loops

    groups, kind = _groups.group_count(flat.numel()), scalar(flat.dtype)
    packed, scales = new_codes(groups, bits), new_scales(flat, count * groups)
    target, scale, width, floor = packed.numpy(), scales.numpy(), 32 * bits, kind(FLOORS[flat.dtype])

    def work(own: slice, part: slice) -> None:
        pair = np.empty(2, kind)
        space = np.empty(GROUP, kind), np.empty(GROUP, kind), pair, pair.view(f"int{8 * pair.itemsize}")
        codes = _workers.scratch("codes", (part.stop - part.start) * GROUP, np.uint8)
        here = scale[count * part.start : count * part.stop]
        how = own.start, bits, stochastic, seed, floor, space
        getattr(_group_loops, loop)(numbers(flat[own]), *how, codes, here)
        _lanes(codes, bits, target[width * part.start : width * part.stop])

    over_groups(work, flat.numel())
    return packed, scales


def unpack_zero(codes: Tensor, scales: Tensor, bits: int, stochastic: bool, out: Tensor) -> None:
    """Values of `zero*`, into ``out``."""
    _unpack("unpack_zero", 1, codes, scales, bits, (stochastic,), out)


def unpack_minmax(codes: Tensor, scales: Tensor, bits: int, out: Tensor) -> None:
    """Values of `minmax*`, into ``out``."""
    _unpack("unpack_minmax", 2, codes, scales, bits, (), out)


def _unpack(
    loop: str, count: int, packed: Tensor, scales: Tensor, bits: int, how: tuple[Any, ...], out: Tensor
) -> None:
    from squeezebox.codecs._cpu import _group_loops

    source, scale, width = packed.numpy(), scales.numpy(), 32 * bits
    limit = scalar(out.dtype)(torch.finfo(out.dtype).max)

    def work(own: slice, part: slice) -> None:
        codes = _workers.scratch("codes", (part.stop - part.start) * GROUP, np.uint8)
        _bytes(source[width * part.start : width * part.stop], bits, codes)
        here = scale[count * part.start : count * part.stop]
        fill(out[own], lambda values: getattr(_group_loops, loop)(codes, here, bits, *how, limit, values))

    over_groups(work, out.numel())


_NONE = np.empty(0, np.float32)


def pack_squares(flat: Tensor, key: int, start: int, codes: Tensor, heads: Tensor) -> None:
    """Codes and heads of squares."""
    from squeezebox.codecs._cpu import _state_loops

    source, packed, head = flat.numpy().view(np.int32), codes.numpy(), heads.numpy()
    over_groups(
        lambda own, blocks: _state_loops.pack_squares(
            source[own], key, start + own.start, packed[own], head[blocks]
        ),
        flat.numel(),
    )


def unpack_squares(codes: Tensor, heads: Tensor, out: Tensor) -> None:
    """Squares, into ``out``."""
    from squeezebox.codecs._cpu import _state_loops

    packed, head, target = codes.numpy(), heads.numpy(), out.numpy().view(np.int32)
    over_groups(
        lambda own, blocks: _state_loops.unpack_squares(packed[own], head[blocks], target[own]),
        out.numel(),
    )


def pack_signed(
    flat: Tensor, squares: Tensor | None, key: int, start: int, codes: Tensor, steps: Tensor
) -> None:
    """Codes and steps of signed values."""
    from squeezebox.codecs._cpu import _state_loops

    source, packed, step = flat.numpy(), codes.numpy(), steps.numpy()
    square = _NONE if squares is None else squares.numpy()

    def work(own: slice, blocks: slice) -> None:
        sizes = np.empty(GROUP + 1, np.float32)  # a block's, and then the largest
        how = square[own], key, start + own.start, (sizes, sizes.view(np.int32))
        _state_loops.pack_signed(source[own], *how, packed[own], step[blocks])

    over_groups(work, flat.numel())


def unpack_signed(codes: Tensor, steps: Tensor, squares: Tensor | None, out: Tensor) -> None:
    """Values, into ``out``."""
    from squeezebox.codecs._cpu import _state_loops

    packed, step, target = codes.numpy(), steps.numpy(), out.numpy()
    square = _NONE if squares is None else squares.numpy()
    over_groups(
        lambda own, blocks: _state_loops.unpack_signed(packed[own], step[blocks], square[own], target[own]),
        out.numel(),
    )


def pack_short(flat: Tensor, key: int, start: int, codes: Tensor) -> None:
    """The first 16 bits."""
    from squeezebox.codecs._cpu import _state_loops

    source, packed = flat.numpy().view(np.int32), codes.numpy()
    over_groups(
        lambda own, blocks: _state_loops.pack_short(source[own], key, start + own.start, packed[own]),
        flat.numel(),
    )


def unpack_short(codes: Tensor, out: Tensor) -> None:
    """Values, into ``out``."""
    from squeezebox.codecs._cpu import _state_loops

    packed, target = codes.numpy(), out.numpy().view(np.int32)
    over_groups(lambda own, _: _state_loops.unpack_short(packed[own], target[own]), out.numel())

"""`zero*` and `minmax*` on the CPU: functions compute what those of the same name in ``_reference`` do."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from squeezebox.codecs import _workers
from squeezebox.codecs._cpu._arrays import (
    GROUP,
    fill,
    new_codes,
    new_scales,
    numbers,
    over_groups,
    scalar,
)
from squeezebox.codecs._reference import _bits
from squeezebox.codecs._reference._groups import FLOORS


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
    from squeezebox.codecs._cpu import _flag_loops, _group_loops

    groups, kind = _bits.group_count(flat.numel()), scalar(flat.dtype)
    packed, scales = new_codes(groups, bits), new_scales(flat, count * groups)
    target, scale, width, floor = packed.numpy(), scales.numpy(), 32 * bits, kind(FLOORS[flat.dtype])

    def work(own: slice, part: slice) -> None:
        pair = np.empty(2, kind)
        space = np.empty(GROUP, kind), np.empty(GROUP, kind), pair, pair.view(f"int{8 * pair.itemsize}")
        codes = _workers.scratch("codes", (part.stop - part.start) * GROUP, np.uint8)
        here = scale[count * part.start : count * part.stop]
        how = own.start, bits, stochastic, seed, floor, space
        getattr(_group_loops, loop)(numbers(flat[own]), *how, codes, here)
        _flag_loops.pack_codes(codes, bits, target[width * part.start : width * part.stop])

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
    from squeezebox.codecs._cpu import _flag_loops, _group_loops

    source, scale, width = packed.numpy(), scales.numpy(), 32 * bits
    limit = scalar(out.dtype)(torch.finfo(out.dtype).max)

    def work(own: slice, part: slice) -> None:
        codes = _workers.scratch("codes", (part.stop - part.start) * GROUP, np.uint8)
        _flag_loops.unpack_codes(source[width * part.start : width * part.stop], bits, codes)
        here = scale[count * part.start : count * part.stop]
        fill(out[own], lambda values: getattr(_group_loops, loop)(codes, here, bits, *how, limit, values))

    over_groups(work, out.numel())

"""Compiled CPU loops, one for each operator worth it; numba is imported when the first one runs.

A family is run once on a few numbers, for a dtype: numba compiles its kernels, or finds them on disk.

In: flat CPU tensors. Out: codes equal to the reference's to the bit.
May touch: numba, numpy, torch, the worker threads.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from squeezebox.codecs import _coders
from squeezebox.codecs._cpu import _blocks, _group_kernels, _planes, _quantise

KERNELS: dict[str, Callable[..., Any]] = {
    "pack_zero": _group_kernels.pack_zero,
    "unpack_zero": _group_kernels.unpack_zero,
    "pack_minmax": _group_kernels.pack_minmax,
    "unpack_minmax": _group_kernels.unpack_minmax,
    "pack_nonzero": _group_kernels.pack_nonzero,
    "pack_positive": _group_kernels.pack_positive,
    "pack_between": _group_kernels.pack_between,
    "unpack_bits": _group_kernels.unpack_bits,
    "pack_codes": _group_kernels.pack_codes,
    "unpack_codes": _group_kernels.unpack_codes,
    "pack_offsets": _group_kernels.pack_offsets,
    "unpack_offsets": _group_kernels.unpack_offsets,
    "pack_chunks": _quantise.pack_chunks,
    "unpack_chunks": _quantise.unpack_chunks,
    "pack_blocks": _blocks.pack_blocks,
    "unpack_blocks": _blocks.unpack_blocks,
    "pack_planes": _planes.pack_planes,
    "unpack_planes": _planes.unpack_planes,
    "pack_squares": _group_kernels.pack_squares,
    "unpack_squares": _group_kernels.unpack_squares,
    "pack_signed": _group_kernels.pack_signed,
    "unpack_signed": _group_kernels.unpack_signed,
    "pack_short": _group_kernels.pack_short,
    "unpack_short": _group_kernels.unpack_short,
}

_NUMEL = 4096  # the fewest that Huffman coding takes


def run_values(dtype: torch.dtype) -> None:
    """Kernels of the codecs that hold saved tensors: of flags, indices, `entropy*` and `planes*`."""
    flat = torch.linspace(-1.0, 1.0, _NUMEL, device="cpu").to(dtype)
    _run_flags(flat)
    _run_entropy(flat)
    _run_planes(flat)


def run_groups(dtype: torch.dtype) -> None:
    """Kernels of `zero*` and `minmax*`."""
    flat = torch.linspace(-1.0, 1.0, _NUMEL, device="cpu").to(dtype)
    _group_kernels.unpack_zero(*_group_kernels.pack_zero(flat, 4, False, 0), 4, False, torch.empty_like(flat))
    _group_kernels.unpack_minmax(*_group_kernels.pack_minmax(flat, 4, False, 0), 4, torch.empty_like(flat))


def run_blocks(_: torch.dtype) -> None:
    """Kernels of `blocks`, which see bits alone."""
    flat = torch.linspace(-1.0, 1.0, _NUMEL, device="cpu")
    arena, spill = (torch.zeros(_NUMEL, dtype=torch.int32, device="cpu") for _ in range(2))
    counters = torch.zeros(4, dtype=torch.int64, device="cpu")
    table = _blocks.pack_blocks(flat, 0.1, None, 1, 0, arena, spill, counters, 0)
    _blocks.unpack_blocks(arena, spill, table, 0.1, None, 1, 0, flat)


def run_states(_: torch.dtype) -> None:
    """Kernels of an optimizer's state, which are for float32 alone."""
    flat = torch.linspace(0.0, 1.0, _NUMEL, device="cpu")
    blocks = torch.zeros(_NUMEL // 256, device="cpu")
    squares, heads = flat.to(torch.uint8), blocks.int()
    _group_kernels.pack_squares(flat, 1, 0, squares, heads)
    _group_kernels.unpack_squares(squares, heads, torch.empty_like(flat))
    _group_kernels.pack_signed(flat, flat, 1, 0, flat.to(torch.int8), blocks)
    _group_kernels.unpack_signed(flat.to(torch.int8), blocks, flat, torch.empty_like(flat))
    _group_kernels.pack_short(flat, 1, 0, flat.to(torch.int16))
    _group_kernels.unpack_short(flat.to(torch.int16), torch.empty_like(flat))


def _run_flags(flat: torch.Tensor) -> None:
    bits = _group_kernels.pack_positive(flat)
    _group_kernels.unpack_bits(bits, 0.0, 1.0, torch.empty_like(flat))
    codes = (flat > 0).to(torch.uint8)
    _group_kernels.unpack_codes(_group_kernels.pack_codes(codes, 2), 2, codes.numel())
    base, places = torch.zeros(16, dtype=torch.int64, device="cpu"), torch.arange(2, device="cpu")
    found, _ = _group_kernels.pack_offsets(base, base, places, 1)
    _group_kernels.unpack_offsets(found, base, places, 1, torch.empty_like(base))


def _run_entropy(flat: torch.Tensor) -> None:
    _quantise.extent(flat)
    for width in (8, 16, 32):
        codes = _quantise.quantise(flat, 0.25, 0.25, False, width)
        assert codes is not None  # steps of 0.25 fit in any width
        if width == 8:
            packed = _coders.compress_codes(_quantise.LOOPS.huffman, codes.numpy())
            assert packed is not None
            data = torch.frombuffer(bytearray(packed), dtype=torch.uint8).numpy()
            _coders.decompress_codes(_quantise.LOOPS.huffman, data, codes.numpy())
        _quantise.accumulate(codes, 1)
        _run_steps(flat, codes, width)


def _run_steps(flat: torch.Tensor, codes: torch.Tensor, width: int) -> None:
    if width == 32:
        _quantise.dequantise(codes, 0.25, False, torch.empty_like(flat))
    if flat.dtype != torch.float32:
        return
    steps = torch.ones(1, device="cpu")
    if width < 32:
        _quantise.narrow(flat, 0, flat.numel(), steps, 0, False, width)
        _quantise.widen(codes, 0, flat.numel(), steps, 0, False, torch.empty_like(flat))


def _run_planes(flat: torch.Tensor) -> None:
    heads, data = _planes.pack_planes(flat, 0.1, False, None, 1)
    _planes.unpack_planes(heads, data, 0.1, False, None, 1, torch.empty_like(flat))

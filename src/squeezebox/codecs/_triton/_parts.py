"""What kernels share: roundings, random numbers, codes as ``_reference._groups`` orders them, and launches.

A program works ROWS groups of 256 elements, seen as [ROWS, A, B, C]: the bytes of a group hold the elements
with the same b and c, a after a. For 3 bits B is 2, so that the plane of 1 bit falls out of the same shape.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
import triton
import triton.language as tl


@triton.jit
def rounded(value, DTYPE: tl.constexpr):
    """``value`` in DTYPE."""
    if DTYPE == tl.bfloat16:
        bits = value.to(tl.int32, bitcast=True)
        near = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
        value = tl.where(value == value, near.to(tl.float32, bitcast=True), value)
    return value.to(DTYPE)


@triton.jit
def uniform(index, seed):
    """A number in [0, 1) for each int64 index; of ``seed`` the low 32 bits count."""
    high = (index >> 32).to(tl.uint32)
    hashed = index.to(tl.uint32) * 0x9E3779B1 + seed.to(tl.uint32) + high * 0x632BE5AB
    hashed = hashed ^ (hashed >> 16)
    hashed = hashed * 0x7FEB352D
    hashed = hashed ^ (hashed >> 15)
    hashed = hashed * 0x846CA68B
    hashed = hashed ^ (hashed >> 16)
    return (hashed >> 8).to(tl.float32) * (1.0 / 16777216.0)


PROGRAM_ROWS = 8


@triton.jit
def own_rows(ROWS: tl.constexpr):
    """The groups of this program."""
    return (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)


@triton.jit
def elements(row, A: tl.constexpr, B: tl.constexpr, C: tl.constexpr):
    """Index in memory order of every element of these groups."""
    a = tl.arange(0, A)[None, :, None, None]
    b = tl.arange(0, B)[None, None, :, None]
    c = tl.arange(0, C)[None, None, None, :]
    return row[:, None, None, None] * 256 + (a * B + b) * C + c


@triton.jit
def store_codes(
    packed, code, row, groups, BITS: tl.constexpr, A: tl.constexpr, B: tl.constexpr, C: tl.constexpr
):
    """Write int32 codes [ROWS, A, B, C] below 2^BITS as bytes."""
    a = tl.arange(0, A)[None, :, None, None]
    b = tl.arange(0, B)
    c = tl.arange(0, C)
    whole = row[:, None, None] * (32 * BITS) + b[None, :, None] * C + c[None, None, :]
    if BITS == 3:
        low = tl.sum((code & 3) << (2 * a), axis=1)
        high = tl.sum((code >> 2) << (2 * a + b[None, None, :, None]), axis=1)
        tail = row[:, None] * 96 + 64 + c[None, :]
        tl.store(packed + tail, tl.sum(high, axis=1).to(tl.uint8), mask=row[:, None] < groups)
    else:
        low = tl.sum(code << (BITS * a), axis=1)
    tl.store(packed + whole, low.to(tl.uint8), mask=row[:, None, None] < groups)


@triton.jit
def load_codes(packed, row, groups, BITS: tl.constexpr, A: tl.constexpr, B: tl.constexpr, C: tl.constexpr):
    """The inverse of ``store_codes``."""
    a = tl.arange(0, A)[None, :, None, None]
    b = tl.arange(0, B)[None, None, :, None]
    c = tl.arange(0, C)[None, None, None, :]
    first = row[:, None, None, None]
    low = tl.load(packed + first * (32 * BITS) + b * C + c, mask=first < groups, other=0).to(tl.int32)
    if BITS == 3:
        high = tl.load(packed + first * 96 + 64 + c, mask=first < groups, other=0).to(tl.int32)
        return ((low >> (2 * a)) & 3) | (((high >> (2 * a + b)) & 1) << 2)
    return (low >> (BITS * a)) & ((1 << BITS) - 1)


_BLOCK = 1024
READABLE = frozenset({torch.float32, torch.bfloat16, torch.float16})
# bits -> how a group's 256 elements are seen: see _lanes
SHAPES: Mapping[int, tuple[int, int, int]] = MappingProxyType(
    {1: (8, 1, 32), 2: (4, 1, 64), 3: (4, 2, 32), 4: (2, 1, 128), 8: (1, 1, 256)}
)


def launch(
    kernel: triton.JITFunction, arguments: tuple[Any, ...], groups: int, bits: int, **constants: Any
) -> None:
    """Run over all groups, on the device of the first argument, without fusing roundings away."""
    a, b, c = SHAPES[bits]
    with device_of(arguments[0]):
        kernel[(triton.cdiv(groups, PROGRAM_ROWS),)](
            *arguments, BITS=bits, ROWS=PROGRAM_ROWS, A=a, B=b, C=c, enable_fp_fusion=False, **constants
        )


def spread(kernel: triton.JITFunction, arguments: tuple[Any, ...], numel: int) -> None:
    """Run over all elements, a block a program."""
    with device_of(arguments[0]):
        kernel[(triton.cdiv(numel, _BLOCK),)](*arguments, BLOCK=_BLOCK)


def device_of(tensor: torch.Tensor) -> contextlib.AbstractContextManager[Any]:
    """The tensor's device as the current one: launches go there."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else contextlib.nullcontext()

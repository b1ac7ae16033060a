"""What every launch shares: which dtypes are read, the grid, and the shape of a program's groups."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
import triton

from squeezebox.codecs._triton._lanes import PROGRAM_ROWS

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

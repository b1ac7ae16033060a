"""Tensors as the arrays and scratch the compiled loops take."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from squeezebox.codecs._reference._groups import FLOORS, compute_dtype

# Element dtypes the loops read; the others go through the reference.
READABLE = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.bool, torch.uint8)
TAGS = {torch.bfloat16: torch.uint16, torch.float16: torch.int16, torch.bool: torch.uint8}
PATTERNS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
Space = tuple[NDArray[Any], NDArray[Any], NDArray[Any], NDArray[Any]]


def array(flat: Tensor) -> NDArray[Any]:
    """The tensor's memory; bfloat16 as uint16 and float16 as int16, which is how the loops know them."""
    return flat.detach().view(TAGS.get(flat.dtype, flat.dtype)).numpy()


def patterns(flat: Tensor) -> NDArray[Any]:
    """The tensor's memory as integers of the same size."""
    return flat.detach().view(PATTERNS[flat.element_size()]).numpy()


def scalar(dtype: torch.dtype) -> type[np.float32] | type[np.float64]:
    """The type the loops compute in for elements of this dtype."""
    return np.float64 if dtype == torch.float64 else np.float32


def block(dtype: torch.dtype, size: int = 256) -> tuple[NDArray[Any], NDArray[Any]]:
    """Scratch for ``size`` elements, and its integer view."""
    kind = scalar(dtype)
    values = np.empty(size, kind)
    return values, values.view(np.int64 if kind is np.float64 else np.int32)


def space(dtype: torch.dtype) -> Space:
    """Scratch of the group loops: values, their integer view, noise, codes."""
    values, integers = block(dtype)
    return values, integers, np.empty_like(values), np.empty(256, np.uint8)


def floor(dtype: torch.dtype) -> Any:
    """The smallest scale, in the type the loops compute in."""
    return scalar(dtype)(FLOORS[dtype])


def largest(dtype: torch.dtype) -> Any:
    """The largest value of this dtype, in the type the loops compute in."""
    return scalar(dtype)(torch.finfo(dtype).max)


def rounded(value: float, dtype: torch.dtype) -> Any:
    """A scalar as a comparison with a tensor of this dtype sees it, in the type the loops compute in."""
    if not dtype.is_floating_point:
        return np.float32(value)
    return scalar(dtype)(torch.tensor(value, dtype=torch.float64, device="cpu").to(dtype).item())


def new_scales(flat: Tensor, count: int) -> Tensor:
    """Room for ``count`` scales."""
    return torch.empty(count, dtype=compute_dtype(flat.dtype), device="cpu")

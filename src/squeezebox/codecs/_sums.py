"""What bounds are measured by: sums over a tensor's elements, in a dtype wide enough, whatever its layout."""

from __future__ import annotations

import math

import torch
from torch import Tensor

_COMPRESSED = (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)


def energy(tensor: Tensor) -> float:
    """Squared L2 norm; infinite where that is beyond a float."""
    return sum((norm := _norm(part, 2)) * norm for part in _parts(tensor))


def mean_abs(tensor: Tensor) -> float:
    """Mean absolute value; 0 of a tensor without elements."""
    return sum(_norm(part, 1) for part in _parts(tensor)) / max(_numel(tensor), 1)


def mean(tensor: Tensor) -> float:
    """Mean value of a dense real tensor; 0 of one without elements."""
    return float(tensor.sum(dtype=_wide(tensor.dtype))) / max(tensor.numel(), 1)


def unit(tensor: Tensor, *, dense: bool) -> float:
    """Root mean square of a real tensor's non-zero elements; the deviation where zeros carry no meaning."""
    if tensor.numel() == 0:
        return 0.0
    if dense:
        return float(tensor.std(correction=0))
    count = int(torch.count_nonzero(tensor))
    return _norm(tensor, 2) / math.sqrt(count) if count else 0.0


def _norm(part: Tensor, order: int) -> float:
    return float(torch.linalg.vector_norm(part, ord=order, dtype=_wide(part.dtype)))


def _wide(dtype: torch.dtype) -> torch.dtype:
    if dtype.is_complex:
        return torch.complex128 if dtype == torch.complex128 else torch.complex64
    return torch.float64 if dtype == torch.float64 else torch.float32


def _parts(tensor: Tensor) -> list[Tensor]:
    """Dense tensors that together have its elements, apart from zeros."""
    if tensor.is_nested:
        return list(tensor.unbind())
    if tensor.layout == torch.sparse_coo:
        return [tensor.coalesce().values()]
    if tensor.layout in _COMPRESSED:
        return [tensor.values()]
    return [tensor if tensor.layout == torch.strided else tensor.to_dense()]


def _numel(tensor: Tensor) -> int:
    return sum(part.numel() for part in tensor.unbind()) if tensor.is_nested else tensor.numel()

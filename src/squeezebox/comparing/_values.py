"""How far two values are apart: tensors, arrays, pictures and numbers."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch


@dataclass(frozen=True, slots=True)
class Difference:
    """Of two values, with their dtypes' roundings; infinite where ``why`` they cannot be compared."""

    size: float = 0.0
    eps: float = 0.0
    other_eps: float = 0.0
    why: str = ""


def copied(leaf: Any) -> Any:
    """Numbers that in-place operators on the original do not change; anything else as it is."""
    if isinstance(leaf, torch.Tensor):
        return leaf.detach().clone()
    return copy.deepcopy(leaf) if hasattr(leaf, "__array_interface__") else leaf


def difference(expected: Sequence[Any], found: Sequence[Any]) -> Difference:
    """The largest of pairs of values: max |a - b| / (|a| + rms(a)) over elements."""
    if len(expected) != len(found):
        return Difference(math.inf, why=f"{len(expected)} values and {len(found)}")
    pairs = [_between(as_tensor(one), as_tensor(other)) for one, other in zip(expected, found, strict=True)]
    return max(pairs, key=lambda each: each.size, default=Difference())


def energy_between(expected: Sequence[Any], found: Sequence[Any]) -> float:
    """The squared norm of the difference; infinite where shapes are unlike."""
    pairs = [(as_tensor(one), as_tensor(other)) for one, other in zip(expected, found, strict=False)]
    tensors = [(_wide(one), _wide(other)) for one, other in pairs if one is not None and other is not None]
    if len(expected) != len(found) or any(a.shape != b.shape for a, b in tensors):
        return math.inf
    return sum(float((a - b.to(a.device)).square().sum()) for a, b in tensors)


def as_tensor(leaf: Any) -> torch.Tensor | None:
    """None of what has no numbers."""
    if isinstance(leaf, torch.Tensor):
        return leaf.detach()
    if isinstance(leaf, (bool, int, float)):
        return torch.tensor(leaf, dtype=torch.float64)
    if hasattr(leaf, "__array_interface__") or isinstance(leaf, np.generic):  # numpy's, and pictures of PIL
        array = np.array(leaf)
        return torch.from_numpy(array) if array.dtype.kind in "biufc" else None
    return None


def _between(one: torch.Tensor | None, other: torch.Tensor | None) -> Difference:
    if one is None or other is None:
        return Difference(0.0 if one is other else math.inf, why="" if one is other else "unlike kinds")
    eps, other_eps = (torch.finfo(t.dtype).eps if t.is_floating_point() else 0.0 for t in (one, other))
    if one.shape != other.shape:
        return Difference(math.inf, eps, other_eps, f"shapes {list(one.shape)} and {list(other.shape)}")
    a, b = _dense(one), _dense(other)
    if a.dtype == b.dtype and a.device == b.device and torch.equal(a, b):
        return Difference(0.0, eps, other_eps)
    a, b = _wide(a), _wide(b).to(a.device)
    unlike = (a != b) & ~(a.isnan() & b.isnan())
    if not unlike.any():
        return Difference(0.0, eps, other_eps)
    if not bool((a.isfinite() & b.isfinite())[unlike].all()):
        return Difference(math.inf, eps, other_eps, "NaN or infinity in one alone")
    finite = a[a.isfinite()]
    scale = a[unlike].abs() + finite.square().mean().sqrt()
    size = float(((a[unlike] - b[unlike]).abs() / scale).max())
    return Difference(size, eps, other_eps, "" if math.isfinite(size) else "zeros in one alone")


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    """Strided, whatever layout a sparse or quantised one has."""
    dense = tensor.dequantize() if tensor.is_quantized else tensor
    return dense.to_dense() if dense.layout is not torch.strided else dense


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    """In float64, complex numbers as pairs, and dense."""
    dense = _dense(tensor)
    return torch.view_as_real(dense).double() if dense.is_complex() else dense.double()

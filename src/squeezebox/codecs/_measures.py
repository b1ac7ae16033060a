"""What is asked of a tensor before it is packed: sums of its elements, and the largest of them."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from squeezebox.schema import OptionError

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


_FEW = 1 << 14  # elements up to which sorting them all is as fast
_SPARSE = 1e-2  # share of elements up to which delegates win, and
_MIDDLE = 3e-2  # up to which partitioning does, on a CPU
_NUMPY = (torch.float32, torch.float64, torch.int32, torch.int64)


class LargestElements(NamedTuple):
    """Values (k,), largest first, and their places (k,), int64; of equal ones the lower place comes first."""

    values: Tensor
    indices: Tensor


def largest(tensor: Tensor, k: int) -> LargestElements:
    """The ``k`` largest elements of a 1-D tensor, exactly: as ``torch.topk``, with ties decided.

    Where equal elements compete, the one at the lowest place is taken. NaN counts as larger than all others,
    as in torch, and -0.0 equals 0.0.

    Each subrange of 2^a elements sends its maximum, its delegate, with a = (log2 n - log2 k + 3) / 2 as in
    the paper's equation for the least work. Only subranges whose delegate reaches the k-th delegate can have
    an element among the k largest, so the others are not looked at again.

    Args:
        tensor: floating-point or integer, any device and strides.
        k: from 0 to the number of elements.

    Raises:
        OptionError: k is out of range, or the tensor has another form.
    """
    if tensor.dim() != 1 or tensor.is_complex() or tensor.dtype == torch.bool:
        raise OptionError(
            f"largest takes a 1-D tensor of real numbers, got {tensor.dim()}-D {tensor.dtype}; flatten it, "
            "or take its absolute values."
        )
    numel = tensor.numel()
    if not 0 <= k <= numel:
        raise OptionError(f"largest was asked for {k} of {numel} elements; k must be from 0 to {numel}.")
    flat = tensor.detach().contiguous()
    if k == 0 or numel <= _FEW:
        return _sorted(flat, k)
    found = _by_delegates(flat, k) if k <= _SPARSE * numel else _by_partition(flat, k)
    return _sorted(flat, k) if found is None else found  # NaN has no order


def _sorted(flat: Tensor, k: int) -> LargestElements:
    values, places = torch.sort(flat, descending=True, stable=True)
    return LargestElements(values[:k].clone(), places[:k].clone())


def _by_delegates(flat: Tensor, k: int) -> LargestElements | None:
    """None where there is NaN."""
    numel = flat.numel()
    size = 1 << max(2, min(16, int((math.log2(numel) - math.log2(k) + 3.0) / 2.0)))
    rows = flat[: numel // size * size].view(-1, size)
    delegates = rows.amax(1)
    rest = flat[rows.numel() :]
    if bool(delegates.isnan().any()) or bool(rest.isnan().any()):
        return None
    least = _kth(delegates, k)
    chosen = (delegates >= least).nonzero().flatten()
    row, column = (rows[chosen] >= least).nonzero(as_tuple=True)
    tail = (rest >= least).nonzero().flatten() + rows.numel()
    return _select(flat, torch.cat([chosen[row] * size + column, tail]), k)


def _by_partition(flat: Tensor, k: int) -> LargestElements | None:
    """None where there is NaN."""
    if bool(flat.isnan().any()):
        return None
    is_middle = k <= _MIDDLE * flat.numel() and flat.dtype in _NUMPY and flat.device.type == "cpu"
    if is_middle:
        place = flat.numel() - k
        least = torch.from_numpy(np.partition(flat.numpy(), place)[place : place + 1])
    else:
        least = _kth(flat, k)
    return _select(flat, (flat >= least).nonzero().flatten(), k)


def _kth(values: Tensor, k: int) -> Tensor:
    """The k-th largest one."""
    return torch.topk(values, k, sorted=False).values.min()


def _select(flat: Tensor, places: Tensor, k: int) -> LargestElements:
    """The k largest of those at these places, which are in order; all of the k largest are among them."""
    values = flat[places]
    if places.numel() > 2 * k:  # ties, or a delegate's neighbours: sort only what is taken
        least = _kth(values, k)
        above = (values > least).nonzero().flatten()
        equal = (values == least).nonzero().flatten()[: k - above.numel()]
        taken = torch.cat([above, equal]).sort().values
        values, places = values[taken], places[taken]
    ordered, order = torch.sort(values, descending=True, stable=True)
    return LargestElements(ordered[:k].clone(), places[order[:k]])

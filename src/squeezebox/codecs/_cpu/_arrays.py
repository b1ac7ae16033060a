"""Tensors as what the compiled loops take, piece by piece over the worker threads.

Loops compute in float32, or in float64 for float64 tensors. numba knows neither bfloat16 nor float16: torch
converts their pieces, in this thread's scratch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from squeezebox.codecs import _workers
from squeezebox.codecs._reference._groups import compute_dtype

Result = TypeVar("Result")
GROUP = 256
WIDE = (torch.float32, torch.float64)
PIECE = 1024  # groups: fewer are not worth a thread, and more do not stay in the cache until they are packed
_GRAIN = 1 << 15  # torch copies that number of elements on the thread that asks


def scalar(dtype: torch.dtype) -> type[np.float32] | type[np.float64]:
    """The type the loops compute in for elements of this dtype."""
    return np.float64 if dtype == torch.float64 else np.float32


def rounded(value: float, dtype: torch.dtype) -> Any:
    """A scalar as a comparison with a tensor of this dtype sees it, in the type the loops compute in."""
    return scalar(dtype)(torch.tensor(value, dtype=torch.float64, device="cpu").to(dtype).item())


def new_scales(flat: Tensor, count: int) -> Tensor:
    """Room for ``count`` scales."""
    return torch.empty(count, dtype=compute_dtype(flat.dtype), device="cpu")


def new_codes(groups: int, bits: int) -> Tensor:
    """Room for the codes of this many groups."""
    return torch.empty(groups * 32 * bits, dtype=torch.uint8, device="cpu")


def numbers(piece: Tensor) -> NDArray[Any]:
    """A flat piece's elements to compute with: themselves, or a copy that lasts until the next call."""
    if piece.dtype in WIDE:
        return piece.detach().numpy()
    room: NDArray[Any] = _workers.scratch("numbers", piece.numel(), np.float32)
    _copy(torch.from_numpy(room), piece)
    return room


def fill(piece: Tensor, work: Callable[[NDArray[Any]], Result]) -> Result:
    """Have ``work`` make a flat piece's elements, which are rounded to its dtype."""
    if piece.dtype in WIDE:
        return work(piece.detach().numpy())
    room = _workers.scratch("numbers", piece.numel(), np.float32)
    result = work(room)
    _copy(piece, torch.from_numpy(room))
    return result


def _copy(target: Tensor, source: Tensor) -> None:
    for here, there in zip(target.split(_GRAIN), source.split(_GRAIN), strict=True):
        here.copy_(there)


def over_groups(work: Callable[[slice, slice], Result], numel: int) -> list[Result]:
    """``work(elements, groups)`` for runs of groups of 256 that together make ``numel`` elements."""
    groups = -(-numel // GROUP)
    size = min(max(groups, 1), PIECE)

    def one(index: int) -> Result:
        first, last = index * size, min((index + 1) * size, groups)
        return work(slice(first * GROUP, min(last * GROUP, numel)), slice(first, last))

    return _workers.run(one, -(-groups // size))

"""The dense tensors that hold a tensor's bytes, whatever its layout."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from squeezebox.memory._absent import Absent
from squeezebox.memory._moved_weight import MovedWeight

_BY_ROWS, _BY_COLUMNS = (torch.sparse_csr, torch.sparse_bsr), (torch.sparse_csc, torch.sparse_bsc)


def parts_of(tensor: Tensor) -> Iterator[Tensor]:
    """The tensor itself; of a sparse one its indices and values; of one held otherwise what is in memory."""
    if isinstance(tensor, MovedWeight):
        yield from parts_of(tensor.lender.stand_in)
    elif isinstance(tensor, Absent):
        yield from tensor.parts()
    elif tensor.layout == torch.sparse_coo:
        yield tensor._indices()
        yield tensor._values()
    elif tensor.layout in _BY_ROWS:
        yield from (tensor.crow_indices(), tensor.col_indices(), tensor.values())
    elif tensor.layout in _BY_COLUMNS:
        yield from (tensor.ccol_indices(), tensor.row_indices(), tensor.values())
    else:
        yield tensor

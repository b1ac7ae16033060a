"""Max-pool indices as offsets inside their window."""

from __future__ import annotations

import torch
from torch import Tensor


def pack_offsets(indices: Tensor, base: Tensor, places: Tensor, inner: int) -> tuple[Tensor, Tensor]:
    """The place k with ``index - base[position] == places[k]`` for each element, and whether all have one.

    Elements run as [outer, position, inner] in memory order.
    """
    offset = (indices.view(-1, base.numel(), inner) - base[:, None]).reshape(-1)
    codes = torch.zeros(offset.numel(), dtype=torch.uint8, device=offset.device)
    found = torch.zeros_like(offset, dtype=torch.bool)
    for code in range(places.numel()):
        hit = offset == places[code]
        codes[hit] = code
        found |= hit
    return codes, found.all()


def unpack_offsets(codes: Tensor, base: Tensor, places: Tensor, inner: int, out: Tensor) -> None:
    """The inverse of ``pack_offsets``, into ``out``."""
    offset = places[codes.long()].view(-1, base.numel(), inner)
    out.copy_((offset + base[:, None]).reshape(-1))

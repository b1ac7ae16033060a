"""What every codec hands out and takes back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Packed:
    """One packed tensor: everything needed to decode it, and the error it guarantees.

    ``|x - unpack(packed)| <= bound`` for every element (0.0: exact to the bit; infinity: only what the
    codec names is kept, such as the sign). ``meta`` holds the codec's scalars; docs/formats.md lists them.
    """

    codec: str
    version: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    bound: float
    payload: tuple[torch.Tensor, ...]
    meta: Mapping[str, int | float] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Bytes really held: codes, scales and tables."""
        return sum(part.numel() * part.element_size() for part in self.payload)

    @property
    def numel(self) -> int:
        """Elements of the tensor that was packed."""
        count = 1
        for size in self.shape:
            count *= size
        return count

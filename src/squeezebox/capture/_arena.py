"""Reused buffers to decode into: fresh pages, not arithmetic, bound decoding on a CPU."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch


@dataclass(slots=True, eq=False)
class _Buffer:
    data: torch.Tensor
    owner: weakref.ref[object]

    def is_idle(self) -> bool:
        storage = self.data.untyped_storage()
        # One use is the buffer's own tensor, one the storage object made on the line above.
        return torch._C._storage_Use_Count(storage._cdata) <= 2


class Arena:
    """Hands out flat CPU buffers and takes them back once nothing else refers to their storage.

    At most one idle buffer outlives a request, so that reuse does not raise the step's peak. A buffer whose
    contents were decoded for the same owner is handed out again as it is.
    """

    def __init__(self) -> None:
        self._buffers: list[_Buffer] = []

    def filled(
        self, owner: object, numel: int, dtype: torch.dtype, fill: Callable[[torch.Tensor], object]
    ) -> torch.Tensor:
        """A flat buffer that ``fill`` has filled for ``owner``, now or before; others that are idle go."""
        for found in self._buffers:
            if found.owner() is owner:
                self._buffers = [each for each in self._buffers if each is found or not each.is_idle()]
                return found.data.view(dtype)
        flat = self._take(numel * dtype.itemsize, owner).view(dtype)
        fill(flat)
        return flat

    def _take(self, nbytes: int, owner: object) -> torch.Tensor:
        """A uint8 buffer of ``nbytes``, from now on labelled with ``owner``."""
        idle = [buffer for buffer in self._buffers if buffer.is_idle()]
        chosen = next((b for b in idle if b.data.numel() == nbytes), None)
        self._buffers = [b for b in self._buffers if b is chosen or b not in idle]
        idle.clear()
        if chosen is None:
            chosen = _Buffer(torch.empty(0, dtype=torch.uint8, device="cpu"), weakref.ref(owner))
            chosen.data = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
            self._buffers.append(chosen)
        chosen.owner = weakref.ref(owner)
        return chosen.data

    def owners(self) -> Iterator[object]:
        """Those whose bytes some buffer holds."""
        return (owner for buffer in self._buffers if (owner := buffer.owner()) is not None)

    def trim(self) -> None:
        """Let go of the buffers that nobody uses."""
        self._buffers = [buffer for buffer in self._buffers if not buffer.is_idle()]

    def clear(self) -> None:
        """Forget every buffer; those still in use live on with their users."""
        self._buffers.clear()

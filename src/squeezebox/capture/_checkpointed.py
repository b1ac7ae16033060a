"""A model's own checkpointing: what its regions save comes back in backward, however little else is held."""

from __future__ import annotations

import sys
from typing import Any

from torch.utils import checkpoint

from squeezebox.capture._contracts import Choice
from squeezebox.capture._entries import Row
from squeezebox.capture._graph import tensors_of

_DEPTH = 3  # Python frames from its own, through autograd's, to the pack hook


class Regions:
    """The checkpointed regions of a step, and what may be held exactly behind the last of them.

    Backward lets go of what was saved behind the last region, then makes that region again. As many bytes as
    the region makes are free for it: packing them would cost noise and win no peak. Which region is the last
    is known from the step before.
    """

    def __init__(self) -> None:
        self.known = 0  # how many tensors regions saved in the last step
        self._count = 0
        self._made = self._largest = self._spared = 0
        self._within = False

    @property
    def latest(self) -> int:
        """What the step that follows is to know."""
        return self._count or self.known

    def start_step(self) -> None:
        """Start counting again; a step in which no region saved anything says nothing."""
        self.known = self.latest
        self._count = 0
        self._made = self._largest = self._spared = 0
        self._within = False

    def ran(self, out: Any) -> None:
        """An operator has run of which nothing is saved here."""
        own = (tensor for tensor in tensors_of(out) if tensor._base is None)
        self._made += sum(tensor.numel() * tensor.element_size() for tensor in own)

    def saving(self) -> None:
        """Autograd saves a tensor here: between two regions, or as the input of one."""
        found = _is_checkpoints()
        if found or self._within:
            self._largest = max(self._largest, self._made)
        self._made, self._within = 0, found
        self._count += found

    def spares(self, row: Row, choice: Choice) -> bool:
        """Whether a tensor that may lose something is to be held exactly; notes it if so."""
        if choice.bound is None or self._count == 0 or self._count != self.known:
            return False
        if self._spared + row.saved_bytes > self._largest:
            return False
        self._spared += row.saved_bytes
        row.exact = True
        return True


def _is_checkpoints() -> bool:
    """Whether it is torch.utils.checkpoint that saves the tensor which is packed now."""
    frame = sys._getframe(3)  # of saving(), of the pack hook
    for _ in range(_DEPTH):
        if frame.f_code.co_filename == checkpoint.__file__:
            return True
        if frame.f_back is None:
            return False
        frame = frame.f_back
    return False

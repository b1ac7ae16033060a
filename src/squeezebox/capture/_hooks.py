"""The saved-tensor hooks, and a model's own checkpointing, whose regions save by hooks of their own."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.graph import Node, saved_tensors_hooks
from torch.utils import checkpoint

from squeezebox.capture._entries import Handle, Row
from squeezebox.capture._overwrites import Stamp, attribute_of, overwritten, stamp
from squeezebox.capture._packer import Choice
from squeezebox.capture._path import ModulePath
from squeezebox.capture._readings import in_backward, saved_attributes, tensors_of
from squeezebox.capture._store import Store
from squeezebox.schema import CaptureError

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


class Hooks:
    """Hands autograd a :class:`Handle` for every tensor it saves.

    Handles wait in ``pending`` until somebody settles them. Small ones hold their tensors themselves; they
    are counted all the same, so that keys do not depend on sizes.
    """

    def __init__(
        self,
        store: Store,
        path: ModulePath,
        regions: Regions,
        is_borrowed: Callable[[torch.Tensor], bool],
    ) -> None:
        self.bypass = False
        self.checks = False  # whether to look for saved tensors that are overwritten
        self.backward_seen = False  # of the running step,
        self.overlapping = False  # or of any
        self.last_read = ""  # key of the tensor that backward asked for last
        self.pending: dict[Handle, None] = {}  # in order
        self.pack = self._pack  # the one object that says whose hooks are active
        self._store, self._path, self._regions = store, path, regions
        self._is_borrowed = is_borrowed
        self._reading: list[Handle] | None = None
        self._task = -1  # the last backward

    def around(self) -> saved_tensors_hooks:
        """A context in which they are active."""
        return saved_tensors_hooks(self.pack, self._unpack)

    @property
    def innermost(self) -> bool:
        """Whether what is saved now comes here."""
        top = torch._C._autograd._top_saved_tensors_default_hooks(False)
        return top is not None and top[0] is self.pack

    def readers(self, node: Node) -> list[tuple[str, Handle]]:
        """The handles that a node saved, by attribute."""
        attributes = saved_attributes(type(node))
        return [(attribute, handle) for attribute in attributes for handle in self._read(node, attribute)]

    def clear(self) -> None:
        """Forget the handles that wait: a tensor with its graph would hold itself by them."""
        for each in self.pending:
            each.tensor = None if each.tensor is None else each.tensor.detach()
        self.pending.clear()

    def _pack(self, tensor: torch.Tensor) -> Handle:
        for each in self._store.onlookers:
            each.holding()
        if self._store.spares is not None:
            self._regions.saving()
        handle = self._store.handle(tensor)
        if self.checks:
            handle.stamp = stamp(tensor, self._path.current)
        if self._store.leave_to_lender(handle):
            pass
        elif self.bypass or self._is_borrowed(tensor):
            self._store.leave(handle, borrowed=not self.bypass)
        else:
            handle.is_pending = tensor.untyped_storage().nbytes() >= self._store.small_bytes
            if not handle.is_pending:
                self._store.leave(handle, borrowed=False)
            self.pending[handle] = None
        for each in self._store.onlookers:
            each.held()
        return handle

    def _unpack(self, handle: Handle) -> torch.Tensor:
        if self._reading is not None:
            self._reading.append(handle)
            return handle.tensor if handle.tensor is not None else torch.empty(0, device="cpu")
        if in_backward():
            self._note_backward(handle)
        if handle.entry is not None:
            self.last_read = handle.entry.row.key
        tensor = self._store.unpack(handle)
        if handle.stamp is not None and handle.tensor is not None and handle.override is None:
            self._check(handle, handle.stamp, tensor)
        return tensor

    def _note_backward(self, handle: Handle) -> None:
        self.backward_seen |= self.overlapping or not handle.step.is_over
        task = torch._C._current_graph_task_id()
        if task != self._task:  # what it unpacks last is not to stay
            self._task = task
            torch.autograd.Variable._execution_engine.queue_callback(self._store.arena.clear)

    def _check(self, handle: Handle, mark: Stamp, tensor: torch.Tensor) -> None:
        found = overwritten(mark, tensor, lambda: attribute_of(handle, self._read))
        if found is not None:
            raise CaptureError(str(found))

    def _read(self, node: Any, attribute: str) -> list[Handle]:
        self._reading = []
        try:
            getattr(node, f"_saved_{attribute}")
        finally:
            found, self._reading = self._reading, None
        return found

"""Saved storages and what is held instead of them: each packed once, however many views or savers."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from squeezebox.capture._device import DeviceBlocks
from squeezebox.capture._entries import (
    Entry,
    Handle,
    Row,
    Step,
    geometry_of,
    held_exactly,
    is_plain,
    plain_parts,
)
from squeezebox.capture._held import Held, Kept, Recomputed, derived, unpacked
from squeezebox.capture._layouts import is_default
from squeezebox.capture._lineage import Call, Lineage
from squeezebox.capture._onlooker import ignored
from squeezebox.capture._packer import Means, Packer, Packing, Policy, waiting
from squeezebox.capture._rules import Rule
from squeezebox.memory import CudaStreams, Reserve, Staging
from squeezebox.schema import Role

SMALL_BYTES = 4096  # below this a packed object's own overhead eats the saving


class Store(Means):
    """The table of living entries, and packing and unpacking through it."""

    def __init__(
        self,
        policy: Policy,
        packer: Callable[[Means], Packing] = Packer,
        parts: Callable[[torch.Tensor], Iterable[torch.Tensor]] = plain_parts,
    ) -> None:
        super().__init__(policy)
        self.small_bytes = SMALL_BYTES
        self.lineage: Lineage | None = None
        # raises for a key and bytes that no plan knows, unless they follow from values
        self.admit: Callable[[str, int, bool], None] | None = None
        self.rows: list[Row] = []
        self.packed_bytes = 0  # of all rows
        self.borrowed: dict[int, int] = {}
        self.small: dict[int, int] = {}
        self.small_keys: dict[str, int] = {}
        self.was_in_use = False  # when this step began, the one before was still to be unpacked
        self._packer, self._parts = packer(self), parts
        self._entries: weakref.WeakValueDictionary[int, Entry] = weakref.WeakValueDictionary()
        self._noted: dict[StorageWeakRef, tuple[int, torch.dtype]] = {}  # small ones' versions and dtypes
        self._step = weakref.ref(Step())  # dead at once: no step is running

    def use_device(self, device: torch.device) -> None:
        """From now on tensors are on a device that the host does not wait for."""
        self.blocks, self.staging = DeviceBlocks(device), Staging(CudaStreams(device), spill=self.spill)

    def use_arena(self) -> None:
        """From now on packed tensors, or a device's on the host, have an arena in the host's memory."""
        self.reserve = Reserve() if self.staging is None else self.staging.use_arena()

    @property
    def notes(self) -> tuple[str, ...]:
        """What the report is to say: which tensors are held exactly, and of a device's arena."""
        steps = self.unready_steps + self.unready
        waited = f"{steps} step{'s' * (steps > 1)} held tensors exactly, while kernels were being compiled"
        of_blocks = self.blocks.notes if self.blocks is not None else ()
        return (*held_exactly(self.refused), *((waited,) if steps else ()), *of_blocks)

    @property
    def places(self) -> Mapping[str, int]:
        """Bytes of the arena's places."""
        return {} if self.reserve is None else self.reserve.places

    def plan_arena(self, packed: Mapping[str, int], moved: Sequence[int]) -> None:
        """Lay the arena out: bytes of packed tensors by key, and of those moved, as they come."""
        if self.reserve is None:
            return
        if self.staging is None:
            self.reserve.plan(packed)
        else:
            self.staging.plan(moved)

    def handle(self, tensor: torch.Tensor) -> Handle:
        """A new handle, of the running step."""
        step = self._step()
        if step is None:
            step = Step()
            self._step = weakref.ref(step)
        return Handle(step, tensor, geometry_of(tensor), tensor._version)

    @property
    def in_use(self) -> bool:
        """Whether autograd still holds a handle of the running step."""
        return self._step() is not None

    def start_step(self) -> None:
        """Begin a new list of rows; entries of an unfinished backward stay valid."""
        if (last := self._step()) is not None:
            last.is_over = True
        self.was_in_use, self._step = last is not None, weakref.ref(Step())  # dead at once
        self.unready_steps, self.unready = self.unready_steps + self.unready, False
        self.rows, self.packed_bytes = [], 0
        self.borrowed = {}
        self.small = {}
        self.small_keys = {}
        self._noted = {}
        self.follows_values = False
        self.clear()

    def start_places(self, *, measured: bool, guessed: bool) -> None:
        """A step begins that needs places on a device, or in an arena.

        Sizes of the step before tell of this one, unless its bounds were ``guessed``.
        """
        if self.blocks is not None:
            self.blocks.start_step(self.room, measured=measured, in_use=self.was_in_use)
        if self.reserve is not None:
            self.reserve.start_step(learn=not guessed)

    def clear(self) -> None:
        """Hold no buffers, and nothing on its way."""
        self.arena.clear()
        if self.staging is not None:
            self.staging.clear()

    def close(self) -> None:
        """No tensor comes any more; those that backward still wants stay until it has them."""
        self.reserve = None
        self.clear()
        self.spill.close()

    def leave(self, handle: Handle, *, borrowed: bool) -> None:
        """Hold a tensor itself: somebody else owns it anyway (``borrowed``), or it is too small."""
        tensor = waiting(handle)
        held = self.borrowed if borrowed else self.small
        for part in self._parts(tensor):
            storage = part.untyped_storage()
            if not borrowed and storage._cdata not in held:
                for each in self.onlookers:
                    each.small(storage.nbytes())
            held[storage._cdata] = storage.nbytes()
        handle.tensor = tensor.detach()

    def leave_to_lender(self, handle: Handle) -> bool:
        """Hold nothing of a weight that is elsewhere; whether it is one."""
        tensor = waiting(handle)
        if self.loans is None or not is_plain(tensor):
            return False
        handle.lender = self.loans.lender_of(tensor)
        if handle.lender is None:
            return False
        handle.tensor, handle.version = None, handle.lender.version
        return True

    def note_small(self, handle: Handle, key: Callable[[], tuple[str, str]]) -> None:
        """What a small tensor would be called if it were larger, and had an :class:`Entry`."""
        tensor = waiting(handle)
        owner, contents = StorageWeakRef(tensor.untyped_storage()), (tensor._version, tensor.dtype)
        if self._noted.get(owner) != contents:
            self._noted[owner] = contents
            self.small_keys[key()[0]] = tensor.untyped_storage().nbytes()

    def settle(
        self, handle: Handle, rule: Rule, key: Callable[[], tuple[str, str]], options: Mapping[str, Any]
    ) -> None:
        """Hold what ``rule`` says backward reads of the handle's tensor, and let the tensor go."""
        tensor = waiting(handle)
        handle.rule = rule
        entry = handle.entry = self._entry(tensor, rule, key)
        entry.row.roles.append(rule.role)
        for each in self.onlookers:
            each.saving(entry.row, tensor, functools.partial(derived, entry.origin))
        before = entry.row.packed_bytes
        handle.is_pending, handle.held = False, self._packer.pack(entry, handle, rule, options)
        self.packed_bytes += entry.row.packed_bytes - before
        for each in self.onlookers:
            each.saved(entry.row)
        handle.tensor = tensor.detach() if isinstance(handle.held, Kept) else None

    def forget_calls(self) -> None:
        """Forward is over: let go of how tensors were made, where no recipe needs it."""
        if self.lineage is None or self.measured:
            return
        for entry in self._entries.values():
            if entry.origin is not None and not isinstance(entry.values, Recomputed):
                entry.origin.call = None
            entry.origin = None

    def note(self, handle: Handle, rule: Rule, attribute: str, call: Call) -> None:
        """Say where a tensor comes from that ``call`` saved without returning it, if that is known."""
        if self.lineage is None or handle.tensor is None:
            return
        if rule.role is Role.DROPOUT_MASK:
            self.lineage.note_mask(handle.tensor, call)
        elif attribute == "self" and call.changed and self.lineage.origin(handle.tensor).call is None:
            self.lineage.note_original(handle.tensor, call)

    def unpack(self, handle: Handle) -> torch.Tensor:
        """The tensor as it was saved, within its bound.

        Raises:
            CaptureError: a tensor that is held itself was changed in place since it was saved.
        """
        free = handle.held is None and is_default(*handle.geometry[:2])
        if not self.onlookers or handle.entry is None or free:
            return unpacked(handle, self)
        for each in self.onlookers:
            each.using(handle.entry.row)
        tensor = unpacked(handle, self)
        on_host = handle.entry.device.type == "cpu"  # on a device a buffer is its user's alone
        owners = self.arena.owners() if on_host else [handle.entry]
        rows = [owner.row for owner in owners if isinstance(owner, Entry | Held)]
        for each in self.onlookers:
            each.used(handle.entry.row, rows)
        return tensor

    def _entry(self, tensor: torch.Tensor, rule: Rule, key: Callable[[], tuple[str, str]]) -> Entry:
        address = tensor.untyped_storage()._cdata
        entry = self._entries.get(address)
        if entry is not None and entry.holds(tensor):
            return entry
        name, module = key()
        if self.admit is not None:
            self.admit(name, tensor.untyped_storage().nbytes(), self.follows_values)
        row = Row(
            key=name,
            module=module,
            rule=rule,
            shape=tuple(tensor.shape),
            dtype=str(tensor.dtype).removeprefix("torch."),
            saved_bytes=tensor.untyped_storage().nbytes(),
        )
        entry = Entry(tensor, row)
        self.rows.append(row)
        self._entries[address] = entry
        if self.lineage is not None:
            origin = entry.origin = self.lineage.origin(tensor)
            origin.row, origin.entry = row, weakref.ref(entry)
        for each in self.onlookers:
            if each.released is not ignored:
                weakref.finalize(entry, each.released, row).atexit = False
        return entry

"""Saved storages and what is held instead of them: each packed once, however many views or savers."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from squeezebox import codecs
from squeezebox.capture._arena import Arena
from squeezebox.capture._contracts import Listener, Policy
from squeezebox.capture._device import DeviceBlocks
from squeezebox.capture._entries import Entry, Handle, Row, is_plain
from squeezebox.capture._layouts import (
    dither_of,
    flattened,
    give_sign,
    is_default,
    lag_of,
    placeholder,
    scale_of,
)
from squeezebox.capture._lineage import Call, Derivation, Lineage, Origin, Recipe, derivation
from squeezebox.capture._places import pack_into
from squeezebox.capture._rules import Rule
from squeezebox.memory import CudaStreams, HostSlot, Reserve, Spill, Staging
from squeezebox.schema import CaptureError, CodecError, Reads, Role

SMALL_BYTES = 4096  # below this a packed object's own overhead eats the saving


class _Step:
    """Lives as long as a handle of its step does."""

    __slots__ = ("__weakref__",)


class Store:
    """The table of living entries, and packing and unpacking through it."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.keep: Container[str] = ()  # keys of tensors to hold themselves
        self.offload: Container[str] = ()  # and of those to move to a file
        self.recompute: Mapping[str, Container[str]] = {}  # keys of those to make again, from which others
        self.signed: Container[str] = ()  # and of those among them whose signs are held
        self.lineage: Lineage | None = None
        self.spill = Spill()
        self.staging: Staging | None = None  # where a device's tensors go instead
        self.admit: Callable[[str, int], None] | None = None  # raises for a key and bytes that no plan knows
        self.listener: Listener | None = None
        self.arena = Arena()
        self.reserve: Reserve | None = None  # where they go in the host's memory
        self.blocks: DeviceBlocks | None = None  # where a device's blocks go,
        self.room = 0  # and how many bytes they get, where a plan says so
        self._pooled: set[tuple[str, str]] = set()  # keys and options of pool indices that were verified
        self.rows: list[Row] = []
        self.borrowed: dict[int, int] = {}
        self.small: dict[int, int] = {}
        self.small_keys: dict[str, int] = {}
        self.late_values: dict[str, Role] = {}  # keys whose values were asked for after their sign, by whom
        self._entries: weakref.WeakValueDictionary[int, Entry] = weakref.WeakValueDictionary()
        self._step = weakref.ref(_Step())  # dead at once: no step is running
        self.was_in_use = False  # when this step began, the one before was still to be unpacked

    def use_device(self, device: torch.device) -> None:
        """From now on tensors are on a device that the host does not wait for."""
        self.blocks, self.staging = DeviceBlocks(device), Staging(CudaStreams(device))

    def use_arena(self) -> None:
        """From now on packed tensors, or a device's on the host, have an arena in the host's memory."""
        self.reserve = Reserve() if self.staging is None else self.staging.use_arena()

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
            step = _Step()
            self._step = weakref.ref(step)
        return Handle(tensor, step)

    @property
    def in_use(self) -> bool:
        """Whether autograd still holds a handle of the running step."""
        return self._step() is not None

    def start_step(self) -> None:
        """Begin a new list of rows; entries of an unfinished backward stay valid."""
        self.was_in_use = self.in_use
        self._step = weakref.ref(_Step())  # dead at once
        self.rows = []
        self.borrowed = {}
        self.small = {}
        self.small_keys = {}
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

    def leave(self, handle: Handle, *, borrowed: bool) -> None:
        """Hold a tensor itself: somebody else owns it anyway (``borrowed``), or it is too small."""
        tensor = _tensor(handle)
        if is_plain(tensor.data):
            storage = tensor.untyped_storage()
            (self.borrowed if borrowed else self.small)[storage._cdata] = storage.nbytes()
        handle.tensor = tensor.detach()

    def note_small(self, handle: Handle, key: str) -> None:
        """What a small tensor would be called if it were larger."""
        self.small_keys[key] = _tensor(handle).untyped_storage().nbytes()

    def settle(
        self, handle: Handle, rule: Rule, key: Callable[[], tuple[str, str]], options: Mapping[str, Any]
    ) -> None:
        """Hold what ``rule`` says backward reads of the handle's tensor, and let the tensor go."""
        tensor = _tensor(handle)
        handle.rule = rule
        entry = handle.entry = self._entry(tensor, rule, key)
        entry.row.roles.append(rule.role)
        if self.listener is not None:
            self.listener.saving(entry.row, tensor, functools.partial(_derived, entry.origin))
        handle.form = self._pack(entry, handle, rule, options)
        if self.listener is not None:
            self.listener.saved(entry.row)
        handle.tensor = tensor.detach() if handle.form == "keep" else None

    def forget_calls(self) -> None:
        """Forward is over: let go of how tensors were made, where no recipe needs it."""
        if self.lineage is None or self.listener is not None:
            return
        for entry in self._entries.values():
            if entry.recipe is None and entry.origin is not None:
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
        free = handle.form == "shape" and is_default(*handle.geometry[:2])
        if self.listener is None or handle.entry is None or free:
            return self._unpack(handle)
        self.listener.using(handle.entry.row)
        tensor = self._unpack(handle)
        on_host = handle.entry.device.type == "cpu"  # on a device a buffer is its user's alone
        owners = self.arena.owners() if on_host else [handle.entry]
        unpacked = [owner.row for owner in owners if isinstance(owner, Entry)]
        self.listener.used(handle.entry.row, unpacked)
        return tensor

    def _unpack(self, handle: Handle) -> torch.Tensor:
        if handle.override is not None:
            return handle.override
        if handle.tensor is not None:
            if handle.entry is not None:
                self.arena.trim()
            return _at_version(handle.tensor, handle.version)
        entry = handle.entry
        if entry is None:
            raise CaptureError("a saved tensor was released before its backward: this is a bug in capture")
        shape, stride, offset = handle.geometry
        if handle.form == "shape":
            self.arena.trim()
            return placeholder(shape, stride, entry.dtype, entry.device)
        if handle.form.startswith("pool-index"):
            packed = entry.packed[handle.form]
            return _as_saved(handle, entry, codecs.get(packed.codec).unpack(packed))
        form = handle.form if handle.form in entry.packed else "values"
        return _as_saved(handle, entry, self._decode(entry, form).as_strided(shape, stride, offset))

    def _entry(self, tensor: torch.Tensor, rule: Rule, key: Callable[[], tuple[str, str]]) -> Entry:
        address = tensor.untyped_storage()._cdata
        entry = self._entries.get(address)
        if entry is not None and entry.holds(tensor):
            return entry
        name, module = key()
        if self.admit is not None:
            self.admit(name, tensor.untyped_storage().nbytes())
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
        if self.listener is not None:
            weakref.finalize(entry, self.listener.released, row).atexit = False
        return entry

    def _pack(self, entry: Entry, handle: Handle, rule: Rule, options: Mapping[str, Any]) -> str:
        """Make sure the entry serves ``rule``; returns the form that the handle reads."""
        tensor = _tensor(handle)
        if entry.kept is not None:
            return "keep"
        if tensor._version != handle.version:  # unpack() will refuse it
            return self._keep(entry, tensor)
        if tensor.is_neg() or tensor.is_conj():  # the storage holds other values than the tensor
            return self._keep(entry, tensor)
        if rule.reads is Reads.SHAPE:
            return "shape"
        entry.row.reads_values |= rule.codec is None and rule.reads is not Reads.SIGN
        planned = self._planned(entry, tensor)
        if planned is not None:
            return planned
        if rule.codec is not None:
            return self._pack_exact(entry, tensor, rule.codec, options)
        if rule.reads is Reads.EXACT:
            return self._hold(entry, tensor)
        if rule.reads is Reads.SIGN:
            return self._pack_sign(entry, tensor, rule)
        return self._pack_values(entry, tensor, rule, options)

    def _planned(self, entry: Entry, tensor: torch.Tensor) -> str | None:
        """Hold the tensor as a plan says, where that is not by packing it."""
        key = entry.row.key
        if key in self.keep:
            return self._keep(entry, tensor)
        if key in self.offload and self._place(entry) is not None:
            return self._offload(entry, tensor)
        return self._derive(entry, tensor) if key in self.recompute else None

    def _pack_exact(self, entry: Entry, tensor: torch.Tensor, codec: str, options: Mapping[str, Any]) -> str:
        form = codec + "".join(f",{name}={value}" for name, value in options.items())
        waits = codec == "narrow" or (codec == "mask" and tensor.dtype != torch.bool)
        if self.blocks is not None and waits:  # for the device, to see what the values are
            return self._keep(entry, tensor)
        if codec == "narrow" and tensor.dtype.itemsize == 1:  # nothing is narrower: an LSTM's workspace, say
            return self._keep(entry, tensor)
        if form not in entry.packed:
            pooled = codec == "pool-index"
            whole = tensor if pooled else flattened(tensor, entry.numel)
            if pooled and self.blocks is not None:  # looking again would wait for the device
                options = {**options, "trusted": (entry.row.key, form) in self._pooled}
            try:
                packed = self._packed(entry, codec, whole, **options)
            except CodecError:  # not of the promised kind (a mask of many values): exact all the same
                return self._keep(entry, tensor)
            if pooled:
                self._pooled.add((entry.row.key, form))
            entry.packed[form] = packed
            entry.row.packed[codec] = entry.row.packed.get(codec, 0) + packed.nbytes
        return form

    def _pack_sign(self, entry: Entry, tensor: torch.Tensor, rule: Rule) -> str:
        """One bit an element, unless the values were asked for too, last time or already now."""
        if "sign" in entry.packed:
            return "sign"
        if "values" in entry.packed and _keeps_sign(entry):
            return "values"
        reader = self.late_values.get(entry.row.key)
        if reader is not None and "values" not in entry.packed:
            return self._pack_values(entry, tensor, replace(rule, role=reader), {})
        self._add_sign(entry, tensor)
        return "sign"

    def _pack_values(self, entry: Entry, tensor: torch.Tensor, rule: Rule, options: Mapping[str, Any]) -> str:
        if "values" in entry.packed:
            return "values"
        if "sign" in entry.packed:
            self.late_values[entry.row.key] = rule.role
        scale = scale_of(entry.numel, tensor, options)
        flat = flattened(tensor, entry.numel)
        choice = self.policy.choose(entry.row.key, replace(rule, scaled=scale is not None), flat)
        if choice.codec == "keep":
            return self._hold(entry, tensor)
        units = {"scale": scale.factors, "inner": scale.inner} if scale is not None and choice.scaled else {}
        hints: dict[str, Any] = {"lag": lag_of(tensor), "dither": dither_of(tensor), **units}
        codec = codecs.get(choice.codec)
        blocks = self.blocks if choice.codec == "blocks" else None
        if blocks is not None and blocks.device != entry.device:
            blocks = None
        arena = blocks.place(flat.nbytes) if blocks is not None else None
        if arena is not None:
            hints["arena"] = arena
        if self.listener is not None:
            trial = functools.partial(codec.pack, flat, **hints)
            again = functools.partial(self._again, entry)
            self.listener.offered(
                entry.row, choice.codec, flat, scale if choice.scaled else None, trial, again
            )
        packed = self._packed(entry, choice.codec, flat, bound=choice.bound, **hints)
        entry.packed["values"] = packed
        entry.row.packed[choice.codec] = packed.nbytes if arena is None else _table_bytes(packed)
        if arena is not None:
            entry.row.slot = int(packed.meta["slot"])
        elif blocks is not None:
            blocks.note(packed.nbytes)
        entry.row.absolute_bound = packed.bound
        entry.row.bound = (choice.bound or 0.0) if choice.scaled else packed.bound
        entry.scaled = choice.scaled
        if _keeps_sign(entry) and entry.packed.pop("sign", None) is not None:
            entry.row.packed.pop("sign", None)
        return "values"

    def _add_sign(self, entry: Entry, tensor: torch.Tensor) -> None:
        packed = self._packed(entry, "sign", flattened(tensor, entry.numel))
        entry.packed["sign"] = packed
        entry.row.packed["sign"] = packed.nbytes

    def _packed(self, entry: Entry, name: str, tensor: torch.Tensor, **options: Any) -> codecs.Packed:
        codec = codecs.get(name)
        if self.reserve is None or codec.fixed_size or entry.device.type != "cpu":
            return codec.pack(tensor, **options)
        return pack_into(self.reserve, entry.row.key, entry, codec, tensor, **options)

    def _hold(self, entry: Entry, tensor: torch.Tensor) -> str:
        """Keep the tensor; where somebody listens, let it go all the same, to see when it would be free."""
        moved = self.listener is not None and self._place(entry) is not None
        return self._offload(entry, tensor) if moved else self._keep(entry, tensor)

    def _derive(self, entry: Entry, tensor: torch.Tensor) -> str:
        if entry.recipe is None and entry.origin is not None:
            entry.recipe = Recipe(entry.origin, self.recompute[entry.row.key])
            entry.row.packed["recompute"] = 0
            if entry.row.key in self.signed:
                self._add_sign(entry, tensor)
        return "recompute"

    def _again(self, entry: Entry) -> torch.Tensor:
        """What a recipe would make of the others as they are held now."""
        found = _derived(entry.origin)
        assert found is not None
        assert entry.origin is not None
        return Recipe(entry.origin, found.sources).follow(self._held, entry.dtype)

    def _held(self, entry: Entry) -> torch.Tensor:
        """All its values, flat, made anew and left to the caller."""
        if entry.kept is not None:
            return flattened(entry.kept, entry.numel)
        if isinstance(entry.slot, HostSlot):
            assert self.staging is not None
            return self.staging.read(entry.slot).clone()
        if entry.slot is None:
            packed = entry.packed["values"]
            return codecs.get(packed.codec).unpack(packed).view(-1)
        whole = torch.empty(entry.numel, dtype=entry.dtype, device="cpu")
        self.spill.read(entry.slot, whole.view(torch.uint8))
        return whole

    def _keep(self, entry: Entry, tensor: torch.Tensor) -> str:
        entry.kept = tensor.detach()
        entry.row.packed["keep"] = entry.row.saved_bytes
        return "keep"

    def _offload(self, entry: Entry, tensor: torch.Tensor) -> str:
        if entry.slot is None:
            place = self._place(entry)
            assert place is not None
            whole = tensor.detach().as_strided((entry.numel,), (1,), 0)  # which tells of changes in place
            entry.slot = place.write(whole)
            entry.row.packed["offload"] = 0
        return "offload"

    def _place(self, entry: Entry) -> Spill | Staging | None:
        """Where it can be moved to."""
        if self.staging is not None and entry.device == self.staging.device:
            return self.staging
        return self.spill if entry.device.type == "cpu" else None

    def _value(self, entry: Entry) -> torch.Tensor:
        """All its values, flat, from now on held until nobody needs the entry."""
        if entry.kept is not None:
            return flattened(_at_version(entry.kept, entry.version), entry.numel)
        if entry.ready is None:
            entry.ready = self._decode(entry, "values")
        return entry.ready

    def _decode(self, entry: Entry, form: str) -> torch.Tensor:
        if entry.ready is not None or entry.recipe is not None:
            self.arena.trim()
        if entry.ready is None and entry.recipe is not None:
            entry.ready = entry.recipe.follow(self._value, entry.dtype)
            if "sign" in entry.packed:
                give_sign(entry.ready, entry.packed["sign"])
        if entry.ready is not None:
            return entry.ready
        if isinstance(entry.slot, HostSlot):
            assert self.staging is not None
            return self.staging.read(entry.slot)
        if entry.slot is not None:
            nbytes = entry.numel * entry.dtype.itemsize
            ready = self.arena.find(entry, "offload")
            if ready is None:
                ready = self.arena.take(nbytes, entry, "offload")
                self.spill.read(entry.slot, ready[:nbytes])
            return ready[:nbytes].view(entry.dtype)
        packed = entry.packed[form]
        codec = codecs.get(packed.codec)
        if entry.device.type != "cpu":  # other devices' allocators keep their pages themselves
            return codec.unpack(packed)
        nbytes = entry.numel * entry.dtype.itemsize
        ready = self.arena.find(entry, form)
        if ready is not None:
            return ready[:nbytes].view(entry.dtype)
        buffer = self.arena.take(nbytes, entry, form)
        return codec.unpack(packed, out=buffer[:nbytes].view(entry.dtype))


def _derived(origin: Origin | None) -> Derivation | None:
    return None if origin is None else derivation(origin)


def _tensor(handle: Handle) -> torch.Tensor:
    if handle.tensor is None:
        raise CaptureError("a saved tensor was settled twice: this is a bug in capture")
    return handle.tensor


def _at_version(tensor: torch.Tensor, version: int) -> torch.Tensor:
    if tensor._version != version:
        raise CaptureError(
            f"a tensor of shape {tuple(tensor.shape)} that backward needs was changed in place after it "
            f"was saved (version {version}, now {tensor._version}), so its gradient would be wrong. "
            "Replace the in-place operation by one that makes a new tensor."
        )
    return tensor


def _as_saved(handle: Handle, entry: Entry, tensor: torch.Tensor) -> torch.Tensor:
    """The unpacked tensor; autograd itself would not notice one of another shape or dtype."""
    shape, stride, _ = handle.geometry
    if (tensor.shape, tensor.stride(), tensor.dtype, tensor.device) != (
        shape,
        stride,
        entry.dtype,
        entry.device,
    ):
        raise CaptureError(
            f"a tensor saved as {entry.dtype} of shape {shape} and strides {stride} on {entry.device} was "
            f"unpacked as {tensor.dtype} of shape {tuple(tensor.shape)} and strides {tensor.stride()} on "
            f"{tensor.device}: this is a bug in the codec of '{entry.row.key}'"
        )
    return tensor


def _table_bytes(packed: codecs.Packed) -> int:
    """What lies beside an arena's words and their overflow."""
    return sum(part.nbytes for part in packed.payload[2:])


def _keeps_sign(entry: Entry) -> bool:
    return codecs.get(entry.packed["values"].codec).preserves_sign

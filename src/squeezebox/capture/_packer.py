"""How a saved tensor comes to be held: as itself, packed, moved, or to be recomputed."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch

from squeezebox import codecs
from squeezebox.capture._device import DeviceBlocks, table_bytes
from squeezebox.capture._entries import Entry, Handle, Row
from squeezebox.capture._held import Held, Kept, Offloaded, Packed, Recomputed, Sign, Staged, again
from squeezebox.capture._layouts import Arena, Scale, dither_of, flattened, lag_of, scale_of, why_no_interval
from squeezebox.capture._lineage import Recipe
from squeezebox.capture._onlooker import Onlooker, ignored, spent_on
from squeezebox.capture._rules import Rule
from squeezebox.memory import HostSlot, Loans, Reserve, Room, Spill, Staging
from squeezebox.schema import (
    Action,
    Activity,
    CaptureError,
    CodecError,
    Option,
    OptionError,
    PlanError,
    Reads,
    Role,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """A codec's name and its error bound: absolute, or in units of the tensor's scale (``scaled``)."""

    codec: str
    bound: float | None = None
    scaled: bool = False


class Policy(Protocol):
    """Decides how a tensor of which backward reads the values is held."""

    def choose(self, key: str, rule: Rule, tensor: torch.Tensor) -> Choice:
        """The codec for a flat tensor; ``Choice(codec="keep")`` holds the tensor itself."""


def _no_plan(key: str) -> Option | None:
    return None


@dataclass(eq=False)
class Means:
    """Shared by a :class:`Store`, which is one, and what packs and unpacks for it."""

    policy: Policy
    planned: Callable[[str], Option | None] = _no_plan  # how a plan holds the tensor of a key
    late_values: dict[str, Role] = field(default_factory=dict)  # whose values were asked for after their sign
    refused: dict[str, str] = field(default_factory=dict)  # that were to be packed and are kept, and why
    unweighed: dict[str, str] = field(default_factory=dict)  # whose errors are beyond a float, from then on
    spares: Callable[[Row, Choice], bool] | None = None  # whether nothing is to be lost all the same
    spill: Spill = field(default_factory=Spill)
    staging: Staging | None = None  # where a device's tensors go instead
    arena: Arena = field(default_factory=Arena)  # of unpacked tensors
    reserve: Reserve | None = None  # where packed ones go in the host's memory
    blocks: DeviceBlocks | None = None  # where a device's blocks go,
    room: int = 0  # and how many bytes they get, where a plan says so
    loans: Loans | None = None  # of weights that are elsewhere
    onlookers: tuple[Onlooker, ...] = ()
    follows_values: bool = False  # whether sizes of this step follow from values, as an expert's tokens do
    ready: Callable[[torch.dtype], bool] | None = None  # whether packing can be; asked where it need not be
    unready: bool = False  # whether a tensor of this step is kept because of it
    unready_steps: int = 0  # and of how many before

    @property
    def measured(self) -> bool:
        """Whether an onlooker measures what could be held."""
        return any(each.measures for each in self.onlookers)

    @contextlib.contextmanager
    def shown_to(self, onlooker: Onlooker) -> Iterator[None]:
        """A context in which it looks on, after those who do already."""
        self.onlookers = (*self.onlookers, onlooker)
        try:
            yield
        finally:
            self.onlookers = tuple(each for each in self.onlookers if each is not onlooker)


def pack_into(
    reserve: Reserve,
    key: str,
    owner: object,
    codec: codecs.Codec,
    tensor: torch.Tensor,
    bound: float | None,
    hints: codecs.Hints,
    **options: Any,
) -> codecs.Packed:
    """As ``codec.pack``, with all parts in the arena where they fit.

    What a codec makes that takes no room is copied, and is there twice for that moment. The place is free
    again when nobody refers to the parts; they live as long as ``owner``.
    """
    room = reserve.claim(key)
    if room is not None:
        hints = replace(hints, room=room.free)
    packed = codec.pack(tensor, bound, hints, **options)
    placed = None if room is None else _placed(packed, room)
    reserve.note(key, [part.nbytes for part in packed.payload], owner, placed=placed is not None)
    return placed or packed


def _placed(packed: codecs.Packed, room: Room) -> codecs.Packed | None:
    parts = [room.put(part) for part in packed.payload]
    kept = tuple(part for part in parts if part is not None)
    return replace(packed, payload=kept) if len(kept) == len(parts) else None


_COMPLETE = frozenset({"narrow", "mask"})  # codecs of one reading that have all values, for every other
_NO_HINTS = codecs.Hints()


class Packing(Protocol):
    """Makes a store's entries serve those that read them."""

    def pack(self, entry: Entry, handle: Handle, rule: Rule, options: Mapping[str, Any]) -> Held | None:
        """Make sure the entry serves ``rule``; returns what does, None where that is the tensor's shape."""


class Packer:
    """Packs, moves, derives or keeps, as a plan or the policy says."""

    def __init__(self, means: Means) -> None:
        self._means = means
        self._pooled: set[tuple[str, str]] = set()  # keys and options of pool indices that were verified

    def pack(self, entry: Entry, handle: Handle, rule: Rule, options: Mapping[str, Any]) -> Held | None:
        """As :class:`Packing`."""
        with spent_on(Activity.PACKING, entry.row, self._means.onlookers):
            try:
                return self._held_as(entry, handle, rule, options)
            except (
                CodecError,
                OptionError,
                ArithmeticError,
            ) as error:  # measuring, or a codec
                return self._refused(entry, waiting(handle), str(error))

    def _held_as(self, entry: Entry, handle: Handle, rule: Rule, options: Mapping[str, Any]) -> Held | None:
        tensor = waiting(handle)
        if isinstance(entry.values, Kept):
            return entry.values
        # unpack() will refuse it, or the storage holds other values than the tensor
        if tensor._version != handle.version or tensor.is_neg() or tensor.is_conj():
            return kept(entry, tensor)
        if rule.reads is Reads.SHAPE:
            return None
        if self._means.ready is not None and not self._means.ready(entry.dtype):
            self._means.unready = True
            return kept(entry, tensor)
        whole = rule.codec is None and rule.reads is not Reads.SIGN
        entry.row.reads_values |= whole or rule.codec in _COMPLETE
        planned = self._planned(entry, tensor)
        if planned is not None:
            return planned
        if rule.codec is not None:
            return self._pack_exact(entry, tensor, rule.codec, options)
        if rule.reads is Reads.EXACT:
            entry.row.exact = True
            return self._hold(entry, tensor)
        if rule.reads is Reads.SIGN:
            return self._pack_sign(entry, tensor, rule)
        if entry.row.key in self._means.unweighed:
            return self._refused(entry, tensor, self._means.unweighed[entry.row.key])
        return self._pack_values(entry, tensor, rule, options)

    def _planned(self, entry: Entry, tensor: torch.Tensor) -> Held | None:
        """Hold the tensor as a plan says, where that is not by packing it."""
        option = self._means.planned(entry.row.key)
        if option is None or option.action is Action.COMPRESS:
            return None
        if option.action is Action.KEEP:
            return kept(entry, tensor)
        if option.action is Action.OFFLOAD:
            return None if self._place(entry) is None else self._offload(entry, tensor)
        return self._derive(entry, tensor, option)

    def _pack_exact(self, entry: Entry, tensor: torch.Tensor, codec: str, options: Mapping[str, Any]) -> Held:
        form = codec + "".join(f",{name}={value}" for name, value in options.items())
        waits = codec == "narrow" or (codec == "mask" and tensor.dtype != torch.bool)
        if self._means.blocks is not None and waits:  # for the device, to see what the values are
            return kept(entry, tensor)
        if codec == "narrow" and tensor.dtype.itemsize == 1:  # nothing is narrower: an LSTM's workspace, say
            return kept(entry, tensor)
        if codec == "interval":
            why = why_no_interval(flattened(tensor, entry.numel), **options)
            if why:
                return self._refused(entry, tensor, why)
        if form not in entry.parts:
            pooled = codec == "pool-index"
            whole = tensor if pooled else flattened(tensor, entry.numel)
            if pooled and self._means.blocks is not None:  # looking again would wait for the device
                options = {**options, "trusted": (entry.row.key, form) in self._pooled}
            packed = self._packed(entry, codec, whole, **options)
            if pooled:
                self._pooled.add((entry.row.key, form))
            entry.parts[form] = Packed(row=entry.row, packed=packed)
            entry.row.packed[codec] = entry.row.packed.get(codec, 0) + packed.nbytes
            if codec in _COMPLETE and entry.values is None:
                entry.values = entry.parts[form]
        return entry.parts[form]

    def _pack_sign(self, entry: Entry, tensor: torch.Tensor, rule: Rule) -> Held:
        """One bit an element, unless the values were asked for too, last time or already now."""
        if rule.nan in entry.signs:
            return entry.signs[rule.nan]
        if entry.values is not None and entry.values.keeps_sign:
            return entry.values
        reader = self._means.late_values.get(entry.row.key)
        if reader is not None and entry.values is None:
            return self._pack_values(entry, tensor, replace(rule, role=reader), {})
        bits = Packed(row=entry.row, packed=self._sign(entry, tensor, nan=rule.nan))
        return entry.signs.setdefault(rule.nan, Sign(row=entry.row, source=bits))

    def _pack_values(
        self, entry: Entry, tensor: torch.Tensor, rule: Rule, options: Mapping[str, Any]
    ) -> Held:
        if entry.values is not None:
            return entry.values
        if entry.signs:
            self._means.late_values[entry.row.key] = rule.role
        scale = scale_of(entry.numel, tensor, options)
        flat = flattened(tensor, entry.numel)
        seen = replace(
            rule, scaled=scale is not None, logits=options.get("logits"), highest=options.get("highest")
        )
        choice = self._means.policy.choose(entry.row.key, seen, flat)
        if choice.codec == "keep" or (
            self._means.spares is not None and self._means.spares(entry.row, choice)
        ):
            return self._hold(entry, tensor)
        blocks = self._means.blocks if choice.codec == "blocks" else None
        if blocks is not None and blocks.device != entry.device:
            blocks = None
        arena = blocks.place(flat.nbytes) if blocks is not None else None
        unit = scale if choice.scaled else None
        hints = _hints(tensor, unit, arena)
        if self._means.onlookers:
            self._offer(entry, choice.codec, flat, unit, seen, hints)
        packed = self._packed(entry, choice.codec, flat, choice.bound, hints)
        entry.values = Packed(
            row=entry.row,
            keeps_sign=codecs.get(choice.codec).preserves_sign,
            packed=packed,
            scale=None if unit is None else replace(unit, factors=packed.payload[-1]),
        )
        entry.row.packed[choice.codec] = packed.nbytes if arena is None else table_bytes(packed)
        if arena is not None:
            entry.row.slot = int(packed.meta["slot"])
        elif blocks is not None:
            blocks.note(packed.nbytes)
        entry.row.absolute_bound = packed.bound
        entry.row.bound = (choice.bound or 0.0) if choice.scaled else packed.bound
        entry.row.scaled = choice.scaled
        if entry.values.keeps_sign:
            for sign in entry.signs.values():
                sign.source = entry.values
            entry.row.packed.pop("sign", None)
        return entry.values

    def _offer(
        self,
        entry: Entry,
        codec: str,
        flat: torch.Tensor,
        unit: Scale | None,
        rule: Rule,
        hints: codecs.Hints,
    ) -> None:
        """Let onlookers try how else the values could be packed."""
        for each in self._means.onlookers:
            if each.offered is not ignored:
                highest = math.inf if rule.highest is None else rule.highest()
                trial = functools.partial(_tried, flat, hints)
                made = functools.partial(again, entry, self._means)
                each.offered(entry.row, codec, flat, unit, highest, trial, made)

    def _sign(self, entry: Entry, tensor: torch.Tensor, *, nan: bool = True) -> codecs.Packed:
        packed = self._packed(entry, "sign", flattened(tensor, entry.numel), nan=nan)
        entry.row.packed["sign"] = entry.row.packed.get("sign", 0) + packed.nbytes
        return packed

    def _packed(
        self,
        entry: Entry,
        name: str,
        tensor: torch.Tensor,
        bound: float | None = None,
        hints: codecs.Hints = _NO_HINTS,
        **options: Any,
    ) -> codecs.Packed:
        codec = codecs.get(name)
        if self._means.reserve is None or codec.fixed_size or entry.device.type != "cpu":
            return codec.pack(tensor, bound, hints, **options)
        return pack_into(self._means.reserve, entry.row.key, entry, codec, tensor, bound, hints, **options)

    def _hold(self, entry: Entry, tensor: torch.Tensor) -> Held:
        """Keep the tensor; where somebody measures, let it go all the same, to see when it would be free."""
        moved = self._means.measured and self._place(entry) is not None
        return self._offload(entry, tensor) if moved else kept(entry, tensor)

    def _derive(self, entry: Entry, tensor: torch.Tensor, option: Option) -> Held:
        if entry.values is None:
            assert entry.origin is not None
            try:
                recipe = Recipe(entry.origin, option.sources)
            except PlanError:
                if not self._means.follows_values:
                    raise
                return self._refused(entry, tensor, "it was made in another way than planned")
            entry.row.packed["recompute"] = 0
            sign = self._sign(entry, tensor) if option.codec == "sign" else None
            entry.values = Recomputed(row=entry.row, recipe=recipe, dtype=entry.dtype, sign=sign)
        return entry.values

    def _refused(self, entry: Entry, tensor: torch.Tensor, reason: str) -> Held:
        """Keep what cannot be held in another way, and remember why."""
        self._means.refused.setdefault(entry.row.key, reason)
        return kept(entry, tensor)

    def _offload(self, entry: Entry, tensor: torch.Tensor) -> Held:
        if not isinstance(entry.values, Offloaded | Staged):
            place = self._place(entry)
            assert place is not None
            whole = tensor.detach().as_strided((entry.numel,), (1,), 0)  # which tells of changes in place
            with spent_on(Activity.WAITING, entry.row, self._means.onlookers):
                slot = place.write(whole)
            if isinstance(slot, HostSlot):
                entry.values = Staged(row=entry.row, slot=slot)
            else:
                entry.values = Offloaded(row=entry.row, slot=slot, dtype=entry.dtype)
            entry.row.packed["offload"] = 0
        return entry.values

    def _place(self, entry: Entry) -> Spill | Staging | None:
        """Where it can be moved to."""
        if self._means.staging is not None and entry.device == self._means.staging.device:
            return self._means.staging
        return self._means.spill if entry.device.type == "cpu" else None


def kept(entry: Entry, tensor: torch.Tensor) -> Held:
    """Hold the tensor itself."""
    entry.values = Kept(row=entry.row, tensor=tensor.detach(), version=entry.version)
    entry.row.packed["keep"] = entry.row.saved_bytes
    return entry.values


def _hints(tensor: torch.Tensor, scale: Scale | None, arena: codecs.Arena | None) -> codecs.Hints:
    known = codecs.Hints(lag=lag_of(tensor), dither=dither_of(tensor), arena=arena)
    return known if scale is None else replace(known, scale=scale.factors, inner=scale.inner)


def _tried(
    flat: torch.Tensor,
    hints: codecs.Hints,
    codec: str,
    bound: float,
    arena: codecs.Arena | None = None,
) -> codecs.Packed:
    """Packed by the way, in an arena of the caller's if that is given."""
    return codecs.get(codec).pack(flat, bound, hints if arena is None else replace(hints, arena=arena))


def waiting(handle: Handle) -> torch.Tensor:
    """The tensor of a handle that is not settled yet."""
    if handle.tensor is None:
        raise CaptureError("a saved tensor was settled twice: this is a bug in capture")
    return handle.tensor

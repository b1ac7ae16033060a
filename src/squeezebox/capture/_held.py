"""What is there instead of a saved tensor, and how backward gets it back."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch

from squeezebox import codecs
from squeezebox.capture._layouts import Arena, Scale, flattened, give_sign, placeholder
from squeezebox.capture._lineage import Derivation, Origin, Recipe, derivation
from squeezebox.capture._onlooker import spent_on
from squeezebox.memory import HostSlot, Lender, Slot
from squeezebox.schema import Activity, CaptureError

if TYPE_CHECKING:
    from squeezebox.capture._entries import Entry, Handle, Row
    from squeezebox.capture._packer import Means


@dataclass(eq=False, kw_only=True)
class Held(ABC):
    """What gives a storage's values back, or as much of them as its readers want.

    They are ``ready``, flat, once they were recomputed, or where a recipe wanted them before their own use.
    """

    row: Row
    keeps_sign: bool = True  # whether they tell which elements are positive
    ready: torch.Tensor | None = None
    activity: ClassVar[Activity] = Activity.UNPACKING

    def flat(self, means: Means) -> torch.Tensor:
        """All of them, flat; in a buffer that the next may take."""
        if self.ready is None:
            with spent_on(self.activity, self.row, means.onlookers):
                return self.fetch(means, means.arena)
        means.arena.trim()
        return self.ready

    def lasting(self, means: Means) -> torch.Tensor:
        """All of them, flat, from now on there as long as this is."""
        if self.ready is None:
            self.ready = self.flat(means)
        return self.ready

    @abstractmethod
    def fetch(self, means: Means, arena: Arena) -> torch.Tensor:
        """All of them, flat; in a buffer of this arena where they need one."""


@dataclass(eq=False, kw_only=True)
class Kept(Held):
    """The tensor itself, while it is as it was."""

    tensor: torch.Tensor
    version: int

    def lasting(self, means: Means) -> torch.Tensor:  # looked at each time, as it may be changed
        return self.fetch(means, means.arena)

    def fetch(self, means: Means, arena: Arena) -> torch.Tensor:
        return flattened(_at_version(self.tensor, self.version))


@dataclass(eq=False, kw_only=True)
class Packed(Held):
    """A codec's bytes, and the scale that their bound is in units of, if it is."""

    packed: codecs.Packed
    scale: Scale | None = None

    def fetch(self, means: Means, arena: Arena) -> torch.Tensor:
        codec = codecs.get(self.packed.codec)
        if self.packed.device.type != "cpu":  # other devices' allocators keep their pages themselves
            return codec.unpack(self.packed)
        numel, dtype = self.packed.numel, self.packed.dtype
        return arena.filled(self, numel, dtype, lambda out: codec.unpack(self.packed, out=out))


@dataclass(eq=False, kw_only=True)
class Sign(Held):
    """Which elements are positive: bits are the ``source``, until there are values that keep signs."""

    source: Held

    def fetch(self, means: Means, arena: Arena) -> torch.Tensor:
        return self.source.flat(means)


@dataclass(eq=False, kw_only=True)
class Offloaded(Held):
    """Values in a file."""

    slot: Slot
    dtype: torch.dtype
    activity: ClassVar[Activity] = Activity.WAITING

    def fetch(self, means: Means, arena: Arena) -> torch.Tensor:
        numel = self.slot.nbytes // self.dtype.itemsize
        return arena.filled(self, numel, self.dtype, lambda out: means.spill.read(self.slot, out))


@dataclass(eq=False, kw_only=True)
class Staged(Held):
    """A device's values, in the host's memory."""

    slot: HostSlot
    activity: ClassVar[Activity] = Activity.WAITING

    def fetch(self, means: Means, arena: Arena) -> torch.Tensor:
        assert means.staging is not None
        return means.staging.read(self.slot)


@dataclass(eq=False, kw_only=True)
class Recomputed(Held):
    """Values that are recomputed from others', once, and then given the ``sign`` that they had."""

    recipe: Recipe
    dtype: torch.dtype
    sign: codecs.Packed | None
    activity: ClassVar[Activity] = Activity.RECOMPUTING

    def fetch(self, means: Means, arena: Arena) -> torch.Tensor:
        arena.trim()
        made = self.recipe.follow(lambda source: source.values.lasting(means), self.dtype)
        if self.sign is not None:
            give_sign(made, self.sign)
        self.ready = made  # not before: it may be interrupted
        return made


def _lent(handle: Handle, lender: Lender, means: Means) -> torch.Tensor:
    """What the handle's tensor saw of a weight that is elsewhere."""
    if lender.version != handle.version:
        raise CaptureError(
            f"a frozen weight of shape {tuple(lender.stand_in.shape)} that backward needs was changed after "
            "forward read it, so gradients would be wrong. Change it after backward."
        )
    assert means.loans is not None
    return means.loans.lend(lender).as_strided(*handle.geometry)


def _at_version(tensor: torch.Tensor, version: int) -> torch.Tensor:
    """The tensor, if it is as it was saved."""
    if tensor._version != version:
        raise CaptureError(
            f"a tensor of shape {tuple(tensor.shape)} that backward needs was changed in place after it "
            f"was saved (version {version}, now {tensor._version}), so its gradient would be wrong. "
            "Replace the in-place operation by one that makes a new tensor."
        )
    return tensor


def unpacked(handle: Handle, means: Means) -> torch.Tensor:
    """The handle's tensor as it was saved, within its bound."""
    if handle.override is not None:
        return handle.override
    if handle.lender is not None:
        return _lent(handle, handle.lender, means)
    if handle.tensor is not None:
        if handle.entry is not None:
            means.arena.trim()
        return _at_version(handle.tensor, handle.version)
    entry, held = handle.entry, handle.held
    if entry is None:
        raise CaptureError("a saved tensor was released before its backward: this is a bug in capture")
    shape, stride, offset = handle.geometry
    if held is None:
        means.arena.trim()
        return placeholder(shape, stride, entry.dtype, entry.device)
    if handle.rule.codec == "pool-index" and isinstance(held, Packed):
        with spent_on(Activity.UNPACKING, entry.row, means.onlookers):
            return _as_saved(handle, entry, codecs.get(held.packed.codec).unpack(held.packed))
    return _as_saved(handle, entry, held.flat(means).as_strided(shape, stride, offset))


def again(entry: Entry, means: Means) -> torch.Tensor:
    """What a recipe would make of the others as they are held now."""
    found = derived(entry.origin)
    assert found is not None
    assert entry.origin is not None
    recipe = Recipe(entry.origin, found.sources)
    return recipe.follow(lambda source: source.values.fetch(means, Arena()), entry.dtype)


def derived(origin: Origin | None) -> Derivation | None:
    """How a tensor of that origin can be recomputed, if it can."""
    return None if origin is None else derivation(origin)


def _as_saved(handle: Handle, entry: Entry, tensor: torch.Tensor) -> torch.Tensor:
    """The unpacked tensor; autograd itself would not notice one of another shape or dtype."""
    shape, stride, _ = handle.geometry
    wanted = (shape, stride, entry.dtype, entry.device)
    if (tensor.shape, tensor.stride(), tensor.dtype, tensor.device) != wanted:
        raise CaptureError(
            f"a tensor saved as {entry.dtype} of shape {shape} and strides {stride} on {entry.device} was "
            f"unpacked as {tensor.dtype} of shape {tuple(tensor.shape)} and strides {tensor.stride()} on "
            f"{tensor.device}: this is a bug in the codec of '{entry.row.key}'"
        )
    return tensor

"""How backward gets a saved tensor back: unpacked, moved back, or recomputed."""

from __future__ import annotations

import torch

from squeezebox import codecs
from squeezebox.capture._entries import Entry, Handle, as_saved, at_version
from squeezebox.capture._layouts import flattened, give_sign, placeholder
from squeezebox.capture._lineage import Derivation, Origin, Recipe, derivation
from squeezebox.capture._means import Means
from squeezebox.capture._watch import spent_on
from squeezebox.memory import HostSlot
from squeezebox.schema import Activity, CaptureError


class Unpacker:
    """Makes tensors of a store's entries."""

    def __init__(self, means: Means) -> None:
        self._means = means

    def tensor(self, handle: Handle) -> torch.Tensor:
        """As it was saved, within its bound."""
        if handle.override is not None:
            return handle.override
        if handle.tensor is not None:
            if handle.entry is not None:
                self._means.arena.trim()
            return at_version(handle.tensor, handle.version)
        entry = handle.entry
        if entry is None:
            raise CaptureError("a saved tensor was released before its backward: this is a bug in capture")
        shape, stride, offset = handle.geometry
        if handle.form == "shape":
            self._means.arena.trim()
            return placeholder(shape, stride, entry.dtype, entry.device)
        if handle.form.startswith("pool-index"):
            packed = entry.packed[handle.form]
            with spent_on(self._means.watcher, Activity.UNPACKING):
                return as_saved(handle, entry, codecs.get(packed.codec).unpack(packed))
        form = handle.form if handle.form in entry.packed else "values"
        return as_saved(handle, entry, self.decode(entry, form).as_strided(shape, stride, offset))

    def value(self, entry: Entry) -> torch.Tensor:
        """All its values, flat, from now on held until nobody needs the entry."""
        if entry.kept is not None:
            return flattened(at_version(entry.kept, entry.version), entry.numel)
        if entry.ready is None:
            entry.ready = self.decode(entry, "values")
        return entry.ready

    def decode(self, entry: Entry, form: str) -> torch.Tensor:
        """All of an entry's values, flat; in a buffer that the next may take."""
        if entry.ready is not None or entry.recipe is not None:
            self._means.arena.trim()
        if entry.ready is None and entry.recipe is not None:
            self._make_again(entry, entry.recipe)
        if entry.ready is not None:
            return entry.ready
        with spent_on(self._means.watcher, Activity.UNPACKING if entry.slot is None else Activity.WAITING):
            return self._fetched(entry, form)

    def _make_again(self, entry: Entry, recipe: Recipe) -> None:
        if self._means.watcher is not None:
            self._means.watcher.recomputed(entry.row)
        with spent_on(self._means.watcher, Activity.RECOMPUTING):
            entry.ready = recipe.follow(self.value, entry.dtype)
            if "sign" in entry.packed:
                give_sign(entry.ready, entry.packed["sign"])

    def _fetched(self, entry: Entry, form: str) -> torch.Tensor:
        """Unpacked, or moved back."""
        if isinstance(entry.slot, HostSlot):
            assert self._means.staging is not None
            return self._means.staging.read(entry.slot)
        if entry.slot is not None:
            nbytes = entry.numel * entry.dtype.itemsize
            ready = self._means.arena.find(entry, "offload")
            if ready is None:
                ready = self._means.arena.take(nbytes, entry, "offload")
                self._means.spill.read(entry.slot, ready[:nbytes])
            return ready[:nbytes].view(entry.dtype)
        packed = entry.packed[form]
        codec = codecs.get(packed.codec)
        if entry.device.type != "cpu":  # other devices' allocators keep their pages themselves
            return codec.unpack(packed)
        nbytes = entry.numel * entry.dtype.itemsize
        ready = self._means.arena.find(entry, form)
        if ready is not None:
            return ready[:nbytes].view(entry.dtype)
        buffer = self._means.arena.take(nbytes, entry, form)
        return codec.unpack(packed, out=buffer[:nbytes].view(entry.dtype))

    def again(self, entry: Entry) -> torch.Tensor:
        """What a recipe would make of the others as they are held now."""
        found = derived(entry.origin)
        assert found is not None
        assert entry.origin is not None
        return Recipe(entry.origin, found.sources).follow(self.held, entry.dtype)

    def held(self, entry: Entry) -> torch.Tensor:
        """All its values, flat, in a new tensor that is the caller's."""
        if entry.kept is not None:
            return flattened(entry.kept, entry.numel)
        if isinstance(entry.slot, HostSlot):
            assert self._means.staging is not None
            return self._means.staging.read(entry.slot).clone()
        if entry.slot is None:
            packed = entry.packed["values"]
            return codecs.get(packed.codec).unpack(packed).view(-1)
        whole = torch.empty(entry.numel, dtype=entry.dtype, device="cpu")
        self._means.spill.read(entry.slot, whole.view(torch.uint8))
        return whole


def derived(origin: Origin | None) -> Derivation | None:
    """How a tensor of that origin can be recomputed, if it can."""
    return None if origin is None else derivation(origin)

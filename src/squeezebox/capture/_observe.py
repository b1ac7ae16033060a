"""What autograd would save, and in which roles, when nothing is packed; for fake tensors too."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from squeezebox.capture._contracts import Choice
from squeezebox.capture._entries import Entry, Handle
from squeezebox.capture._held import Held
from squeezebox.capture._packer import Packer, waiting
from squeezebox.capture._recorder import Recorder
from squeezebox.capture._rules import Rule
from squeezebox.capture._store import Store
from squeezebox.memory import parts_of


class _KeepAll:
    """The policy of those who only look."""

    def choose(self, key: str, rule: Rule, tensor: torch.Tensor) -> Choice:
        """Hold the tensor itself."""
        return Choice(codec="keep")


class _Ledger(Store):
    """A store that holds every tensor itself, as plain PyTorch does, and still knows storages and roles."""

    def __init__(self) -> None:
        super().__init__(_KeepAll(), _Keeper)

    def leave(self, handle: Handle, *, borrowed: bool) -> None:
        """As a store's, fake tensors included."""
        if handle.tensor is not None:
            for part in parts_of(handle.tensor):
                storage = part.untyped_storage()
                (self.borrowed if borrowed else self.small)[storage._cdata] = storage.nbytes()
            handle.tensor = handle.tensor.detach()


class _Keeper(Packer):
    """Holds every tensor itself."""

    def pack(self, entry: Entry, handle: Handle, rule: Rule, options: Mapping[str, Any]) -> Held:
        """Whatever the rule says."""
        return entry.values or self.keep(entry, waiting(handle))


class Observer(Recorder):
    """A context around a model's forward that only looks.

    Storages, owners and roles are identified as in a session, so :meth:`saved_bytes` is what a report would
    call saved. Fake tensors count as plain ones: their storages have sizes and identities too.
    """

    def __init__(self, model: torch.nn.Module, inputs: Iterable[torch.Tensor]) -> None:
        super().__init__(_Ledger(), model)
        self.start_step()
        self.own([*model.parameters(), *model.buffers(), *inputs])

    def own(self, tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """As a recorder's, fake tensors included."""
        owned = list(tensors)
        for part in (part for tensor in owned for part in parts_of(tensor)):
            storage = part.untyped_storage()
            self._owned[storage._cdata] = StorageWeakRef(storage)
        return owned

    def saved_bytes(self) -> dict[str, int]:
        """Bytes by role, each storage once, in the role of its first reader; largest first."""
        totals: dict[str, int] = {}
        for row in self.store.rows:
            role = row.rule.role.value
            totals[role] = totals.get(role, 0) + row.saved_bytes
        small = sum(self.store.small.values())
        if small:
            totals["other"] = totals.get("other", 0) + small
        return dict(sorted(totals.items(), key=lambda item: -item[1]))

    def _is_borrowed(self, tensor: torch.Tensor) -> bool:
        if tensor.layout is not torch.strided or isinstance(tensor._base, torch.nn.Parameter):
            return True
        return tensor.untyped_storage()._cdata in self._owned

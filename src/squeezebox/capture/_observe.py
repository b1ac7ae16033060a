"""What autograd would save, and in which roles, when nothing is packed; for fake tensors too."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from squeezebox.capture._contracts import Choice
from squeezebox.capture._entries import Entry, Handle
from squeezebox.capture._held import Held
from squeezebox.capture._owned import Owned
from squeezebox.capture._packer import kept, waiting
from squeezebox.capture._recorder import Recorder
from squeezebox.capture._rules import Rule
from squeezebox.capture._store import Store
from squeezebox.memory import parts_of


@contextlib.contextmanager
def observing(model: torch.nn.Module, inputs: Iterable[torch.Tensor]) -> Iterator[Store]:
    """A context around a model's forward that holds every tensor itself, as plain PyTorch does.

    Storages, owners and roles are identified as in a session, so :func:`saved_bytes` of the store is what a
    report would call saved. Fake tensors count as plain ones: their storages have sizes and identities too.
    """
    store = Store(_KeepAll(), lambda means: _Keeper(), parts_of)
    recorder = Recorder(store, model, Owned(lambda tensor: tensor.layout is torch.strided))
    recorder.start_step()
    tensors = (*model.parameters(), *model.buffers(), *inputs)
    recorder.own(part for tensor in tensors for part in parts_of(tensor))
    with recorder:
        yield store


def saved_bytes(store: Store) -> dict[str, int]:
    """Bytes by role, each storage once, in the role of its first reader; largest first."""
    totals: dict[str, int] = {}
    for row in store.rows:
        role = row.rule.role.value
        totals[role] = totals.get(role, 0) + row.saved_bytes
    small = sum(store.small.values())
    if small:
        totals["other"] = totals.get("other", 0) + small
    return dict(sorted(totals.items(), key=lambda item: -item[1]))


class _KeepAll:
    """The policy of those who only look."""

    def choose(self, key: str, rule: Rule, tensor: torch.Tensor) -> Choice:
        """Hold the tensor itself."""
        return Choice(codec="keep")


class _Keeper:
    """Holds every tensor itself, whatever the rule says."""

    def pack(self, entry: Entry, handle: Handle, rule: Rule, options: Mapping[str, Any]) -> Held:
        """As a :class:`Packing`."""
        return entry.values or kept(entry, waiting(handle))

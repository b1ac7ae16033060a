"""What capture does with every tensor, told while it does it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Protocol

import torch

from squeezebox.capture._entries import Entry, Handle, Row
from squeezebox.capture._store import Store
from squeezebox.schema import Activity


class Watcher(Protocol):
    """Is told what time is spent on, and what becomes of tensors."""

    def begin(self, activity: Activity) -> None:
        """From now on, until :meth:`end`."""

    def end(self) -> None:
        """From now on again what was before."""

    def held(self, row: Row) -> None:
        """A tensor has been packed, or whatever is done with it; told again for each use of it."""

    def small(self, nbytes: int) -> None:
        """A tensor too small to be packed was left as it is."""

    def recomputed(self, row: Row) -> None:
        """A tensor is made again."""


@contextlib.contextmanager
def watching(store: Store, watcher: Watcher) -> Iterator[None]:
    """Tell ``watcher`` of everything that ``store`` does in here; nothing is held in another way for it."""
    watch = _Watch(store, watcher)
    watched = {
        "leave": watch.leave,
        "_pack": watch.pack,
        "_offload": watch.offload,
        "_unpack": watch.unpack,
        "_decode": watch.decode,
    }
    for name, method in watched.items():
        setattr(store, name, method)
    try:
        yield
    finally:
        for name in watched:
            delattr(store, name)


class _Watch:
    """The store's methods, with the watcher told."""

    def __init__(self, store: Store, watcher: Watcher) -> None:
        self._watcher = watcher
        self._store = store
        self._leave, self._pack, self._offload = store.leave, store._pack, store._offload
        self._unpack, self._decode = store._unpack, store._decode

    def leave(self, handle: Handle, *, borrowed: bool) -> None:
        small = self._store.small
        before = len(small)
        self._leave(handle, borrowed=borrowed)
        if len(small) > before:
            self._watcher.small(small[next(reversed(small))])

    def pack(self, entry: Entry, *arguments: Any) -> str:
        with self._spent_on(Activity.PACKING):
            form: str = self._pack(entry, *arguments)
        self._watcher.held(entry.row)
        return form

    def offload(self, entry: Entry, tensor: torch.Tensor) -> str:
        with self._spent_on(Activity.WAITING):
            return self._offload(entry, tensor)

    def unpack(self, handle: Handle) -> torch.Tensor:
        if not handle.form.startswith("pool-index"):
            return self._unpack(handle)
        with self._spent_on(Activity.UNPACKING):
            return self._unpack(handle)

    def decode(self, entry: Entry, form: str) -> torch.Tensor:
        if entry.ready is not None:
            return self._decode(entry, form)
        if entry.recipe is not None:
            self._watcher.recomputed(entry.row)
        activity = Activity.WAITING if entry.slot is not None else Activity.UNPACKING
        with self._spent_on(Activity.RECOMPUTING if entry.recipe is not None else activity):
            return self._decode(entry, form)

    @contextlib.contextmanager
    def _spent_on(self, activity: Activity) -> Iterator[None]:
        self._watcher.begin(activity)
        try:
            yield
        finally:
            self._watcher.end()

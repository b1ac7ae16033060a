"""What capture does with every tensor, reported while it does it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Protocol

from squeezebox.capture._entries import Row
from squeezebox.schema import Activity


class Watcher(Protocol):
    """Hears what time is spent on, and what becomes of tensors."""

    def begin(self, activity: Activity) -> None:
        """From now on, until :meth:`end`."""

    def end(self) -> None:
        """From now on again what was before."""

    def held(self, row: Row) -> None:
        """A tensor has been packed, or held in another way; called again for each use of it."""

    def small(self, nbytes: int) -> None:
        """A tensor too small to be packed was left as it is."""

    def recomputed(self, row: Row) -> None:
        """A tensor is recomputed."""


@contextlib.contextmanager
def spent_on(watcher: Watcher | None, activity: Activity) -> Iterator[None]:
    """Tell the watcher, if there is one, what time is spent on in here."""
    if watcher is not None:
        watcher.begin(activity)
    try:
        yield
    finally:
        if watcher is not None:
            watcher.end()

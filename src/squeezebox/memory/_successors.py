"""What is asked for after what, learned from the last time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Generic, TypeVar

Key = TypeVar("Key")


class Successors(Generic[Key]):
    """Says what comes next, by what came after the same two in a row the last time.

    Two tell forward from backward: a weight's neighbours come in the other order there.
    """

    def __init__(self) -> None:
        self._next: dict[tuple[Key | None, Key | None], Key] = {}
        self._last: tuple[Key | None, Key | None] = (None, None)

    def note(self, key: Key) -> None:
        """This one is asked for now."""
        self._next[self._last] = key
        self._last = (self._last[1], key)

    def following(self, most: int) -> Iterator[Key]:
        """Up to ``most`` that should come next, in order."""
        pair = self._last
        for _ in range(most):
            key = self._next.get(pair)
            if key is None:
                return
            yield key
            pair = (pair[1], key)

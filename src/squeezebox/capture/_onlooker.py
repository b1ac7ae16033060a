"""What capture tells those who look on while a step runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


def _ignored(*_: object) -> None:
    """What nobody wants to hear of."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Onlooker:
    """One function for each kind of event that somebody wants to hear of, called while it happens.

    Attributes:
        holding: capture begins to see to what an operator saves.
        held: it has seen to that. These two never enclose the operator itself.
        following: a lineage begins to note how an operator made its results.
        followed: it has noted that.
    """

    holding: Callable[[], object] = _ignored
    held: Callable[[], object] = _ignored
    following: Callable[[], object] = _ignored
    followed: Callable[[], object] = _ignored

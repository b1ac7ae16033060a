"""What capture tells those who look on while a step runs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch

from squeezebox.capture._entries import Row
from squeezebox.schema import Activity

_NOTHING = contextlib.nullcontext()


def _ignored(*_: object) -> None:
    """What nobody wants to hear of."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Onlooker:
    """One function for each kind of event that somebody wants to hear of, called while it happens.

    Attributes:
        given: a forward begins with these tensors.
        saved: it is decided how a row's tensor is held; once for each reader.
        small: a tensor of these bytes is left as it is, being too small to be packed.
        spending: until ``spent``, time goes to this activity, for this row.
        spent: from now on it goes again to what was before.
        holding: capture begins to see to what an operator saves.
        held: it has seen to that. These two never enclose the operator itself.
        following: a lineage begins to note how an operator made its results.
        followed: it has noted that.
    """

    given: Callable[[Iterable[torch.Tensor]], object] = _ignored
    saved: Callable[[Row], object] = _ignored
    small: Callable[[int], object] = _ignored
    spending: Callable[[Activity, Row], object] = _ignored
    spent: Callable[[], object] = _ignored
    holding: Callable[[], object] = _ignored
    held: Callable[[], object] = _ignored
    following: Callable[[], object] = _ignored
    followed: Callable[[], object] = _ignored


def spent_on(activity: Activity, row: Row, onlookers: tuple[Onlooker, ...]) -> AbstractContextManager[None]:
    """A context whose time goes to this activity, as onlookers hear."""
    return _spent_on(activity, row, onlookers) if onlookers else _NOTHING


@contextlib.contextmanager
def _spent_on(activity: Activity, row: Row, onlookers: tuple[Onlooker, ...]) -> Iterator[None]:
    for each in onlookers:
        each.spending(activity, row)
    try:
        yield
    finally:
        for each in onlookers:
            each.spent()

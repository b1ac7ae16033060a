"""What capture tells those who look on while a step runs, and how long its own work takes."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from squeezebox import codecs
from squeezebox.capture._entries import Row
from squeezebox.capture._layouts import Scale
from squeezebox.capture._lineage import Call, Derivation
from squeezebox.schema import Activity

Trial = Callable[..., codecs.Packed]
Derive = Callable[[], Derivation | None]
Again = Callable[[], torch.Tensor]
Offered = Callable[[Row, str, torch.Tensor, Scale | None, float, Trial, Again], object]


class Running(Protocol):
    """What an onlooker may ask of what runs around a forward."""

    @property
    def module(self) -> str:
        """Path of the module whose forward is running."""

    @property
    def catches(self) -> bool:
        """Whether what is saved now is saved by a plain operator and comes to this recorder."""


Ran = Callable[[Any, Any, Any, Any, Running], object]

_NOTHING = contextlib.nullcontext()


def ignored(*_: object) -> None:
    """What nobody wants to hear of."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Onlooker:
    """One function for each kind of event that somebody wants to hear of, called while it happens.

    Attributes:
        measures: whether it wants to see every tensor let go, also those to be held exactly, and to ask how
            each was made until the step is over.
        given: a forward begins with these tensors.
        ran: a function of torch has returned. Given are the function, its arguments, keywords and result, and
            what runs around the forward.
        named: a saved tensor of the running function has got this key.
        calling: an operator that can be repeated begins, where the store has a lineage.
        called: it has ended.
        saving: packing of a row's tensor begins; the tensor is the original. The last argument says, once the
            step is over, how it was made.
        offered: a row's values may be packed. Given are a codec, the flat tensor, its scale and the highest
            bound. ``trial(codec, bound)``, in units of the scale, packs them by any that serves and keeps
            nothing. ``again()`` recomputes the tensor, from what is held of the others.
        saved: it is decided how a row's tensor is held; once for each reader.
        using: unpacking of a row's tensor begins.
        used: it has ended; of these rows there are buffers.
        released: autograd has let go of a row's tensor.
        small: a tensor of these bytes is left as it is, being too small to be packed.
        spending: until ``spent``, time goes to this activity, for this row.
        spent: from now on it goes again to what was before.
        holding: capture begins to see to what an operator saves.
        held: it has seen to that. These two never enclose the operator itself.
        following: a lineage begins to note how an operator made its results.
        followed: it has noted that.
    """

    measures: bool = False
    given: Callable[[Iterable[torch.Tensor]], object] = ignored
    ran: Ran = ignored
    named: Callable[[str], object] = ignored
    calling: Callable[[Call], object] = ignored
    called: Callable[[Call], object] = ignored
    saving: Callable[[Row, torch.Tensor, Derive], object] = ignored
    offered: Offered = ignored
    saved: Callable[[Row], object] = ignored
    using: Callable[[Row], object] = ignored
    used: Callable[[Row, Sequence[Row]], object] = ignored
    released: Callable[[Row], object] = ignored
    small: Callable[[int], object] = ignored
    spending: Callable[[Activity, Row], object] = ignored
    spent: Callable[[], object] = ignored
    holding: Callable[[], object] = ignored
    held: Callable[[], object] = ignored
    following: Callable[[], object] = ignored
    followed: Callable[[], object] = ignored


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


class Stopwatch:
    """Seconds spent on holding tensors, and on following how they are made, while ``onlooker`` looks on."""

    def __init__(self) -> None:
        self.holding = self.following = self._begun = 0.0

    @property
    def onlooker(self) -> Onlooker:
        """What a store shows its steps to."""
        return Onlooker(holding=self._begin, held=self._hold, following=self._begin, followed=self._follow)

    def _begin(self) -> None:
        self._begun = time.perf_counter()

    def _hold(self) -> None:
        self.holding += time.perf_counter() - self._begun

    def _follow(self) -> None:
        self.following += time.perf_counter() - self._begun

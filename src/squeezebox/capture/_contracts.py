"""Who decides how a tensor is held, and who hears of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from squeezebox import codecs
from squeezebox.capture._entries import Row
from squeezebox.capture._layouts import Scale
from squeezebox.capture._lineage import Call, Derivation
from squeezebox.capture._rules import Rule


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """A codec's name and its error bound: absolute, or in units of the tensor's scale (``scaled``)."""

    codec: str
    bound: float | None = None
    scaled: bool = False


class Policy(Protocol):
    """Decides how a tensor of which backward reads the values is held."""

    def choose(self, key: str, rule: Rule, tensor: torch.Tensor) -> Choice:
        """The codec for a flat tensor; ``Choice(codec="keep")`` holds the tensor itself."""


Trial = Callable[..., codecs.Packed]


class Listener(Protocol):
    """Hears what becomes of every saved tensor in one step."""

    def calling(self, call: Call) -> None:
        """An operator that can be repeated begins."""

    def called(self, call: Call) -> None:
        """It has ended."""

    def saving(self, row: Row, tensor: torch.Tensor, derive: Callable[[], Derivation | None]) -> None:
        """Packing begins; ``tensor`` is the original. ``derive()``, at the end, says how it was made."""

    def offered(
        self,
        row: Row,
        codec: str,
        flat: torch.Tensor,
        scale: Scale | None,
        highest: float,
        trial: Trial,
        again: Callable[[], torch.Tensor],
    ) -> None:
        """Its values may be packed by ``codec``, at bounds up to ``highest``.

        ``trial(codec, bound)``, in units of ``scale``, packs them by any that serves and keeps nothing.

        ``again()`` recomputes it as ``derive()`` says, from what is held of the others.
        """

    def saved(self, row: Row) -> None:
        """Packing has ended."""

    def using(self, row: Row) -> None:
        """Unpacking begins."""

    def used(self, row: Row, unpacked: Sequence[Row]) -> None:
        """Unpacking has ended; of ``unpacked`` there are buffers."""

    def released(self, row: Row) -> None:
        """Autograd has let go of it."""

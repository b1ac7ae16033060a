"""What helps a codec, in addition to the tensor and its bound."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from squeezebox.codecs._blocks import Arena


@dataclass(frozen=True, kw_only=True, slots=True)
class Hints:
    """What helps to pack a tensor. All but a scale may be ignored.

    ``scale`` (float32, one positive number a channel): the bound is in its units. ``inner`` elements next to
    each other in memory share a channel, and the channels repeat: the number of pixels of an NCHW map, 1 for
    channels_last. A codec that cannot do so refuses a scale, unless it is exact.

    ``lag`` is the distance, in elements of memory order, to the one that resembles each (0: none, -1: choose
    by a trial). ``dither`` > 0 moves the steps by another phase every ``dither`` elements, so that equal
    values do not have equal errors; 0: all share one. ``seed`` is that of stochastic rounding. ``room`` are
    flat bytes of the host in which the result is made where it fits, ``arena`` is where blocks go.
    """

    lag: int = -1
    scale: Tensor | None = None
    inner: int = 1
    dither: int = 0
    seed: int = 0
    room: Tensor | None = None
    arena: Arena | None = None


NO_HINTS = Hints()

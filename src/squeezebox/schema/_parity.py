"""What a comparison of two models finds, place by place."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class PlaceParity:
    """One place where values pass in both: what a layer's call puts out or is given, or a gradient.

    ``layer`` and ``what`` name the code that made the values: a layer's output, the code before one of its
    parts, a gradient. ``own`` is the largest difference with a's values coming in, ``free`` the one with what
    came by itself: ``max |a - b| / (|a| + rms(a))`` over elements. Either is None where the two cannot be
    compared, and ``why`` says it. ``allowed`` is up to where ``own`` counts as agreement.
    """

    layer: str
    what: str
    backward: bool
    own: float | None
    free: float | None
    allowed: float
    why: str = ""

    @property
    def agrees(self) -> bool:
        """Whether ``own`` is within what is allowed."""
        return self.own is not None and self.own <= self.allowed


@dataclass(frozen=True, kw_only=True, slots=True)
class ParityFigures:
    """All places in the order of execution, and what their differences do to the output.

    ``output`` is the final output's difference, None where b's cannot be compared. ``share`` is the part of
    the final change that goes when the first place that differs is mended. ``flipped`` is the share of
    ``predictions`` that are another class's, with its 95 % interval; None where there are no classes.
    """

    batches: int
    samples: int
    tolerance: float
    layers: int
    places: tuple[PlaceParity, ...]
    output: float | None
    share: float | None = None
    predictions: int = 0
    flipped: float | None = None
    flipped_low: float | None = None
    flipped_high: float | None = None
    notes: tuple[str, ...] = ()

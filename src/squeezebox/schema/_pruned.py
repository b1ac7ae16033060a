"""What a pruning takes away."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class PrunedChannels:
    """Channels that can only go together. ``places`` are the parameters and buffers that have them.

    ``kept`` are the numbers of those that stay, in order.
    """

    places: tuple[str, ...]
    channels: int
    kept: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class PruningFigures:
    """At which of the optimizer's steps, what went, and elements of parameters before and after."""

    step: int
    groups: tuple[PrunedChannels, ...]
    parameters_before: int
    parameters_after: int
    difference: float
    """Of the narrowed model's output from the masked one's: ``max |a - b| / max |a|``."""

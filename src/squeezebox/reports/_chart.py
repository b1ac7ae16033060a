"""What a drawing of a pipeline needs to know: plain names and seconds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple


class ChartKind(Enum):
    """What an action does, in a drawing's words."""

    FORWARD = "forward"
    BACKWARD = "backward"
    INPUT = "input gradient"
    WEIGHT = "weight gradient"
    UPDATE = "update"


class ChartSpan(NamedTuple):
    """An action, and from when to when it runs, in seconds; an update's microbatch is its batch."""

    kind: ChartKind
    stage: int
    microbatch: int
    batch: int
    start: float
    end: float

    def __str__(self) -> str:
        what = "batch" if self.kind is ChartKind.UPDATE else "microbatch"
        return f"{self.kind.value} of {what} {self.microbatch} at stage {self.stage}"


@dataclass(frozen=True, kw_only=True, slots=True)
class PipelineChart:
    """What every rank does when, its actions in order, and what to write above it.

    ``activation_bytes``, a number a stage, are what a microbatch leaves there from its forward to the end of
    its backward.
    """

    title: str
    notes: tuple[str, ...]
    rows: tuple[tuple[ChartSpan, ...], ...]
    activation_bytes: tuple[int, ...] | None = None

    @property
    def seconds(self) -> float:
        """From 0 to the last action's end."""
        return max((span.end for row in self.rows for span in row), default=0.0)

    def loops(self) -> dict[int, int]:
        """Each stage's place among those of its rank."""
        owned = (sorted({span.stage for span in row}) for row in self.rows)
        return {stage: place for stages in owned for place, stage in enumerate(stages)}

    def live(self, rank: int) -> Iterator[tuple[float, int, int]]:
        """When a rank's live microbatches change, how many there are from then on, and their bytes."""
        count = held = 0
        for span in self.rows[rank]:
            if span.kind in _FREES or span.kind is ChartKind.FORWARD:
                forward = span.kind is ChartKind.FORWARD
                change = 1 if forward else -1
                count += change
                held += change * (self.activation_bytes[span.stage] if self.activation_bytes else 0)
                yield span.start if forward else span.end, count, held


_FREES = (ChartKind.BACKWARD, ChartKind.WEIGHT)

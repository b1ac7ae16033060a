"""What a pipeline's batch takes, as text and as JSON."""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass
from typing import Any

from squeezebox.reports._report import human_bytes
from squeezebox.schema import checked, load_json, plain_fields, save_json

_ROWS = 16  # as many ranks are shown one by one
_PER_BATCH = ("seconds_per_batch", "ideal_seconds_per_batch")


@dataclass(frozen=True, kw_only=True, slots=True)
class PipelineRank:
    """What one rank does, holds and sends.

    ``live_microbatches`` counts those of one stage whose activations are there at once, at most, the rank's
    stages together; ``live_bytes`` are theirs, None where nobody said how many a microbatch leaves.
    ``weight_versions`` are the most that one of its stages holds. ``gathers`` counts how often weights are
    gathered if FSDP leaves one stage whole at a time.
    """

    rank: int
    busy_seconds: float
    live_microbatches: int
    live_bytes: int | None
    weight_versions: int
    transfers: int
    gathers: int


@dataclass(frozen=True, kw_only=True, slots=True)
class PipelineReport:
    """A schedule as simulated. ``str()`` is a table: of many ranks, the first, the last and the worst.

    ``bubble`` is the share of all ranks' time in which they wait. The ideal is the busiest rank's work: no
    order of the same actions takes less.
    """

    schedule: str
    stages: int
    microbatches: int
    batches: int
    seconds: float
    bubble: float
    ranks: tuple[PipelineRank, ...]

    @property
    def seconds_per_batch(self) -> float:
        """All seconds, shared by the batches."""
        return self.seconds / self.batches

    @property
    def ideal_seconds_per_batch(self) -> float:
        """What it would be if the busiest rank never waited."""
        return max(rank.busy_seconds for rank in self.ranks) / self.batches

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as written by :meth:`save`."""
        return plain_fields(self) | {name: getattr(self, name) for name in _PER_BATCH}

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it whole or not at all; OutputError if the path cannot be written."""
        save_json(path, self.to_dict())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> PipelineReport:
        """What :meth:`save` wrote; FormatError if the file is missing, damaged, or of another kind."""
        return load_json(
            path,
            "pipeline report",
            "its save(path)",
            lambda values: cls(**checked(cls, values, besides=_PER_BATCH)),
        )

    def title(self) -> str:
        """What was simulated."""
        counts = ((len(self.ranks), "rank"), (self.stages, "stage"), (self.microbatches, "microbatch"))
        parts = ", ".join(_counted(number, noun) for number, noun in counts)
        return f"{self.schedule}: {parts}" + (f", {self.batches} batches" if self.batches > 1 else "")

    def summary(self) -> str:
        """Seconds a batch, the ideal, and the bubble."""
        return (
            f"{self.seconds_per_batch:.6g} s a batch; ideal {self.ideal_seconds_per_batch:.6g} s; "
            f"bubble {self.bubble:.1%}"
        )

    def holdings(self) -> str:
        """The most that any rank holds."""
        live = max(rank.live_microbatches for rank in self.ranks)
        nbytes = max(rank.live_bytes or 0 for rank in self.ranks)
        versions = max(rank.weight_versions for rank in self.ranks)
        size = f" ({human_bytes(nbytes)})" if nbytes else ""
        return (
            f"at most {_counted(live, 'live microbatch')}{size} a rank, "
            f"{_counted(versions, 'version')} of the weights"
        )

    def __str__(self) -> str:
        shown = self._shown()
        lines = [self.title(), self.summary(), "", *_table([self.ranks[rank] for rank in shown])]
        if len(shown) < len(self.ranks):
            lines.append(
                f"of {len(self.ranks)} ranks: the first, the last, and the first with the most of each"
            )
        return "\n".join(lines)

    def _shown(self) -> list[int]:
        """All ranks if they are few; else the first, the last, and the highest of each column."""
        numbers = range(len(self.ranks))
        if len(numbers) <= _ROWS:
            return list(numbers)
        names = [item.name for item in dataclasses.fields(PipelineRank)][1:]
        worst = {max(numbers, key=lambda rank: getattr(self.ranks[rank], name) or 0) for name in names}  # noqa: B023
        return sorted({0, len(numbers) - 1} | worst)


def _table(ranks: list[PipelineRank]) -> list[str]:
    with_bytes = any(rank.live_bytes is not None for rank in ranks)
    header = ["rank", "busy", "live", *(["bytes"] if with_bytes else []), "versions", "sends", "gathers"]
    rows = [header, *(_row(rank, with_bytes) for rank in ranks)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(header))]
    return ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]


def _row(rank: PipelineRank, with_bytes: bool) -> list[str]:
    return [
        str(rank.rank),
        f"{rank.busy_seconds:.6g} s",
        str(rank.live_microbatches),
        *([human_bytes(rank.live_bytes or 0)] if with_bytes else []),
        str(rank.weight_versions),
        str(rank.transfers),
        str(rank.gathers),
    ]


def _counted(number: int, noun: str) -> str:
    plural = f"{noun}es" if noun.endswith("ch") else f"{noun}s"
    return f"{number} {noun if number == 1 else plural}"

"""What a pruning took away, as text and as JSON."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from squeezebox.reports._saved import SavedFigures
from squeezebox.schema import PruningFigures

_PLACES = 3  # named in text; JSON has all


@dataclass(frozen=True, slots=True)
class PruningReport(SavedFigures):
    """Channels that went, set by set. ``str()`` is a table."""

    KIND, AGAIN = "pruning", "pruning.report().save(path)"
    FIGURES = PruningFigures

    figures: PruningFigures

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        figures = self.figures
        gone = sum(each.channels - len(each.kept) for each in figures.groups)
        yield (
            f"after step {figures.step}: {gone} of {sum(each.channels for each in figures.groups)} channels "
            f"went, and {figures.parameters_before - figures.parameters_after} of "
            f"{figures.parameters_before} parameters; output off from the masked one's by "
            f"{figures.difference:.1e}"
        )
        for each in figures.groups:
            more = f" and {len(each.places) - _PLACES} more" if len(each.places) > _PLACES else ""
            yield f"{each.channels:>6} -> {len(each.kept):<6} {', '.join(each.places[:_PLACES])}{more}"

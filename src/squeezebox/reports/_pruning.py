"""What a pruning took away, as text and as JSON."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from squeezebox.schema import PruningFigures, decoded, load_json, plain_fields, save_json

_PLACES = 3  # named in text; JSON has all
_AGAIN = "pruning.report().save(path)"


@dataclass(frozen=True, slots=True)
class PruningReport:
    """Channels that went, set by set. ``str()`` is a table."""

    figures: PruningFigures

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as written by :meth:`save`."""
        return plain_fields(self.figures)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it whole or not at all; OutputError if the path cannot be written."""
        save_json(path, self.to_dict())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> PruningReport:
        """What :meth:`save` wrote; FormatError if the file is missing, damaged, or of another kind."""
        return cls(load_json(path, "pruning", _AGAIN, lambda values: decoded(PruningFigures, values)))

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

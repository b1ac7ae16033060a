"""What is installed and whether it is as it was installed, as text and as JSON."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from squeezebox.reports._report import plain, write_whole
from squeezebox.schema import CheckedEnvironment, CheckedPackage


@dataclass(frozen=True, slots=True)
class EnvironmentCheck:
    """Versions, devices, packages, and what is wrong with them. ``str()`` is a page of text."""

    figures: CheckedEnvironment

    @property
    def healthy(self) -> bool:
        """Whether nothing is wrong."""
        return not self.figures.faults

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as written by :meth:`to_json`."""
        values: dict[str, Any] = plain(self.figures)
        return values | {"healthy": self.healthy}

    def to_json(self, path: str | os.PathLike[str]) -> None:
        """Write it whole or not at all; OutputError if the path cannot be written."""
        write_whole(path, json.dumps(self.to_dict(), indent=1) + "\n")

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        figures = self.figures
        width = max(map(len, figures.facts))
        yield from (f"{name:<{width}}  {fact}" for name, fact in figures.facts.items())
        yield ""
        width = max((len(each.name) for each in figures.packages), default=0)
        yield from (f"{each.name:<{width}}  {_package(each)}" for each in figures.packages)
        if figures.notes:
            yield ""
            yield from figures.notes
        if figures.faults:
            yield ""
        for each in figures.faults:
            detail = f" ({each.detail})" if each.detail else ""
            yield f"{each.package}: {each.subject}: {each.fault.value}{detail}"


def _package(package: CheckedPackage) -> str:
    if package.skipped:
        return f"{package.version}, not checked: {package.skipped}"
    return (
        f"{package.version}, checked {package.files} files, byte code of {package.byte_code_files}, "
        f"classes of {package.loaded} loaded modules"
    )

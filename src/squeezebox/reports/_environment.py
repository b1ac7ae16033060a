"""What is installed and whether it is as it was installed, as text and as JSON."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from squeezebox.schema import (
    CheckedEnvironment,
    CheckedPackage,
    checked,
    load_json,
    plain_fields,
    save_json,
)


@dataclass(frozen=True, slots=True)
class EnvironmentCheck:
    """Versions, devices, packages, and what is wrong with them. ``str()`` is a page of text."""

    figures: CheckedEnvironment

    @property
    def healthy(self) -> bool:
        """Whether nothing is wrong."""
        return not self.figures.faults

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as written by :meth:`save`."""
        return plain_fields(self.figures) | {"healthy": self.healthy}

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it whole or not at all; OutputError if the path cannot be written."""
        save_json(path, self.to_dict())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> EnvironmentCheck:
        """What :meth:`save` wrote; FormatError if the file is missing, damaged, or of another kind."""
        return load_json(path, "checked environment", "squeezebox.check_environment().save(path)", _from_dict)

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


def _from_dict(values: Any) -> EnvironmentCheck:
    return EnvironmentCheck(CheckedEnvironment(**checked(CheckedEnvironment, values, besides=["healthy"])))


def _package(package: CheckedPackage) -> str:
    if package.skipped:
        return f"{package.version}, not checked: {package.skipped}"
    return (
        f"{package.version}, checked {package.files} files, byte code of {package.byte_code_files}, "
        f"classes of {package.loaded} loaded modules"
    )

"""How every result is kept: as JSON, whole or not at all, and read again with each field checked."""

from __future__ import annotations

import os
from typing import Any, ClassVar, TypeVar

from squeezebox.schema import checked, decoded, load_json, plain_fields, save_json

S = TypeVar("S", bound="Saved")
F = TypeVar("F", bound="SavedFigures")


class Saved:
    """A result, a dataclass, that ``save`` writes and ``load`` reads."""

    __slots__ = ()
    KIND: ClassVar[str]  # what its file is, as an error calls it
    AGAIN: ClassVar[str]  # what makes such a file, as an error calls it

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as written by :meth:`save`."""
        return plain_fields(self)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it whole or not at all; OutputError if the path cannot be written."""
        save_json(path, self.to_dict())

    @classmethod
    def load(cls: type[S], path: str | os.PathLike[str]) -> S:
        """What :meth:`save` wrote; FormatError if the file is missing, damaged, or of another kind."""
        return load_json(path, cls.KIND, cls.AGAIN, cls.from_dict)

    @classmethod
    def from_dict(cls: type[S], values: Any, where: str = "") -> S:
        """The result of such values; FormatError names the field that is wrong, which lies at ``where``."""
        return cls(**checked(cls, values, where))


class SavedFigures(Saved):
    """A result with the one field ``figures``, of the dataclass ``FIGURES``, whose values are the file."""

    __slots__ = ()
    FIGURES: ClassVar[type]
    figures: Any

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as written by :meth:`save`."""
        return plain_fields(self.figures)

    @classmethod
    def from_dict(cls: type[F], values: Any, where: str = "") -> F:
        """The result of such values; FormatError names the field that is wrong, which lies at ``where``."""
        return cls(decoded(cls.FIGURES, values, where))  # type: ignore[call-arg]

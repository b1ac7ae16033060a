"""Files that are written whole or not at all, and read whole or refused."""

from __future__ import annotations

import errno
import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from squeezebox.schema._errors import FormatError, OutputError
from squeezebox.schema._fields import without_duplicates

T = TypeVar("T")


def save_json(path: str | os.PathLike[str], values: dict[str, Any]) -> None:
    """Write plain values as JSON, whole or not at all.

    Raises:
        OutputError: the folder is missing or not writable, or the disk is full.
    """
    write_whole(path, json.dumps(values, indent=1) + "\n")


def load_json(path: str | os.PathLike[str], kind: str, again: str, make: Callable[[Any], T]) -> T:
    """What ``make`` makes of a JSON file's values.

    Args:
        path: of the file.
        kind: what the file should be, as an error calls it.
        again: what makes such a file, as an error calls it.
        make: raises FormatError, with the field's name, where the values are something else.

    Raises:
        FormatError: the file is missing, damaged, or of another kind or version.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
        return make(json.loads(text, object_pairs_hook=without_duplicates))
    except (OSError, ValueError) as error:  # FormatError is a ValueError
        raise FormatError(
            f"'{os.fspath(path)}' is no {kind} that this Squeezebox can read: {error}. Write it again with "
            f"{again}."
        ) from error


def write_whole(path: str | os.PathLike[str], content: str | bytes) -> None:
    """Write ``content`` to ``path`` by way of a temporary file in the same folder.

    Raises:
        OutputError: the folder is missing or not writable, or the disk is full.
    """
    target = Path(path)
    temporary = ""
    try:
        with tempfile.NamedTemporaryFile(dir=target.parent, prefix=f".{target.name}.", delete=False) as file:
            temporary = file.name
            file.write(content.encode() if isinstance(content, str) else content)
        os.replace(temporary, target)
    except OSError as error:
        if temporary:
            Path(temporary).unlink(missing_ok=True)
        raise _unwritable(target, error) from error


def require_writable(path: str | os.PathLike[str]) -> None:
    """Make sure that :func:`write_whole` will find its folder, before work that would be lost.

    Raises:
        OutputError: the folder is missing or not writable, or ``path`` is a folder itself.
    """
    target = Path(path)
    try:
        if target.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        with tempfile.NamedTemporaryFile(dir=target.parent, prefix=f".{target.name}."):
            pass
    except OSError as error:
        raise _unwritable(target, error) from error


def _unwritable(target: Path, error: OSError) -> OutputError:
    return OutputError(
        f"cannot write {target}: {error.strerror or error}. Nothing was written; choose a folder that "
        "exists and is writable."
    )

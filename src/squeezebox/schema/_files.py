"""Values as JSON has them, in files that are written whole or not at all, and read whole or refused."""

from __future__ import annotations

import collections.abc
import contextlib
import dataclasses
import enum
import errno
import functools
import json
import math
import os
import secrets
import shutil
import tempfile
import typing
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from squeezebox.schema._errors import FormatError, OutputError

_SIGNED = frozenset({"seconds", "dropped_at", "idle_until"})  # a measured difference; -1 for never


def plain(value: Any) -> Any:
    """Dataclasses as dictionaries, enums as their values, tuples as lists; and so on within.

    What has a ``to_dict()`` of its own is what that gives.
    """
    if hasattr(value, "to_dict"):
        return value.to_dict()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return plain_fields(value)
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, (tuple, list)):
        return [plain(item) for item in value]
    if isinstance(value, collections.abc.Mapping):
        return {plain(key): plain(item) for key, item in value.items()}
    return value


def plain_fields(value: Any) -> dict[str, Any]:
    """A dataclass's fields by name, as :func:`plain` gives them."""
    return {item.name: plain(getattr(value, item.name)) for item in dataclasses.fields(value)}


def plain_flat(value: Any, inner: str) -> dict[str, Any]:
    """As :func:`plain_fields`, with those of the field ``inner`` in its place."""
    values = plain_fields(value)
    within = values.pop(inner)
    return {**values, **within}


def decoded(kind: Any, value: Any, where: str = "", *, any_number: bool = False) -> Any:
    """A value of any type from what :func:`plain` gave, by way of JSON.

    Whole numbers are from 0, other numbers finite and from 0 (``seconds`` may be below), text is text. Enums
    are made of their values, dataclasses of objects, tuples of lists, dictionaries of objects; what has a
    ``from_dict(values, where)`` of its own is what that gives.

    Args:
        kind: a type, as a dataclass's field has it.
        value: what JSON gave.
        where: its place in the file, for errors.
        any_number: numbers that are not whole may be below 0, and null stands for NaN.

    Raises:
        FormatError: names the field, its value, and what it should be.
    """
    inner, origin = typing.get_args(kind), typing.get_origin(kind)
    if type(None) in inner:
        others = [each for each in inner if each is not type(None)]
        return None if value is None else decoded(others[0], value, where, any_number=any_number)
    if hasattr(kind, "from_dict"):
        return kind.from_dict(value, where)
    if dataclasses.is_dataclass(kind):
        return typing.cast(Any, kind)(**checked(kind, value, where, any_number=any_number))
    if origin is tuple:
        _require(isinstance(value, list), value, where, "a list")
        kinds = [inner[0]] * len(value) if inner[-1] is ... else inner
        _require(len(kinds) == len(value), value, where, f"a list of {len(kinds)}")
        return tuple(
            decoded(each, item, f"{where}[{number}]", any_number=any_number)
            for number, (each, item) in enumerate(zip(kinds, value, strict=True))
        )
    if origin in (dict, collections.abc.Mapping):
        _require(isinstance(value, dict), value, where, "an object")
        return {
            decoded(inner[0], key, where): decoded(inner[1], each, _joined(where, key), any_number=any_number)
            for key, each in value.items()
        }
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return _member(kind, value, where)
    return _value(kind, value, where, any_number)


def checked(
    kind: Any, values: Any, where: str = "", besides: Iterable[str] = (), *, any_number: bool = False
) -> dict[str, Any]:
    """The fields of the dataclass ``kind`` from a JSON object, each as :func:`decoded` gives it.

    Args:
        kind: a dataclass, of which every field must be there.
        values: what JSON gave.
        where: the object's place in the file, before a field's name in an error.
        besides: further keys that the object may have.
        any_number: as :func:`decoded` takes it.

    Raises:
        FormatError: names the field, its value, and what it should be.
    """
    _require(isinstance(values, dict), values, where or "the file", "an object")
    names = [item.name for item in dataclasses.fields(kind)]
    unknown = sorted(set(values) - set(names) - set(besides))
    missing = [name for name in names if name not in values]
    for problem, found in (("missing", missing), ("unknown", unknown)):
        if found:
            raise FormatError(f"{_joined(where, found[0])} is {problem}")
    types = _types(kind)
    return {
        name: decoded(types[name], values[name], _joined(where, name), any_number=any_number)
        for name in names
    }


def checked_flat(kind: Any, inner: str, values: Any, where: str) -> dict[str, Any]:
    """As :func:`checked`, from what :func:`plain_flat` gave."""
    types = dict(_types(kind))
    nested = types.pop(inner)
    found = {inner: nested(**checked(nested, values, where, types))}
    for name, each in types.items():
        if name not in values:
            raise FormatError(f"{_joined(where, name)} is missing")
        found[name] = decoded(each, values[name], _joined(where, name))
    return found


def without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object; FormatError where a key is there twice (json's ``object_pairs_hook``)."""
    values = dict(pairs)
    if len(values) < len(pairs):
        keys = [key for key, _ in pairs]
        raise FormatError(f"{next(key for key in keys if keys.count(key) > 1)} is there twice in one object")
    return values


@functools.cache
def _types(kind: type) -> dict[str, Any]:
    """Its fields' types, which take long to find."""
    return typing.get_type_hints(kind)


def _joined(where: str, name: str) -> str:
    return f"{where}.{name}" if where else name


def _value(kind: Any, value: Any, field: str, any_number: bool) -> Any:
    if kind is float and any_number and value is None:
        return math.nan
    fits, what = _CHECKS.get(kind, (lambda _: True, ""))
    signed = field.rpartition(".")[2] in _SIGNED or (kind is float and any_number)
    _require(fits(value) and (signed or kind not in (int, float) or value >= 0), value, field, what)
    return float(value) if kind is float else value


def _require(fits: bool, value: Any, where: str, what: str) -> None:
    if not fits:
        raise FormatError(f"{where} is {_shown(value)}, not {what}")


def _member(kind: type[enum.Enum], value: Any, field: str) -> enum.Enum:
    for member in kind:
        if member.value == value:
            return member
    raise FormatError(f"{field} is {_shown(value)}, not one of {', '.join(str(m.value) for m in kind)}")


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_finite(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


_CHECKS: dict[Any, tuple[Callable[[Any], bool], str]] = {
    int: (_is_whole, "a whole number from 0"),
    float: (_is_finite, "a finite number from 0"),
    str: (lambda value: isinstance(value, str), "text"),
    bool: (lambda value: isinstance(value, bool), "true or false"),
}


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
    return load_text(
        path, kind, again, lambda text: make(json.loads(text, object_pairs_hook=without_duplicates))
    )


def load_text(path: str | os.PathLike[str], kind: str, again: str, make: Callable[[str], T]) -> T:
    """What ``make`` makes of a file's text; arguments and errors are those of :func:`load_json`."""
    try:
        return make(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise FormatError(f"No such file: '{os.fspath(path)}'. Make the {kind} with {again}.") from error
    except (OSError, ValueError, RecursionError) as error:  # FormatError is a ValueError
        raise FormatError(
            f"'{os.fspath(path)}' is no {kind} that this Squeezebox can read: {error}. Write it again with "
            f"{again}."
        ) from error


def write_whole(path: str | os.PathLike[str], content: str | bytes) -> None:
    """Write ``content`` to ``path``, whole or not at all (:func:`whole_file`).

    Raises:
        OutputError: the folder is missing or not writable, or the disk is full.
    """
    try:
        with whole_file(path) as file:
            file.write(content.encode() if isinstance(content, str) else content)
    except OSError as error:
        raise _unwritable(path, error) from error


@contextlib.contextmanager
def whole_file(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """A new file that takes the place of ``path`` at the end, or is gone where that is not reached.

    It keeps the rights of the one before. A link stays, and leads to the new file. What is no file, such as
    ``/dev/null`` or a pipe, is written to as it is.

    Raises:
        OSError: it cannot be written.
    """
    target = _target(path)
    if target is None:
        with open(path, "wb") as file:
            yield file
        return
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
    try:
        with temporary.open("xb") as file:
            yield file
        if target.exists():
            shutil.copymode(target, temporary)
        os.replace(temporary, target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def require_writable(path: str | os.PathLike[str]) -> None:
    """Make sure that :func:`write_whole` will find its folder, before work that would be lost.

    Raises:
        OutputError: the folder is missing or not writable, or ``path`` is a folder itself.
    """
    try:
        target = _target(path)
        if target is not None:
            with tempfile.NamedTemporaryFile(dir=target.parent, prefix=f".{target.name}."):
                pass
    except OSError as error:
        raise _unwritable(path, error) from error


def _target(path: str | os.PathLike[str]) -> Path | None:
    """The file behind links, there or not yet; None of what is no file, OSError of a folder."""
    given = Path(path)
    if given.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    if given.exists() and not given.is_file():
        return None
    return Path(os.path.realpath(given))


def _unwritable(path: str | os.PathLike[str], error: OSError) -> OutputError:
    return OutputError(
        f"cannot write {os.fspath(path)}: {error.strerror or error}. Nothing was written; choose a folder "
        "that exists and is writable."
    )

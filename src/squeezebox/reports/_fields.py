"""Checked values of a JSON object, by the types that a dataclass gives its fields."""

from __future__ import annotations

import dataclasses
import enum
import math
import typing
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from squeezebox.schema import FormatError

_SIGNED = frozenset({"seconds"})  # beyond keeping a tensor: a measured difference


def checked(kind: type, values: Any, where: str, besides: Iterable[str] = ()) -> dict[str, Any]:
    """The fields of the dataclass ``kind`` from a JSON object; enums are made of their values.

    Whole numbers are from 0, other numbers finite and from 0 (``seconds`` may be below), text is text; a
    tuple of texts comes from a list.

    Args:
        kind: a dataclass, of which every field must be there.
        values: what JSON gave.
        where: the object's place in the file, before a field's name in an error.
        besides: further keys that the object may have.

    Raises:
        FormatError: names the field, its value, and what it should be.
    """
    types = _require_fields(kind, values, where, besides)
    return {name: _value(each, values[name], _joined(where, name)) for name, each in types.items()}


def decoded(kind: Any, value: Any, where: str = "") -> Any:
    """A value of any type from what JSON gave; as :func:`checked`, and so on within.

    Dataclasses come from objects, tuples from lists, dictionaries from objects.

    Raises:
        FormatError: names the field, its value, and what it should be.
    """
    inner, origin = typing.get_args(kind), typing.get_origin(kind)
    if type(None) in inner:
        others = [each for each in inner if each is not type(None)]
        return None if value is None else decoded(others[0], value, where)
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        types = _require_fields(kind, value, where, ())
        return kind(**{name: decoded(types[name], value[name], _joined(where, name)) for name in types})
    if origin is tuple:
        if not isinstance(value, list):
            raise FormatError(f"{where} is {_shown(value)}, not a list")
        return tuple(decoded(inner[0], each, f"{where}[{number}]") for number, each in enumerate(value))
    if origin is dict:
        if not isinstance(value, dict):
            raise FormatError(f"{where} is {_shown(value)}, not an object")
        return {key: decoded(inner[1], each, _joined(where, key)) for key, each in value.items()}
    return _value(kind, value, where)


def without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object; FormatError where a key is there twice (json's ``object_pairs_hook``)."""
    values = dict(pairs)
    if len(values) < len(pairs):
        keys = [key for key, _ in pairs]
        raise FormatError(f"{next(key for key in keys if keys.count(key) > 1)} is there twice in one object")
    return values


def _require_fields(kind: Any, values: Any, where: str, besides: Iterable[str]) -> dict[str, Any]:
    """The dataclass's fields and their types, if ``values`` has them."""
    if not isinstance(values, dict):
        raise FormatError(f"{where or 'the file'} is {_shown(values)}, not an object")
    names = [item.name for item in dataclasses.fields(kind)]
    unknown = sorted(set(values) - set(names) - set(besides))
    missing = [name for name in names if name not in values]
    for problem, found in (("missing", missing), ("unknown", unknown)):
        if found:
            raise FormatError(f"{_joined(where, found[0])} is {problem}")
    types = typing.get_type_hints(kind)
    return {name: types[name] for name in names}


def _joined(where: str, name: str) -> str:
    return f"{where}.{name}" if where else name


def _value(kind: Any, value: Any, field: str) -> Any:
    choices = typing.get_args(kind)
    if type(None) in choices:
        if value is None:
            return None
        kind = next(each for each in choices if each is not type(None))
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return _member(kind, value, field)
    fits, what = _CHECKS.get(kind, (lambda _: True, ""))
    if not fits(value) or (kind is float and value < 0 and field.rpartition(".")[2] not in _SIGNED):
        raise FormatError(f"{field} is {_shown(value)}, not {what}")
    return (
        float(value)
        if kind is float
        else tuple(value)
        if kind in (tuple[str, ...], tuple[int, ...])
        else value
    )


def _member(kind: type[enum.Enum], value: Any, field: str) -> enum.Enum:
    for member in kind:
        if member.value == value:
            return member
    raise FormatError(f"{field} is {_shown(value)}, not one of {', '.join(str(m.value) for m in kind)}")


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_finite(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _is_texts(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and all(isinstance(each, str) for each in value)


def _is_wholes(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and all(map(_is_whole, value))


def _is_numbers(value: Any) -> bool:
    return isinstance(value, dict) and all(map(_is_finite, value.values()))


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


_CHECKS: dict[Any, tuple[Callable[[Any], bool], str]] = {
    int: (_is_whole, "a whole number from 0"),
    float: (_is_finite, "a finite number from 0"),
    str: (lambda value: isinstance(value, str), "text"),
    bool: (lambda value: isinstance(value, bool), "true or false"),
    tuple[str, ...]: (_is_texts, "a list of texts"),
    tuple[int, ...]: (_is_wholes, "a list of whole numbers from 0"),
    Mapping[str, float]: (_is_numbers, "an object of finite numbers"),
}

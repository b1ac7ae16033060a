"""What models and functions hold that a graph does not follow, such as numbers, and graphs by that."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from numbers import Number
from typing import Any

import torch
from torch import Tensor, nn

from squeezebox.streaming._graph import Streamed

_MOST_VALUES = 64  # of a list; longer ones are data
_MOST_GRAPHS = 8  # of one form
_PLAIN = (Number, str, bytes, torch.dtype, torch.device, type(None))
_OWN = frozenset(vars(nn.Module()))  # modes and tensors, which are compared apart


@dataclass(frozen=True, kw_only=True, slots=True)
class Held:
    """Plain values, and which tensor an attribute is; the tensors stay, so that no other is taken for one."""

    values: dict[str, str] = field(default_factory=dict)
    tensors: list[Tensor] = field(default_factory=list)

    def note(self, owner: str, attributes: dict[str, Any]) -> None:
        """Add those of the attributes that are plain."""
        for name, value in attributes.items():
            shown = self._shown(value)
            if shown is not None:
                self.values[f"{owner}.{name}"] = shown

    def _shown(self, value: Any) -> str | None:
        if isinstance(value, _PLAIN):
            return repr(value)
        if isinstance(value, Tensor):
            self.tensors.append(value)
            return f"tensor {id(value)} {value.requires_grad}"
        if isinstance(value, tuple | list) and len(value) <= _MOST_VALUES:
            parts = [self._shown(each) for each in value]
            return None if None in parts else str(parts)
        return None


def modules_of(function: object) -> list[nn.Module]:
    """The modules that a function is, or that it reaches by its object, its closure or its globals."""
    if isinstance(function, nn.Module):
        return [function]
    return [value for value in _reached(function).values() if isinstance(value, nn.Module)]


def held_by(modules: Iterable[nn.Module], functions: Iterable[object]) -> Held:
    """What these modules with all within them hold, and what the functions reach."""
    found = Held()
    for number, root in enumerate(modules):
        for path, module in root.named_modules():
            attributes = {name: value for name, value in vars(module).items() if name not in _OWN}
            found.note(f"{number}: {path or type(module).__name__}", attributes)
    for number, function in enumerate(functions):
        if not isinstance(function, nn.Module):
            name = getattr(function, "__qualname__", type(function).__name__)
            found.note(f"{number}: {name}", _reached(function))
    return found


def _reached(function: object) -> dict[str, Any]:
    """What a function reads by name, with what functions that it calls read; not what these call in turn."""
    found = _read_by(function)
    for name, value in [*found.items()]:
        if callable(value) and not isinstance(value, type | nn.Module) and not _is_torchs(value):
            found |= {f"{name}.{inner}": each for inner, each in _read_by(value).items()}
    return found


def _read_by(function: Any) -> dict[str, Any]:
    if isinstance(function, partial):
        bound = {str(place): value for place, value in enumerate(function.args)}
        return _read_by(function.func) | bound | function.keywords
    if inspect.ismethod(function):
        own = function.__self__
        return _read_by(function.__func__) | ({"self": own} if isinstance(own, nn.Module) else _vars(own))
    if not inspect.isfunction(function):
        return _vars(function)
    names = function.__globals__
    found = {name: names[name] for name in function.__code__.co_names if name in names}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with suppress(ValueError):  # it has no value yet
            found[name] = cell.cell_contents
    return found


def _is_torchs(value: object) -> bool:
    return str(getattr(value, "__module__", "")).startswith("torch")


def _vars(value: object) -> dict[str, Any]:
    return dict(getattr(value, "__dict__", {}))


class Graphs:
    """Graphs by the function and the form that they were made for, and by what was held then."""

    def __init__(self) -> None:
        self._made: dict[Any, list[tuple[Held, object, Streamed]]] = {}
        self._moving: set[str] = set()  # what a forward changes itself

    def __contains__(self, streamed: Streamed) -> bool:
        return any(each is streamed for made in self._made.values() for _, _, each in made)

    def get(
        self,
        function: Callable[..., Any],
        form: object,
        held: Callable[[], Held],
        make: Callable[[], Streamed],
    ) -> Streamed:
        """The graph of this function and form, made where there is none for what is held now."""
        before, key = held(), (_identity(function), form)
        made = self._made.setdefault(key, [])
        for known, _, streamed in made:
            if not self._changed(known, before):
                return streamed
        streamed = make()
        self._moving |= self._changed(before, held())
        if len(made) == _MOST_GRAPHS:
            names = sorted(self._changed(made[-1][0], before))
            warnings.warn(
                f"the model was traced {_MOST_GRAPHS + 1} times, as {', '.join(names)} changed, and tracing "
                "takes long; make what changes in each step a buffer, or part of the target.",
                stacklevel=5,
            )
        made.append((before, function, streamed))
        del made[:-_MOST_GRAPHS]
        return streamed

    def _changed(self, before: Held, after: Held) -> set[str]:
        names = before.values.keys() | after.values.keys()
        changed = {name for name in names if before.values.get(name) != after.values.get(name)}
        return changed - self._moving


def _identity(function: Any) -> tuple[int, ...]:
    """Which function it is, also one that has no hash; each access makes another object of a method."""
    if inspect.ismethod(function):
        return id(function.__self__), id(function.__func__)
    return (id(function),)

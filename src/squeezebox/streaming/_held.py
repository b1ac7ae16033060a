"""What models and functions hold that a graph does not follow, such as numbers, and graphs by that."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from numbers import Number
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from squeezebox.schema import UnsupportedModelError
from squeezebox.streaming._graph import Streamed
from squeezebox.streaming._trace import Program

_MOST_VALUES = 64  # of a list; longer ones are data
_MOST_ALIKE = 8  # graphs of one form
_MOST_GRAPHS = 32  # of all forms
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
            shown = self.shown(value)
            if shown is not None:
                self.values[f"{owner}.{name}"] = shown

    def shown(self, value: Any) -> str | None:
        """Text of a plain value; None of others."""
        if isinstance(value, _PLAIN):
            return repr(value)
        if isinstance(value, Tensor):
            self.tensors.append(value)
            return f"tensor {id(value)} {value.requires_grad}"
        if isinstance(value, tuple | list) and len(value) <= _MOST_VALUES:
            parts = [self.shown(each) for each in value]
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
        if _is_own(value):
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
    return found | _bound(function)


def _bound(function: Any) -> dict[str, Any]:
    """Values of its closure, and defaults."""
    code, defaults = function.__code__, function.__defaults__ or ()
    first = code.co_argcount - len(defaults)
    found = dict(zip(code.co_varnames[first:], defaults, strict=False)) | (function.__kwdefaults__ or {})
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        with suppress(ValueError):  # it has no value yet
            found[name] = cell.cell_contents
    return found


def _is_own(value: object) -> bool:
    """Whether it is called, and no class, module or function of torch."""
    is_torchs = str(getattr(value, "__module__", "")).startswith("torch")
    return callable(value) and not isinstance(value, type | nn.Module) and not is_torchs


def _vars(value: object) -> dict[str, Any]:
    return dict(getattr(value, "__dict__", {}))


_States = list[tuple[object, dict[str, Any]]]


def steady(
    make: Callable[[Callable[[], None]], Program],
    modules: Sequence[nn.Module],
    functions: Sequence[object],
) -> tuple[Program, set[str]]:
    """A program, and the names of what its own forward changes, by which it does not compute.

    Modules and functions stay as they were.

    Args:
        make: traces a forward that ends by calling the function that it is given.
        modules: that are traced, with all within them.
        functions: that it calls.

    Raises:
        UnsupportedModelError: with what has changed, the program is another one.
    """
    owners: list[object] = [each for root in modules for each in root.modules()]
    owners += [owner for each in functions for owner in _owners(each)]
    was, before, ends = _states(owners), held_by(modules, functions), list[tuple[Held, _States]]()

    def end() -> None:
        with torch._C.DisableTorchFunction():
            ends.append((held_by(modules, functions), _states(owners)))

    try:
        program = make(end)
    finally:
        _set(was)
    after, states = ends[0]
    names = _changed(before, after)
    if names and not _is_steady(program, was, states, lambda: make(end)):
        raise UnsupportedModelError(
            f"the model or the loss itself changes {', '.join(sorted(names))}, and computes by it; a graph "
            "traced once would keep the first value. Make it a buffer, or change it outside of both."
        )
    return program, names


def _is_steady(program: Program, was: _States, states: _States, make: Callable[[], Program]) -> bool:
    """Whether the program is the same in these states.

    Tensors that tracing made cannot be traced; then it may not read those that they replace.
    """
    old, new = ({id(each): each for each in _tensors(each)} for each in (was, states))
    if new.keys() - old.keys():
        read = {each.data_ptr() for each in program.held.values()}
        return read.isdisjoint(old[each].data_ptr() for each in old.keys() - new.keys())
    _set(states)
    try:
        other = make()
    except UnsupportedModelError:
        return False
    finally:
        _set(was)
    constants = zip(program.held.values(), other.held.values(), strict=False)
    return str(program.graph) == str(other.graph) and all(
        one is two or (one.dtype == two.dtype and torch.equal(one, two)) for one, two in constants
    )


def _owners(function: object) -> list[object]:
    """The objects, apart from modules, whose attributes a function reads, or functions that it calls."""
    called = [function, *filter(_is_own, _read_by(function).values())]
    owners = (each.__self__ if inspect.ismethod(each) else each for each in called)
    return [each for each in owners if hasattr(each, "__dict__") and not isinstance(each, type | nn.Module)]


def _states(owners: Iterable[object]) -> _States:
    """All attributes but a module's modes and tensors."""
    return [
        (each, {name: value for name, value in _vars(each).items() if name not in _OWN}) for each in owners
    ]


def _set(states: _States) -> None:
    for owner, attributes in states:
        for name in vars(owner).keys() - attributes.keys() - _OWN:
            del vars(owner)[name]
        vars(owner).update(attributes)


def _tensors(states: _States) -> list[Tensor]:
    leaves = (leaf for _, attributes in states for leaf in pytree.tree_leaves(attributes))
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]


def _changed(before: Held, after: Held) -> set[str]:
    names = before.values.keys() | after.values.keys()
    return {name for name in names if before.values.get(name) != after.values.get(name)}


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Made:
    """A graph, what it was made for, and all that says so by its place in memory, which stays with it."""

    key: object
    held: Held
    owners: tuple[object, ...]
    streamed: Streamed


class Graphs:
    """Graphs by the function and the form that they were made for, and by what was held then.

    Those that were used last stay.
    """

    def __init__(self) -> None:
        self._made: list[_Made] = []
        self._moving: set[str] = set()  # what a forward changes itself

    def __contains__(self, streamed: Streamed) -> bool:
        return any(each.streamed is streamed for each in self._made)

    def get(
        self,
        function: Callable[..., Any],
        form: object,
        held: Callable[[], Held],
        make: Callable[[], tuple[Streamed, set[str]]],
    ) -> Streamed:
        """The graph of this function and form, made where there is none for what is held now."""
        before, (identity, owners) = held(), _identity(function)
        alike = [each for each in self._made if each.key == (identity, form)]
        for known in alike:
            if not self._changed(known.held, before):
                self._made.remove(known)
                self._made.append(known)
                return known.streamed
        streamed, moving = make()
        self._moving |= moving
        if len(alike) == _MOST_ALIKE:
            names = sorted(self._changed(alike[-1].held, before))
            warnings.warn(
                f"the model was traced {_MOST_ALIKE + 1} times, as {', '.join(names)} changed, and tracing "
                "takes long; make what changes in each step a buffer, or part of the target.",
                stacklevel=5,
            )
            self._made.remove(alike[0])
        made = _Made(key=(identity, form), held=before, owners=owners, streamed=streamed)
        self._made.append(made)
        del self._made[:-_MOST_GRAPHS]
        return streamed

    def _changed(self, before: Held, after: Held) -> set[str]:
        return _changed(before, after) - self._moving


def _identity(function: Any) -> tuple[object, tuple[object, ...]]:
    """Which function it is, also one that has no hash, and the objects whose places in memory say so.

    Each access makes another object of a method. Functions of the same code are one if they are bound to the
    same objects; what is plain among these is compared apart.
    """
    code: object = None
    owners: tuple[object, ...] = (function,)
    if inspect.ismethod(function):
        owners = function.__self__, function.__func__
    elif inspect.isfunction(function):
        bound = (value for value in _bound(function).values() if Held().shown(value) is None)
        code, owners = function.__code__, (function.__globals__, *bound)
    return (code, *map(id, owners)), owners

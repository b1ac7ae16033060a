"""What is compared: stages, one after the other, and the layers that can be seen in each."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from squeezebox.capture import CompiledStep, is_compiled
from squeezebox.schema import OptionError

_WHOLE = "model"  # the name of a stage without one


@dataclass(frozen=True, slots=True)
class Layer:
    """A module by its name; ``seen`` where its calls can be hooked, else only its parameters' gradients."""

    name: str
    module: torch.nn.Module
    seen: bool


@dataclass(frozen=True, slots=True)
class Side:
    """One of the two that are compared."""

    stages: tuple[tuple[str, Callable[..., Any]], ...]
    layers: tuple[Layer, ...]

    @property
    def leaves(self) -> set[str]:
        """Names of layers without parts."""
        return {each.name for each in self.layers if not any(True for _ in each.module.children())}


def read_sides(a: Any, b: Any) -> tuple[Side, Side]:
    """Both, whose last stages are the same by name or by place.

    Raises:
        OptionError: they are not, or one of the two is no model and has no stages.
    """
    one, other = _read(a, "a"), _read(b, "b")
    (end, _), (other_end, _) = one.stages[-1], other.stages[-1]
    counts = len(one.stages), len(other.stages)
    if end != other_end and counts[0] != counts[1] and min(counts) > 1:
        raise OptionError(
            f"a has {counts[0]} stages that end with '{end}', and b {counts[1]} that end with '{other_end}', "
            "so which should agree is not known; give both last ones the same name."
        )
    return one, other


def _read(side: Any, which: str) -> Side:
    """A model, a function, or a list or dictionary of them, by name.

    Raises:
        OptionError: something in it cannot be called, or two stages have one name.
    """
    stages = tuple(_stages(side))
    names = [name for name, _ in stages]
    wrong = next(
        (f"stage '{name}' of {which} is a {type(s).__name__}" for name, s in stages if not callable(s)), ""
    )
    twice = next(
        (f"two stages of {which} are called '{name}'" for name in names if names.count(name) > 1), ""
    )
    if not stages or wrong or twice:
        raise OptionError(
            f"{wrong or twice or f'{which} has no stage'}; give a model, a function, or a list of "
            '("name", model or function), each with a name of its own.'
        )
    alone = len(stages) == 1
    layers: dict[int, Layer] = {}  # a module that several stages share has its first name
    for name, stage in stages:
        for layer in _layers(name, "" if alone else f"{name}.", stage):
            layers.setdefault(id(layer.module), layer)
    return Side(stages, tuple(layers.values()))


def _stages(side: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(side, Mapping):
        yield from side.items()
    elif isinstance(side, Sequence) and not isinstance(side, str):
        for number, each in enumerate(side):
            named = isinstance(each, tuple) and len(each) == 2 and isinstance(each[0], str)
            yield each if named else (getattr(each, "__name__", f"stage {number}"), each)
    else:
        yield _WHOLE, side


def _layers(name: str, prefix: str, stage: Any) -> Iterator[Layer]:
    """A module's own call is its stage's; a function's modules are layers, if there are several."""
    if isinstance(stage, torch.nn.Module):
        yield from _within(stage, name, prefix, seen=False)
        return
    roots = dict(_modules_of(stage, set()))
    hooked = not isinstance(stage, CompiledStep)
    for variable, root in roots.items():
        if len(roots) > 1:
            yield from _within(root, f"{prefix}{variable}", f"{prefix}{variable}.", hooked=hooked)
        else:
            leaf = not any(True for _ in root.children())
            yield from _within(root, name, prefix, seen=leaf, hooked=hooked)


def _within(
    root: torch.nn.Module, name: str, prefix: str, *, seen: bool = True, hooked: bool = True
) -> Iterator[Layer]:
    """The module and all below it. What torch.compile made is one layer; what is in it is none."""
    hooked &= not isinstance(root, torch.jit.ScriptModule)
    inside_only = is_compiled(root) and type(root).__name__ != "OptimizedModule"
    yield Layer(name, root, seen and hooked and not inside_only)
    hooked &= not is_compiled(root)
    for child, module in root.named_children():
        inner = name if child == "_orig_mod" else f"{prefix}{child}"
        yield from _within(module, inner, prefix if inner == name else f"{inner}.", hooked=hooked)


def _modules_of(stage: Any, visited: set[int]) -> Iterator[tuple[str, torch.nn.Module]]:
    """Modules that a function, a method, a partial or a callable object refers to, by variable."""
    for name, value in _variables(stage).items():
        if id(value) in visited:
            continue
        visited.add(id(value))
        if isinstance(value, torch.nn.Module):
            yield name, value
        elif isinstance(value, _CALLED) and _is_followed(value, stage):
            yield from _modules_of(value, visited)


_CALLED = (types.FunctionType, types.MethodType, functools.partial)


def _is_followed(called: Any, stage: Any) -> bool:
    """A function's own file alone: what a library refers to is not its layer."""
    return not isinstance(stage, types.FunctionType) or called.__module__ == stage.__module__


def _variables(stage: Any) -> dict[str, Any]:
    if isinstance(stage, functools.partial):
        given = {f"argument {number}": value for number, value in enumerate(stage.args)}
        return {"function": stage.func, **given, **stage.keywords}
    if isinstance(stage, types.MethodType):
        return {"self": stage.__self__, **_variables(stage.__func__)}
    if isinstance(stage, types.FunctionType):
        found = inspect.getclosurevars(stage)
        return {**found.globals, **found.nonlocals}
    return dict(getattr(stage, "__dict__", {}))

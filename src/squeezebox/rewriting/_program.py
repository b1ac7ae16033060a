"""Which calls of a model are computed otherwise: a function mode in its forward, by rule and module."""

from __future__ import annotations

import functools
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Protocol

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from squeezebox.capture import ModulePath
from squeezebox.rewriting._deferred import METADATA, Deferred, Waiting, fused, is_deferred, made, saving_hooks

Place = tuple[str, str]  # a rule's name, and the path of the module whose forward makes the call


class Rule(Protocol):
    """A row of the table: a pattern, and what takes its place.

    ``exact`` says whether outputs and gradients are the model's to the bit.
    """

    name: str
    exact: bool
    says: str
    functions: frozenset[Any]

    def begin(self, func: Any, args: Any, kwargs: Any, note: Callable[[str], None]) -> Any:
        """What takes the place of the call's result; NotImplemented where the pattern does not begin."""


class Program:
    """Rules by the places where they are in force, and how often they were: "fused", or "made" after all.

    Args:
        rules: to choose from.
        places: where; None: everywhere.
    """

    def __init__(self, rules: Iterable[Rule], places: Iterable[Place] | None) -> None:
        self.places = None if places is None else frozenset(places)
        self.counts: Counter[tuple[Place, str]] = Counter()
        named = None if self.places is None else {name for name, _ in self.places}
        self.rules: dict[Any, list[Rule]] = {}
        for rule in rules:
            for func in rule.functions if named is None or rule.name in named else ():
                self.rules.setdefault(func, []).append(rule)
        self._paths: weakref.WeakKeyDictionary[torch.nn.Module, ModulePath] = weakref.WeakKeyDictionary()

    def path(self, model: torch.nn.Module) -> ModulePath:
        """Of the modules of this model, or of this copy of it."""
        found = self._paths.get(model)
        if found is None:
            found = self._paths[model] = ModulePath(model)
        return found

    def note(self, place: Place) -> Callable[[str], None]:
        """Counts what happens there."""

        def count(what: str) -> None:
            self.counts[place, what] += 1

        return count

    def happened(self, what: str) -> set[Place]:
        """Where it did."""
        return {place for place, each in self.counts if each == what}


class Rewriting(TorchFunctionMode):
    """Carries a program out in a forward.

    Not where a checkpoint runs a part of it, which backward runs again outside: that shows by its hooks of
    saved tensors, or by gradients that it turns off.
    """

    def __init__(self, program: Program, path: ModulePath) -> None:
        super().__init__()
        self._program, self._path = program, path
        self._grad, self._hooks = torch.is_grad_enabled(), saving_hooks()
        self._waiting: weakref.WeakSet[Waiting] = weakref.WeakSet()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in METADATA:
            return func(*args, **kwargs)
        if self._waiting and _changes(func, kwargs):
            self._make_those_of(args, kwargs)
        if Deferred in types:
            found = fused(func, args, kwargs)
            if found is not NotImplemented:
                return self._noted(found)
            args, kwargs = made((args, kwargs))
        begun = list(self._begun(func, args, kwargs))
        for other in begun[1:]:
            begun[0].call.readers += other.call.readers
        return self._noted(begun[0]) if begun else func(*args, **kwargs)

    def ended(self, output: Any) -> Any:
        """The forward's output; without gradients nothing waits longer: inputs may change then."""
        waiting = [] if self._grad else [each for each in self._waiting if each.made is None]
        for call in waiting:
            call.make()
        if not waiting:
            return output

        def is_whole(values: Any) -> bool:
            """Whether nothing within it was put off, so that it stays the object that it is."""
            return not any(map(is_deferred, tree_leaves(values)))

        return tree_map(lambda each: made(each) if is_deferred(each) else each, output, is_leaf=is_whole)

    def _begun(self, func: Any, args: Any, kwargs: Any) -> Iterator[Any]:
        """The call put off, by each rule that wants to read its result."""
        rules = self._program.rules.get(func, ())
        for rule in rules if rules and self._may_begin(args, kwargs) else ():
            place = (rule.name, self._path.current)
            if self._program.places is None or place in self._program.places:
                found = rule.begin(func, args, kwargs, self._program.note(place))
                if found is not NotImplemented:
                    yield found

    def _may_begin(self, args: Any, kwargs: Any) -> bool:
        """Whether this is the forward itself, and it can be seen whether the call's tensors are changed."""
        if torch.is_grad_enabled() is not self._grad or saving_hooks() != self._hooks:
            return False
        tensors = (each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor))
        return not (torch.is_inference_mode_enabled() or any(each.is_inference() for each in tensors))

    def _noted(self, result: Any) -> Any:
        if isinstance(result, Deferred):
            self._waiting.add(result.call)
        return result

    def _make_those_of(self, args: Any, kwargs: Any) -> None:
        """The call changes its first argument, or ``out``: what reads that is made before."""
        given = [args[0]] if args else []
        targets = [each for each in tree_leaves((given, kwargs)) if isinstance(each, torch.Tensor)]
        for call in [each for each in self._waiting if each.waits and each.reads_any_of(targets)]:
            call.make()


def _changes(func: Any, kwargs: Mapping[str, Any]) -> bool:
    """Whether the function may change a tensor in place."""
    return "out" in kwargs or _changes_by_name(func)


@functools.cache
def _changes_by_name(func: Any) -> bool:
    name: str = getattr(func, "__name__", "")
    in_place = name.endswith("_") and not name.endswith("__")
    operators = name in ("__setitem__", "__set__") or (name.startswith("__i") and name.endswith("__"))
    takes = getattr(functional, name, None) is func and "inplace" in _names(func)
    return in_place or operators or takes


def _names(func: Any) -> Iterator[str]:
    code = getattr(func, "__code__", None)
    return iter(() if code is None else code.co_varnames[: code.co_argcount])

"""Which operators break bitwise equality, and what determinism costs each: calls are repeated on the spot."""

from __future__ import annotations

import hashlib
import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from squeezebox.auditing._run import (
    RunKey,
    Tooling,
    TrainFunction,
    bits_of,
    computing,
    train_some,
)
from squeezebox.reports import AuditedOperator

_AGAIN, _FREE = "again", "nondeterministic"


@dataclass(slots=True)
class _Tally:
    calls: int = 0
    unequal: dict[str, int] = field(default_factory=dict)
    seconds: dict[str, list[float]] = field(default_factory=dict)


class OperatorLedger(TorchDispatchMode):
    """Repeats every operator on the inputs it had: as it was, and under each of ``ways``.

    Repeats begin at the same state of the random generators and write into copies, so that the training
    goes on as it would without. Views and uninitialised memory are not repeated.
    """

    def __init__(self, tooling: Tooling, ways: Mapping[str, Tooling]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._tooling = tooling
        self._ways = ways
        self._tallies: dict[str, _Tally] = {}

    def rows(self) -> tuple[AuditedOperator, ...]:
        """One for every operator, in the order of their first calls."""
        return tuple(
            AuditedOperator(
                name=name,
                calls=tally.calls,
                unequal=dict(tally.unequal),
                deterministic_seconds=statistics.median(tally.seconds[_AGAIN]),
                seconds=statistics.median(tally.seconds[_FREE]),
            )
            for name, tally in self._tallies.items()
        )

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not _is_repeatable(func, (args, kwargs)):
            return func(*args, **kwargs)
        before = _Inputs(func, args, kwargs)
        result = func(*args, **kwargs)
        tally = self._tallies.setdefault(str(func), _Tally(unequal=dict.fromkeys((_AGAIN, *self._ways), 0)))
        after = before.random_states()
        expected = [result, before.written(args, kwargs)]
        tally.calls += 1
        for way, tooling in ((_AGAIN, self._tooling), *self._ways.items()):
            seconds, found = before.repeat(tooling)
            tally.unequal[way] += not _equal(expected, found)
            tally.seconds.setdefault(way, []).append(seconds)
        before.set_random_states(after)
        return result


class _Inputs:
    """An operator with its arguments, and the state of random generators, as they were before it."""

    def __init__(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # batch norms write their running statistics, which their schemas do not say
        self._writes_any = "batch_norm" in func._schema.name
        self._mutates = func._schema.is_mutable or self._writes_any
        self._func = func
        self._given = _copied((args, kwargs)) if self._mutates else (args, kwargs)
        given = [each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Generator)]
        random = torch.Tag.nondeterministic_seeded in func.tags
        self._generators = [*given, torch.default_generator, *_cuda_generators()] if given or random else []
        self._states = self.random_states()

    def random_states(self) -> list[torch.Tensor]:
        return [generator.get_state() for generator in self._generators]

    def set_random_states(self, states: list[torch.Tensor]) -> None:
        for generator, state in zip(self._generators, states, strict=True):
            generator.set_state(state)

    def written(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        """Those of the arguments that the operator may have written into.

        Others may be the same tensor, which copies no longer are.
        """
        return [
            args[place] if place < len(args) else kwargs.get(each.name)
            for place, each in enumerate(self._func._schema.arguments)
            if each.is_write or self._writes_any
        ]

    def repeat(self, tooling: Tooling) -> tuple[float, Any]:
        """Seconds and result, with what was written into where the operator writes into its arguments."""
        self.set_random_states(self._states)
        args, kwargs = _copied(self._given) if self._mutates else self._given
        with computing(tooling):
            _wait()
            started = time.perf_counter()
            result = self._func(*args, **kwargs)
            _wait()
            seconds = time.perf_counter() - started
        return seconds, [result, self.written(args, kwargs)]


class _Trace(TorchDispatchMode):
    """Digests of what goes into and comes out of every operator, in order."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[tuple[str, str, str]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not _is_repeatable(func, (args, kwargs)):
            return func(*args, **kwargs)
        given = _digest((args, kwargs))
        result = func(*args, **kwargs)
        self.calls.append((str(func), given, _digest((result, args, kwargs))))
        return result


def audit_operators(
    train: TrainFunction, arm: str, options: Mapping[str, Any] | None, threads: int, steps: int
) -> tuple[AuditedOperator, ...]:
    """Every operator of an arm's first steps, repeated in the ways in which tooling varies."""
    tooling, other = Tooling(threads=threads), 1 if threads > 1 else 2
    ways = {
        _FREE: Tooling(threads=threads, deterministic=False),
        "without oneDNN": Tooling(threads=threads, onednn=False),
        f"{other} thread{'s' if other > 1 else ''}": Tooling(threads=other),
    }
    ledger = OperatorLedger(tooling, ways)
    _under(ledger, train, RunKey(arm=arm, series="control", seed=0), options, tooling, steps)
    return ledger.rows()


def first_unequal(
    train: TrainFunction, arm: str, options: Mapping[str, Any] | None, threads: int, steps: int
) -> str:
    """Where two trainings that should be the same part, in words."""
    key, tooling = RunKey(arm=arm, series="control", seed=0), Tooling(threads=threads)
    traces = (_Trace(), _Trace())
    for trace in traces:
        _under(trace, train, key, options, tooling, steps)
    first, second = (trace.calls for trace in traces)
    for number, (one, other) in enumerate(zip(first, second, strict=False)):
        if one[0] != other[0]:
            return f"operator {number} is {one[0]} the first time and {other[0]} the second"
        if one[1] != other[1]:
            return f"the inputs of operator {number}, {one[0]}, differ and come from no operator before it"
        if one[2] != other[2]:
            return f"operator {number}, {one[0]}, had equal inputs and unequal outputs"
    if len(first) != len(second):
        return (
            f"one run made {len(first)} operator calls and the other {len(second)}, equal as far as both go"
        )
    return f"the first {steps} steps are equal; the difference comes later"


def _under(
    mode: TorchDispatchMode,
    train: TrainFunction,
    key: RunKey,
    options: Mapping[str, Any] | None,
    tooling: Tooling,
    steps: int,
) -> None:
    """The first steps with ``mode`` on."""

    def watched(run: Any) -> Any:
        with mode:
            return train(run)

    train_some(watched, key, options, tooling, steps)


def _is_repeatable(func: Any, values: Any) -> bool:
    """Not a view, not uninitialised memory, no profiler's mark, and on plain tensors only."""
    name = func._schema.name
    if func.is_view or "empty" in name or name.startswith(("aten::_local_scalar", "profiler::")):
        return False
    tensors = [each for each in tree_leaves(values) if isinstance(each, torch.Tensor)]
    return all(
        type(each) in (torch.Tensor, torch.nn.Parameter) and each.layout is torch.strided and not each.is_meta
        for each in tensors
    )


def _copied(values: Any) -> Any:
    return tree_map(lambda each: each.clone() if isinstance(each, torch.Tensor) else each, values)


def _equal(expected: Any, found: Any) -> bool:
    pairs = zip(tree_leaves(expected), tree_leaves(found), strict=True)
    return all(
        not isinstance(one, torch.Tensor)
        or (one.shape == other.shape and torch.equal(bits_of(one), bits_of(other)))
        for one, other in pairs
    )


def _digest(values: Any) -> str:
    found = hashlib.blake2b(digest_size=12)
    for each in tree_leaves(values):
        if isinstance(each, torch.Tensor):
            found.update(bits_of(each).cpu().numpy().tobytes())
        elif isinstance(each, (int, float, str)):
            found.update(repr(each).encode())
    return found.hexdigest()


def _cuda_generators() -> list[torch.Generator]:
    return list(torch.cuda.default_generators) if torch.cuda.is_initialized() else []


def _wait() -> None:
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()

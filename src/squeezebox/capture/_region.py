"""Finds the first layers that can be worked in slices, and defers their calls until the last of them."""

from __future__ import annotations

import functools
import inspect
import sys
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from squeezebox.capture._entries import is_plain
from squeezebox.capture._onlooker import Onlooker, Running
from squeezebox.capture._slices import BatchNorm, Operator, Sliced, Slot
from squeezebox.capture._stand_in import METADATA, Deferred, Pending, StandIn, evaluated
from squeezebox.schema import Region

_BATCH_NORM = inspect.signature(functional.batch_norm)
CONVOLUTIONS = {torch.conv1d: 3, torch.conv2d: 4, torch.conv3d: 5}  # and their input's dims
POOLINGS = frozenset(
    getattr(functional, f"{name}_pool{dims}d")
    for name in ("max", "avg", "adaptive_max", "adaptive_avg")
    for dims in (1, 2, 3)
)
_POINTWISE = frozenset(
    {
        *(getattr(functional, name) for name in ("relu", "relu6", "silu", "gelu", "leaky_relu", "hardtanh")),
        *(getattr(functional, name) for name in ("elu", "hardswish", "softplus", "mish")),
        *(torch.relu, torch.relu_, torch.sigmoid, torch.tanh),
        *(getattr(torch.Tensor, name) for name in ("relu", "relu_", "sigmoid", "tanh")),
    }
)
CHAINED = frozenset({functional.batch_norm, *CONVOLUTIONS, *POOLINGS, *_POINTWISE})
_Call = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]


class Forward(Running, Protocol):
    """What is asked of the recorder around the running forward."""

    def replay(self, call: Deferred, x: torch.Tensor) -> torch.Tensor:
        """Make a deferred call as if it were made now."""

    def skip(self, keys: Iterable[str]) -> None:
        """Count tensors that are not saved, so that the others' keys stay as they are."""


class Slicer:
    """Carries out a :class:`Region`, once in every forward.

    The region's calls are answered by stand-ins until its last one, which works them all in slices. Where
    the forward goes another way, or something reads a stand-in, the calls are made plainly after all.
    """

    def __init__(self, region: Region, forward: Forward) -> None:
        self.region = region
        self.note = ""
        self._forward = forward
        self._open = False  # the region may begin
        self._pending: Pending | None = None
        self._last: weakref.ref[StandIn] | None = None

    def start(self) -> None:
        """A forward begins."""
        self._open, self._pending, self._last = True, None, None
        self.note = f"{self.region} were left whole: the forward was not the plan's"

    def finish(self) -> None:
        """The forward has ended: make the calls whose results somebody still holds."""
        self._open, pending, self._pending = False, self._pending, None
        for stand_in in pending.living() if pending is not None else ():
            stand_in.evaluate()
        if pending is not None and pending.read:
            self.note = f"{self.region} were computed whole: something read a tensor among them"

    def instead(self, func: Any, types: Any, args: Any, kwargs: Any) -> _Call:
        """What to call instead of ``func``."""
        if self._is_next(func, args, kwargs):
            pending = self._pending or Pending(args[0], args[0], self._forward.replay)
            call = deferred(func, args, kwargs, self._forward.module)
            if pending.add(call, is_pointwise=func in _POINTWISE):
                self._pending = pending
                return self._answer(pending), (), {}
        if StandIn in types and func not in METADATA:
            args, kwargs = evaluated((args, kwargs))
        return func, args, kwargs

    def _is_next(self, func: Any, args: Any, kwargs: Any) -> bool:
        """Whether this is the region's next call."""
        number = 0 if self._pending is None else len(self._pending.calls)
        if number == len(self.region.functions) or func not in CHAINED:
            return False
        planned = (self.region.functions[number], self.region.modules[number])
        if (func.__name__, self._forward.module) != planned or not self._forward.catches:
            return False
        if self._pending is None:
            return self._open and _starts(func, args, kwargs)
        last = self._last() if self._last is not None else None
        return not self._pending.done and bool(args) and args[0] is last and _continues(args, kwargs)

    def _answer(self, pending: Pending) -> Callable[[], torch.Tensor]:
        """The last call's: a stand-in, or the region's result."""
        if len(pending.calls) == len(self.region.functions):
            pending.done = True
            self._forward.skip(self.region.keys)
            slices = min(self.region.slices, len(pending.source))
            self.note = f"{self.region} were worked in {slices} slices of the batch"
            chain, tensors = chain_of(pending.calls)
            return functools.partial(Sliced.apply, chain, slices, pending.source, *tensors)
        stand_in = self._last() if self._last is not None and pending.calls[-1].in_place else None
        if stand_in is None:
            stand_in = StandIn.of(pending)
            self._last = weakref.ref(stand_in)
        stand_in.length = len(pending.calls)
        return lambda: stand_in


@dataclass(frozen=True, slots=True)
class Traced:
    """A call that could be worked in slices: its result's bytes, and what it saved."""

    function: str
    module: str
    nbytes: int
    keys: tuple[str, ...]
    pools: bool


class Tracer:
    """Watches one forward for a chain of calls that could be a region: the next one alone reads each result.

    Looks only, through weak references to tensors. One that is ``holding`` also keeps the calls themselves,
    and what the first one reads.
    """

    def __init__(self, *, holding: bool = False) -> None:
        self._keys: list[str] = []  # of the running call
        self.deferred: list[Deferred] = []
        self.sources: list[torch.Tensor] = []
        self._holding = holding
        self._calls: list[Traced] = []
        self._results: list[weakref.ref[torch.Tensor]] = []
        self._batch = 0
        self._limit = sys.maxsize  # calls after which somebody else reads the result

    @property
    def onlooker(self) -> Onlooker:
        """What a store shows a forward to."""
        return Onlooker(named=self._named, ran=self.saw)

    def saw(self, func: Any, args: Any, kwargs: Any, out: Any, forward: Running) -> None:
        """A call has returned."""
        keys, self._keys = tuple(self._keys), []
        if func in METADATA:
            return
        tensors = [value for value in tree_leaves((args, kwargs)) if isinstance(value, torch.Tensor)]
        read = [number for tensor in tensors if (number := self._number(tensor))]
        if self._extends(func, args, kwargs, out, read, forward):
            self._calls.append(Traced(func.__name__, forward.module, out.nbytes, keys, func in POOLINGS))
            self._results.append(weakref.ref(out))
            self._batch = len(out)
            if self._holding:
                self.sources = self.sources or [args[0]]
                self.deferred.append(deferred(func, args, kwargs, forward.module))
        elif read:
            self._limit = min(self._limit, *read)

    def regions(self) -> list[Region]:
        """The chain up to each pooling, shortest first, in slices of one sample."""
        calls = self._calls[: self._limit]
        return [
            Region(
                functions=tuple(call.function for call in calls[:end]),
                modules=tuple(call.module for call in calls[:end]),
                keys=tuple(key for call in calls[:end] for key in call.keys),
                slices=self._batch,
                output_bytes=calls[end - 1].nbytes,
            )
            for end in range(1, len(calls) + 1)
            if calls[end - 1].pools
        ]

    def _named(self, key: str) -> None:
        self._keys.append(key)

    def _extends(
        self, func: Any, args: Any, kwargs: Any, out: Any, read: list[int], forward: Running
    ) -> bool:
        if func not in CHAINED or not isinstance(out, torch.Tensor) or not forward.catches:
            return False
        if not self._calls:
            return _starts(func, args, kwargs)
        last = len(self._calls)
        follows = read == [last] and bool(args) and args[0] is self._results[-1]()
        return follows and last < self._limit and _continues(args, kwargs)

    def _number(self, tensor: torch.Tensor) -> int:
        """After how many calls the tensor is the chain's result; 0 if it is none."""
        numbers = range(len(self._results), 0, -1)
        return next((number for number in numbers if self._results[number - 1]() is tensor), 0)


def _starts(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether this is the convolution of a batch that needs no gradient, with a weight that does."""
    x = args[0] if args else None
    if not isinstance(x, torch.Tensor) or not is_plain(x) or x.requires_grad:
        return False
    if func not in CONVOLUTIONS or x.dim() != CONVOLUTIONS[func]:
        return False
    trained = any(isinstance(t, torch.Tensor) and t.requires_grad for t in tree_leaves((args[1:], kwargs)))
    return trained and len(x) > 0 and x.dtype in (torch.float32, torch.float64) and _continues(args, kwargs)


def _continues(args: Any, kwargs: Any) -> bool:
    """Whether no other argument is one of the chain's tensors."""
    rest = tree_leaves((args[1:], kwargs))
    return "out" not in kwargs and not any(isinstance(value, StandIn) for value in rest)


def deferred(func: Any, args: Any, kwargs: Any, module: str) -> Deferred:
    """The call, of which the first argument is left out."""
    if func is not functional.batch_norm:
        return Deferred(func, args[1:], kwargs, module)
    bound = _BATCH_NORM.bind(*args, **kwargs)
    bound.apply_defaults()
    keywords = dict(bound.arguments)
    del keywords["input"]
    return Deferred(func, (), keywords, module)


def chain_of(calls: Iterable[Deferred]) -> tuple[list[Operator | BatchNorm], list[torch.Tensor]]:
    """The calls without their tensors, and the tensors."""
    tensors: list[torch.Tensor] = []

    def slot(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        tensors.append(value)
        return Slot(len(tensors) - 1)

    chain: list[Operator | BatchNorm] = []
    for call in calls:
        known = call.keywords
        if call.normalises:
            running = [known["running_mean"], known["running_var"]]
            chain.append(
                BatchNorm(
                    weight=slot(known["weight"]),
                    bias=slot(known["bias"]),
                    running=tuple(buffer for buffer in running if buffer is not None),
                    momentum=known["momentum"],
                    eps=known["eps"],
                )
            )
        else:
            arguments = tuple(slot(value) for value in call.arguments)
            chain.append(Operator(call.function, arguments, {k: slot(v) for k, v in known.items()}))
    return chain, tensors


@dataclass(frozen=True, slots=True, eq=False)
class Work:
    """Calls of a region, each on the result of the one before, and what the first one reads."""

    calls: tuple[Deferred, ...]
    source: torch.Tensor

    def first(self, count: int) -> Work:
        """The work of a shorter region."""
        return Work(self.calls[:count], self.source)

    def of(self, size: int) -> Work:
        """The work of the first ``size`` samples."""
        return Work(self.calls, self.source[:size])

    def run(self, slices: int) -> torch.Tensor:
        """The last call's result; in one slice, as torch computes it."""
        if slices == 1:
            x = self.source
            for call in self.calls:
                x = call.function(x, *call.arguments, **call.keywords)
            return x
        chain, tensors = chain_of(self.calls)
        result: torch.Tensor = Sliced.apply(chain, slices, self.source, *tensors)  # type: ignore[no-untyped-call]
        return result


def work_of(forward: Callable[[], object]) -> Work | None:
    """Run ``forward``, without gradients, and take the calls that could be a region; None without any."""
    watching = _Watching()
    with torch.no_grad(), watching:
        forward()
    tracer = watching.tracer
    return Work(tuple(tracer.deferred), tracer.sources[0]) if tracer.deferred else None


class _Watching(TorchFunctionMode):
    """Shows every call to a tracer."""

    module = ""
    catches = True

    def __init__(self) -> None:
        super().__init__()
        self.tracer = Tracer(holding=True)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.tracer.saw(func, args, kwargs or {}, out, self)
        return out

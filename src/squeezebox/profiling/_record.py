"""One training step's allocations: whose they are, and how long they last; of fake tensors too."""

from __future__ import annotations

import contextlib
import itertools
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from squeezebox.memory import parts_of
from squeezebox.profiling._ledgers import (
    ALLOCATION,
    CALL,
    END,
    FREE,
    GONE,
    KIND,
    PHASE,
    Event,
    FakeLedger,
    Ledger,
    RealLedger,
)
from squeezebox.schema import Activity, Call, Kind, StepTrace, Storage, arguments

_NANOSECONDS = 1e9


@dataclass(frozen=True, slots=True)
class Known:
    """What a storage is, by its address at some moment."""

    kind: Kind
    nbytes: Mapping[int, int]  # by address


@dataclass(frozen=True, slots=True)
class Running:
    """An operator that ran, and the addresses that it was given."""

    operator: str
    phase: str
    module: str
    addresses: Sequence[int]
    stream: int
    activity: Activity = Activity.COMPUTING


@dataclass(slots=True)
class _Life:
    nbytes: int
    allocated_at: int
    call: int | None
    kind: Kind = Kind.TEMPORARY
    freed_at: int = -1
    streams: dict[int, None] = field(default_factory=dict)


@dataclass(slots=True)
class Reading:
    """Goes through the events once; ``notes`` are what the marks of kinds refer to."""

    running: Sequence[Running]
    notes: Sequence[Known]
    lives: list[_Life] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    _now: int = 0
    _began: int = 0  # nanoseconds of the first operator,
    _ended: int = 0  # and of the end
    _living: dict[int, _Life] = field(default_factory=dict)

    def trace(self, before: Iterable[Known], events: Iterable[Event]) -> StepTrace:
        """``before``: what is there when the step begins; where two claim a storage, the first has it."""
        for known in before:
            for address, nbytes in known.nbytes.items():
                if nbytes and address not in self._living:
                    self._begin(address, _Life(nbytes, 0, None, known.kind))
        for event in events:
            self._read(event)
        end = self._now + 1
        return StepTrace(
            storages=tuple(
                Storage(
                    nbytes=life.nbytes,
                    kind=life.kind,
                    allocated_at=life.allocated_at,
                    freed_at=end if life.freed_at < 0 else life.freed_at,
                    call=life.call,
                    streams=tuple(life.streams) or (0,),
                )
                for life in self.lives
            ),
            calls=tuple(self.calls),
            end=end,
            seconds=(self._ended - self._began) / _NANOSECONDS if self._ended else 0.0,
        )

    def _read(self, event: Event) -> None:
        if event.what == ALLOCATION:
            self._end(event.number)  # freed where nobody saw it
            self._now += 1
            life = _Life(event.nbytes, self._now, len(self.calls) - 1 if self.calls else None)
            self._begin(event.number, life)
            self._touch(life)
        elif event.what == FREE or (event.what == GONE and self._is_old(event.number)):
            self._end(event.number)
        elif event.what == CALL:
            self._call(self.running[event.number], event.nanoseconds)
        elif event.what == PHASE:
            for life in self._living.values():
                if life.kind is Kind.TEMPORARY and life.call is not None:  # or else a product's workspace
                    life.kind = self._held(life)
        elif event.what == KIND:
            self._name(self.notes[event.number])
        elif event.what == END:
            self._ended = event.nanoseconds

    def _call(self, call: Running, nanoseconds: int) -> None:
        if not self.calls:
            self._began = nanoseconds
        self.calls.append(
            Call(
                operator=call.operator,
                phase=call.phase,
                module=call.module,
                began_at=self._now + 1,
                began_seconds=(nanoseconds - self._began) / _NANOSECONDS,
                activity=call.activity,
            )
        )
        for address in call.addresses:
            if address in self._living:
                self._living[address].streams[call.stream] = None

    def _held(self, life: _Life) -> Kind:
        """What is still there when backward begins has been saved, or packed."""
        assert life.call is not None
        made_by = self.running[life.call].activity
        return Kind.PACKED if made_by is Activity.PACKING else Kind.SAVED

    def _touch(self, life: _Life) -> None:
        if self.calls:
            life.streams[self.running[len(self.calls) - 1].stream] = None

    def _name(self, known: Known) -> None:
        for address, nbytes in known.nbytes.items():
            if address in self._living:
                if self._living[address].allocated_at:
                    self._living[address].kind = known.kind
            elif nbytes and known.kind is Kind.INPUT:  # there before the step, but only now shown
                self._begin(address, _Life(nbytes, 0, None, known.kind))

    def _is_old(self, address: int) -> bool:
        """Whether what is there was there before the step; else somebody else has the address already."""
        return address in self._living and not self._living[address].allocated_at

    def _begin(self, address: int, life: _Life) -> None:
        self._living[address] = life
        self.lives.append(life)

    def _end(self, address: int) -> None:
        life = self._living.pop(address, None)
        if life is not None:
            self._now += 1
            life.freed_at = self._now


Around = Callable[[], AbstractContextManager[object]]


def record_step(
    model: torch.nn.Module,
    *,
    sample: tuple[Any, Any],
    loss_fn: Callable[[Any, Any], torch.Tensor],
    optimizer: torch.optim.Optimizer | None = None,
    around: Around = contextlib.nullcontext,
    trains: bool = True,
) -> StepTrace:
    """Take one training step, and say what it allocates, when, for whom and for how long.

    On real tensors the storages are the allocator's own, from torch's profiler: also what operators take and
    give back before they return. On fake ones nothing is computed; there, such temporaries are counted on a
    CPU, by running the operators that are known to have them on a few samples of zeros.

    Args:
        model: in the mode in which it is to be recorded. Gradients are dropped before the step.
        sample: inputs (a tensor, a tuple of them, or a dict by the model's keywords) and target.
        loss_fn: ``loss_fn(output, target)`` is what backward starts from.
        optimizer: takes a step after backward, so on real tensors parameters change. One that has taken a
            step before has its state already.
        around: gives a context for forward and loss.
        trains: whether backward and the optimizer's step follow; without, autograd saves nothing.

    Raises:
        OptionError: the tensors are real and another profiler is active.
    """
    inputs, target = sample
    by_place, by_name = arguments(model, inputs)
    model.zero_grad(set_to_none=True)
    before: dict[Kind, list[torch.Tensor]] = {
        Kind.PARAMETER: list(model.parameters()),
        Kind.BUFFER: list(model.buffers()),
        Kind.STATE: states_of(optimizer),
        Kind.INPUT: tensors_of(sample),
    }
    tensors = [*itertools.chain(*before.values())]
    fake = any(isinstance(tensor.data, FakeTensor) for tensor in tensors)
    ledger = FakeLedger(tensors) if fake else RealLedger(_device(tensors))
    try:
        step = StepMarks(model, ledger)
        known = [step.known(kind, found) for kind, found in before.items()]
        with step:
            with own_casts(), around(), contextlib.nullcontext() if trains else torch.no_grad():
                output = model(*by_place, **by_name)
                step.phase = "loss"
                loss = loss_fn(output, target)
                del output
            if trains:
                step.turn("backward")
                loss.backward()
                step.note(Kind.GRADIENT, [p.grad for p in model.parameters() if p.grad is not None])
                step.phase = "optimizer"
                if optimizer is not None:
                    with step_counts() if fake else contextlib.nullcontext():
                        optimizer.step()
                step.note(Kind.STATE, states_of(optimizer))
        return Reading(step.running, step.notes).trace(known, ledger.events())
    finally:
        ledger.close()


@contextlib.contextmanager
def own_casts() -> Iterator[None]:
    """Around forward and loss: autocast makes its own copies of weights, which end with them."""
    torch.clear_autocast_cache()
    try:
        yield
    finally:
        torch.clear_autocast_cache()


def step_counts() -> AbstractContextManager[object]:
    """Where optimizers may step fake parameters: they read how many steps there were, but for no size."""
    return _StepCounts()  # type: ignore[no-untyped-call]


class _StepCounts(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            return 1.0
        return func(*args, **(kwargs or {}))


class StepMarks(TorchDispatchMode):
    """Numbers every operator and notes for whom it runs."""

    def __init__(self, model: torch.nn.Module, ledger: Ledger) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.phase = "forward"
        self.before_each: Callable[[], None] | None = None
        self.running: list[Running] = []
        self.notes: list[Known] = []
        self._ledger = ledger
        self._modules = Modules(model)
        self._activities = [Activity.COMPUTING]

    def __enter__(self) -> StepMarks:
        self._modules.__enter__()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._modules.__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "prim":  # a fake tensor is asked for its device
            return func(*args, **kwargs)
        addresses = []
        if torch.cuda.is_initialized():  # a host has one stream, and need not be asked who is on it
            addresses = [self._ledger.address(s) for s in _storages(tree_leaves((args, kwargs)))]
        self._call(func.name().split("::")[-1], addresses)
        out = func(*args, **kwargs)
        return self._ledger.returned(func, args, kwargs, out)

    @property
    def module(self) -> str:
        """For which one is being worked."""
        return self._modules.current()

    @property
    def in_forward(self) -> bool:
        """Whether a module's forward is running."""
        return self._modules.running

    def begin(self, activity: Activity) -> None:
        """From now on time is spent on this."""
        self._activities.append(activity)
        self._call(activity.value, [])

    def end(self) -> None:
        """And from now on again on what was before."""
        self._activities.pop()
        self._call(self._activities[-1].value, [])

    def _call(self, operator: str, addresses: list[int]) -> None:
        if self.before_each is not None:
            self.before_each()
        self.running.append(
            Running(operator, self.phase, self.module, addresses, _stream(), self._activities[-1])
        )
        self._ledger.mark(CALL, len(self.running) - 1)

    def gone(self, address: int) -> None:
        """What was there before the step, at this address, no longer is: the allocator does not tell."""
        self._ledger.mark(GONE, address)

    def stop(self) -> None:
        """The step is over."""
        self._ledger.mark(END, 0)

    def turn(self, phase: str) -> None:
        """What was made and is still there has been saved."""
        self.phase = phase
        self._ledger.mark(PHASE, 0)

    def known(self, kind: Kind, tensors: Iterable[torch.Tensor]) -> Known:
        """What these storages are as long as they live."""
        return Known(kind, {self._ledger.address(s): s.nbytes() for s in _storages(tensors)})

    def note(self, kind: Kind, tensors: Iterable[torch.Tensor]) -> None:
        """The storages that these have now, made by this step, are of this kind."""
        self.notes.append(self.known(kind, tensors))
        self._ledger.mark(KIND, len(self.notes) - 1)


class Modules:
    """Whose forward runs, or whose backward: autograd numbers its nodes as forward makes them.

    Without a model, every module that no other one calls is a model, and its own path is its class's name.
    """

    def __init__(self, model: torch.nn.Module | None = None) -> None:
        self._paths = {} if model is None else _paths(model)
        self._adopts = model is None
        self._stack: list[str] = []
        self._numbers, self._owners = [-1], [""]
        self._hooks: list[Any] = []

    def __enter__(self) -> None:
        self._hooks = [
            register_module_forward_pre_hook(self._begin),
            register_module_forward_hook(self._end, always_call=True),
        ]

    def __exit__(self, *error: object) -> None:
        for hook in self._hooks:
            hook.remove()

    @property
    def running(self) -> bool:
        """Whether a forward is."""
        return bool(self._stack)

    def current(self) -> str:
        """The path of the innermost module."""
        if self._stack:
            return self._stack[-1]
        node: Any = torch._C._current_autograd_node()
        if node is None:
            return ""
        return self._owners[bisect_right(self._numbers, node._sequence_nr()) - 1]

    @property
    def known(self) -> Iterable[torch.nn.Module]:
        """All that it distinguishes."""
        return self._paths.keys()

    def _begin(self, module: torch.nn.Module, args: Any) -> None:
        if self._adopts and not self._stack and module not in self._paths:
            self._paths |= _paths(module) | {module: type(module).__name__}
        if module in self._paths:
            self._stack.append(self._paths[module])
            self._turn()

    def _end(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        if module in self._paths and self._stack:
            self._stack.pop()
            self._turn()

    def _turn(self) -> None:
        self._numbers.append(torch._C._autograd._get_sequence_nr())
        self._owners.append(self._stack[-1] if self._stack else "")


def _paths(model: torch.nn.Module) -> dict[torch.nn.Module, str]:
    return {module: path for path, module in model.named_modules()}


def _stream() -> int:
    """The current stream's number."""
    return int(torch.cuda.current_stream().stream_id) if torch.cuda.is_initialized() else 0


def states_of(optimizer: torch.optim.Optimizer | None) -> list[torch.Tensor]:
    """The optimizer's tensors, as they are now."""
    return tensors_of([*optimizer.state.values()]) if optimizer is not None else []


def tensors_of(values: Any) -> list[torch.Tensor]:
    """Those within, also in mappings that torch's trees take for one value."""
    found = [tensors_of(dict(leaf)) if isinstance(leaf, Mapping) else [leaf] for leaf in tree_leaves(values)]
    return [leaf for leaves in found for leaf in leaves if isinstance(leaf, torch.Tensor)]


def _storages(values: Iterable[Any]) -> Iterator[torch.UntypedStorage]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield from (part.untyped_storage() for part in parts_of(value) if part.layout is torch.strided)


def _device(tensors: Iterable[torch.Tensor]) -> torch.device:
    return next((tensor.device for tensor in tensors), torch.device("cpu"))

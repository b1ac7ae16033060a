"""Watches a forward pass: every saved tensor is matched with its reader, then packed, or only observed."""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from types import TracebackType
from typing import Any

import torch
from torch.autograd.graph import Node
from torch.overrides import TorchFunctionMode

from squeezebox.capture._entries import Entry, Handle, Owned, is_plain
from squeezebox.capture._held import Held
from squeezebox.capture._hooks import Hooks, Regions
from squeezebox.capture._lineage import Call, Lineage
from squeezebox.capture._packer import Choice, kept, waiting
from squeezebox.capture._path import ModulePath
from squeezebox.capture._readings import (
    Reading,
    in_backward,
    is_custom,
    new_nodes,
    options_of,
    readings_of,
    saved_attributes,
    sequence_number,
)
from squeezebox.capture._region import Slicer
from squeezebox.capture._repeatable import reads_values
from squeezebox.capture._rules import OTHER, Rule, operator_name
from squeezebox.capture._stand_in import Deferred
from squeezebox.capture._statistics import Collector
from squeezebox.capture._store import Store
from squeezebox.memory import MovedWeight, parts_of
from squeezebox.schema import UnsupportedModelError


class Recorder(TorchFunctionMode):
    """A context around forward: packs what autograd saves into a :class:`Store`.

    Between an operator's start and end its saved tensors are only noted. When it returns, the autograd
    nodes it made say which attribute each one is, so the roles are exact for any code that calls torch,
    and the tensors are packed at once. Tensors that no operator of torch claims (custom Functions, the
    inputs of checkpointed regions) are held exactly.
    """

    def __init__(self, store: Store, model: torch.nn.Module, owned: Owned | None = None) -> None:
        super().__init__()
        self.store = store
        self.collector: Collector | None = None
        self.active = False
        self.is_hidden = False  # whether somebody else's hooks were entered in this step
        self.path = ModulePath(model)
        self._occurrences: Counter[str] = Counter()
        self._owned = Owned() if owned is None else owned
        self._stack = contextlib.ExitStack()
        self.slicer: Slicer | None = None
        self.regions = Regions()
        self.hooks = Hooks(store, self.path, self.regions, self._owned.holds)

    def start_step(self) -> None:
        """Forget the last step's rows and occurrence counts."""
        self.hooks.backward_seen = self.is_hidden = False
        self._occurrences.clear()
        self.regions.start_step()
        self.store.start_step()

    def own(self, tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """Name more tensors that somebody else holds: parameters, buffers, the caller's inputs.

        Returns those that have a storage.
        """
        return self._owned.add(tensors)

    def __enter__(self) -> Recorder:
        super().__enter__()  # type: ignore[no-untyped-call]
        self.active = True
        self._stack.enter_context(self.path)
        self._stack.enter_context(self.hooks.around())
        if self.slicer is not None:
            self.slicer.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            if kind is None:
                if self.slicer is not None:
                    self.slicer.finish()
                with torch.no_grad(), torch._C.DisableTorchFunction():  # this mode is still on
                    self._settle_unclaimed()
        finally:
            self.active = False
            self._owned.clear()
            self.store.forget_calls()
            if self.store.lineage is not None:
                self.store.lineage.clear()
            self._stack.close()
            super().__exit__(kind, error, traceback)  # type: ignore[no-untyped-call]
            self.hooks.clear()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.slicer is not None:
            func, args, kwargs = self.slicer.instead(func, types, args, kwargs)
        out = self._run(func, args, kwargs)
        for each in self.store.onlookers:
            each.ran(func, args, kwargs, out, self)
        return out

    def replay(self, call: Deferred, x: torch.Tensor) -> torch.Tensor:
        """As :class:`Forward`."""
        with self.path.within(call.module):
            result: torch.Tensor = self._run(call.function, (x, *call.arguments), call.keywords)
        return result

    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Call ``func`` and see to what it saves."""
        onlookers = self.store.onlookers
        for each in onlookers:
            each.holding()
        if self.hooks.pending:
            self._settle_unclaimed()
        since = sequence_number()
        for each in onlookers:
            each.held()
        out, call = self._called(func, args, kwargs)
        self._owned.note_made(out)
        self.store.follows_values |= reads_values(func, args)
        for each in onlookers:
            each.holding()
        if self.store.spares is not None and not (torch.is_grad_enabled() and self.hooks.innermost):
            self.regions.ran(out)
        self.is_hidden = self.is_hidden or not self.hooks.innermost
        if self.hooks.pending or self.collector is not None:
            with torch.no_grad():
                self._claim(out if out is not None else args, since, getattr(func, "__name__", ""), call)
        for each in onlookers:
            each.held()
        return out

    def lineage(self) -> Lineage:
        """A lineage of the operators that this recorder sees."""
        return Lineage(self._is_held, is_plain)

    def _is_held(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor is there in backward anyway: somebody else's, or small."""
        if isinstance(tensor, MovedWeight) or not is_plain(tensor.data):
            return False
        return self._owned.holds(tensor) or tensor.untyped_storage().nbytes() < self.store.small_bytes

    def _called(self, function: Any, args: Any, kwargs: Any) -> tuple[Any, Call | None]:
        """What the operator returns, and the call if it can be repeated and anybody wants to know."""
        lineage, onlookers = self.store.lineage, self.store.onlookers
        if lineage is None:
            return function(*args, **(kwargs or {})), None
        for each in onlookers:
            each.following()
        call = lineage.begin(function, args, kwargs)
        for each in onlookers:
            each.followed()
        if call is None:
            return function(*args, **(kwargs or {})), None
        for each in onlookers:
            each.calling(call)
        out = function(*args, **(kwargs or {}))
        for each in onlookers:
            each.called(call)
            each.following()
        lineage.end(call, args, kwargs, out)
        for each in onlookers:
            each.followed()
        return out, call

    def _claim(self, outputs: Any, since: int, function: str, call: Call | None) -> None:
        """Match pending handles with the attributes of the nodes that the operator made."""
        mine = self.hooks.innermost
        nodes = list(new_nodes(outputs, since))
        for node in nodes:
            operator = operator_name(node.name())
            if operator.startswith("CompiledFunction"):
                raise UnsupportedModelError(COMPILED)
            readers = self.hooks.readers(node) if mine and not is_custom(node) else []
            readings = readings_of(node, operator, function, readers)
            handles = dict(readers)
            options = [options_of(each, node, handles) for each in readings]
            if self.collector is not None:
                repeatable = (mine or not saved_attributes(type(node))) and not is_custom(node)
                self.collector.watch(node, operator, self.module, readings, repeatable)
            for reading, given in zip(readings, options, strict=True):
                if reading.handle in self.hooks.pending:
                    self._settle(reading, given, operator, call)
        self._settle_unclaimed()
        if self.collector is not None:
            self._watch_unseen(nodes, self.collector)
            self.collector.note_packed(nodes)

    def _watch_unseen(self, nodes: list[Node], collector: Collector) -> None:
        """What leads to an operator's nodes: torch does not say when custom functions make theirs."""
        stack = list(nodes)
        while stack:
            for node, _ in stack.pop().next_functions:
                if node is not None and collector.is_new(node):
                    collector.watch(node, operator_name(node.name()), self.module, [], repeatable=False)
                    stack.append(node)

    @property
    def catches(self) -> bool:
        """As :class:`Forward`."""
        autocast = torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")
        return torch.is_grad_enabled() and not autocast and not in_backward() and self.hooks.innermost

    def skip(self, keys: Iterable[str]) -> None:
        """As :class:`Forward`."""
        self._occurrences.update(key.partition("#")[0] for key in keys)

    @property
    def module(self) -> str:
        """Path of the module whose forward is running ('' for the model itself)."""
        return self.path.current

    def _settle(self, reading: Reading, options: dict[str, Any], operator: str, call: Call | None) -> None:
        handle, key = reading.handle, functools.partial(self._key, operator, reading.attribute)
        if not handle.is_pending:
            self.store.note_small(handle, key)
        else:
            if call is not None:
                self.store.note(handle, reading.rule, reading.attribute, call)
            exact = self.collector.exact_copy(handle) if self.collector is not None else None
            tensor = handle.tensor if self.collector is not None else None
            self.store.settle(handle, reading.rule, key, options)
            if self.collector is not None and tensor is not None:
                self.collector.total.keep(handle, tensor)
            handle.exact = exact
        del self.hooks.pending[handle]

    def _settle_unclaimed(self) -> None:
        key = functools.partial(self._key, "custom", "saved")
        for handle in list(self.hooks.pending):
            if handle.is_pending:
                self.store.settle(handle, OTHER, key, {})
            elif handle.nbytes:  # checkpointing saves one without elements for each region
                self.store.note_small(handle, key)
            del self.hooks.pending[handle]

    def _key(self, operator: str, attribute: str) -> tuple[str, str]:
        name = f"{self.module}:{operator.removesuffix('Backward')}.{attribute}"
        self._occurrences[name] += 1
        count = self._occurrences[name]
        key = name if count == 1 else f"{name}#{count}"
        for each in self.store.onlookers:
            each.named(key)
        return key, self.module


COMPILED = (
    "part of the model is compiled by torch.compile: saved-tensor hooks written in Python would unpack "
    "everything before its backward starts and raise the peak. Attach to the eager model instead (drop "
    "torch.compile for this run, or compile only code that saves nothing)."
)


@contextlib.contextmanager
def observing(model: torch.nn.Module, inputs: Iterable[torch.Tensor]) -> Iterator[Store]:
    """A context around a model's forward that holds every tensor itself, as plain PyTorch does.

    Storages, owners and roles are identified as in a session, so :func:`saved_bytes` of the store is what a
    report would call saved. Fake tensors count as plain ones: their storages have sizes and identities too.
    """
    store = Store(_KeepAll(), lambda means: _Keeper(), parts_of)
    recorder = Recorder(store, model, Owned(lambda tensor: tensor.layout is torch.strided))
    recorder.start_step()
    tensors = (*model.parameters(), *model.buffers(), *inputs)
    recorder.own(part for tensor in tensors for part in parts_of(tensor))
    with recorder:
        yield store


def saved_bytes(store: Store) -> dict[str, int]:
    """Bytes by role, each storage once, in the role of its first reader; largest first."""
    totals: dict[str, int] = {}
    for row in store.rows:
        role = row.rule.role.value
        totals[role] = totals.get(role, 0) + row.saved_bytes
    small = sum(store.small.values())
    if small:
        totals["other"] = totals.get("other", 0) + small
    return dict(sorted(totals.items(), key=lambda item: -item[1]))


class _KeepAll:
    """The policy of those who only look."""

    def choose(self, key: str, rule: Rule, tensor: torch.Tensor) -> Choice:
        """Hold the tensor itself."""
        return Choice(codec="keep")


class _Keeper:
    """Holds every tensor itself, whatever the rule says."""

    def pack(self, entry: Entry, handle: Handle, rule: Rule, options: Mapping[str, Any]) -> Held:
        """As a :class:`Packing`."""
        return entry.values or kept(entry, waiting(handle))

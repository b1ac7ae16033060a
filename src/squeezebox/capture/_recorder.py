"""Watches a forward pass: every tensor autograd saves is matched with its reader, then packed."""

from __future__ import annotations

import contextlib
import functools
import math
from collections import Counter
from collections.abc import Iterable
from types import TracebackType
from typing import Any

import torch
from torch.autograd.graph import Node, saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode

from squeezebox import codecs
from squeezebox.capture._checkpointed import Regions
from squeezebox.capture._entries import Handle, is_plain
from squeezebox.capture._graph import (
    in_backward,
    is_custom,
    new_nodes,
    per_dim,
    saved_attributes,
    sequence_number,
)
from squeezebox.capture._lineage import Call, Lineage
from squeezebox.capture._overwrites import Stamp, attribute_of, overwritten, stamp
from squeezebox.capture._path import ModulePath
from squeezebox.capture._region import Slicer, Tracer
from squeezebox.capture._rules import OTHER, Rule, operator_name, rule_for
from squeezebox.capture._stand_in import Deferred
from squeezebox.capture._statistics import Collector
from squeezebox.capture._store import Store
from squeezebox.schema import CaptureError, Role, UnsupportedModelError


class Recorder(TorchFunctionMode):
    """A context around forward: packs what autograd saves into a :class:`Store`.

    Between an operator's start and end its saved tensors are only noted. When it returns, the autograd
    nodes it made say which attribute each one is, so the roles are exact for any code that calls torch,
    and the tensors are packed at once. Tensors that no operator of torch claims (custom Functions, the
    inputs of checkpointed regions) are held exactly.
    """

    def __init__(self, store: Store, model: torch.nn.Module) -> None:
        super().__init__()
        self.store = store
        self.collector: Collector | None = None
        self.bypass = False
        self.checks = False  # whether to look for saved tensors that are overwritten
        self.active = False
        self.backward_seen = False
        self.is_hidden = False  # whether somebody else's hooks were entered in this step
        self.path = ModulePath(model)
        self.last_read = ""  # key of the tensor that backward asked for last
        self._pending: list[Handle] = []
        self._small: list[Handle] = []  # held themselves; counted all the same, so that keys stay as they are
        self._reading: list[Handle] | None = None
        self._occurrences: Counter[str] = Counter()
        self._owned: dict[int, StorageWeakRef] = {}
        self.pack_hook = self._pack
        self._stack = contextlib.ExitStack()
        self.slicer: Slicer | None = None
        self.tracer: Tracer | None = None
        self.regions = Regions()

    def start_step(self) -> None:
        """Forget the last step's rows and occurrence counts."""
        self.backward_seen = self.is_hidden = False
        self._occurrences.clear()
        self.regions.start_step()
        self.store.start_step()

    def own(self, tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """Name more tensors that somebody else holds: parameters, buffers, the caller's inputs.

        Returns those that have a storage.
        """
        owned = [
            tensor
            for tensor in tensors
            if is_plain(tensor) or (type(tensor) is torch.nn.Parameter and is_plain(tensor.data))
        ]
        for tensor in owned:
            storage = tensor.untyped_storage()
            self._owned[storage._cdata] = StorageWeakRef(storage)
        return owned

    def __enter__(self) -> Recorder:
        super().__enter__()  # type: ignore[no-untyped-call]
        self.active = True
        self._stack.enter_context(self.path)
        self._stack.enter_context(saved_tensors_hooks(self.pack_hook, self._unpack))
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
                self._settle_unclaimed()
        finally:
            self.active = False
            self._owned.clear()
            self.store.forget_calls()
            if self.store.lineage is not None:
                self.store.lineage.clear()
            self._pending.clear()
            self._small.clear()
            self._stack.close()
            super().__exit__(kind, error, traceback)  # type: ignore[no-untyped-call]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.slicer is not None:
            func, args, kwargs = self.slicer.instead(func, types, args, kwargs)
        out = self._run(func, args, kwargs)
        if self.tracer is not None:
            self.tracer.saw(func, args, kwargs, out, self)
        return out

    def replay(self, call: Deferred, x: torch.Tensor) -> torch.Tensor:
        """As :class:`Forward`."""
        with self.path.within(call.module):
            result: torch.Tensor = self._run(call.function, (x, *call.arguments), call.keywords)
        return result

    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Call ``func`` and see to what it saves."""
        if self._pending:
            self._settle_unclaimed()
        since = sequence_number()
        out, call = self._called(func, args, kwargs)
        if self.store.spares is not None and not (torch.is_grad_enabled() and self._is_innermost()):
            self.regions.ran(out)
        if self._pending or self._small or self.collector is not None:
            with torch.no_grad():
                self._claim(out if out is not None else args, since, getattr(func, "__name__", ""), call)
        elif not self.is_hidden:
            self.is_hidden = not self._is_innermost()
        return out

    def lineage(self) -> Lineage:
        """A lineage of the operators that this recorder sees."""
        return Lineage(self._is_held, is_plain)

    def _is_held(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor is there in backward anyway: somebody else's, or small."""
        if not is_plain(tensor.data):
            return False
        return self._is_borrowed(tensor) or tensor.untyped_storage().nbytes() < self.store.small_bytes

    def _called(self, function: Any, args: Any, kwargs: Any) -> tuple[Any, Call | None]:
        """What the operator returns, and the call if it can be repeated and anybody wants to know."""
        lineage, listener = self.store.lineage, self.store.listener
        call = lineage.begin(function, args, kwargs) if lineage is not None else None
        if lineage is None or call is None:
            return function(*args, **(kwargs or {})), None
        if listener is not None:
            listener.calling(call)
        out = function(*args, **(kwargs or {}))
        if listener is not None:
            listener.called(call)
        lineage.end(call, args, kwargs, out)
        return out, call

    def _pack(self, tensor: torch.Tensor) -> Handle:
        if self.store.spares is not None:
            self.regions.saving()
        handle = self.store.handle(tensor)
        if self.checks:
            handle.stamp = stamp(tensor, self.module)
        if self.bypass or self._is_borrowed(tensor):
            self.store.leave(handle, borrowed=not self.bypass)
        elif tensor.untyped_storage().nbytes() < self.store.small_bytes:
            self.store.leave(handle, borrowed=False)
            self._small.append(handle)
        else:
            handle.form = "pending"
            self._pending.append(handle)
        return handle

    def _unpack(self, handle: Handle) -> torch.Tensor:
        if self._reading is not None:
            self._reading.append(handle)
            return handle.tensor if handle.tensor is not None else torch.empty(0, device="cpu")
        self.backward_seen = self.backward_seen or in_backward()
        if handle.entry is not None:
            self.last_read = handle.entry.row.key
        tensor = self.store.unpack(handle)
        if handle.stamp is not None and handle.tensor is not None and handle.override is None:
            self._check(handle, handle.stamp, tensor)
        return tensor

    def _check(self, handle: Handle, mark: Stamp, tensor: torch.Tensor) -> None:
        found = overwritten(mark, tensor, lambda: attribute_of(handle, self._handles))
        if found is not None:
            raise CaptureError(str(found))

    def _is_borrowed(self, tensor: torch.Tensor) -> bool:
        if not is_plain(tensor) or isinstance(tensor._base, torch.nn.Parameter):
            return True
        owner = self._owned.get(tensor.untyped_storage()._cdata)
        return owner is not None and not owner.expired()

    def _claim(self, outputs: Any, since: int, function: str, call: Call | None) -> None:
        """Match pending handles with the attributes of the nodes that the operator made."""
        mine = self._is_innermost()
        nodes = list(new_nodes(outputs, since))
        for node in nodes:
            operator = operator_name(node.name())
            if operator.startswith("CompiledFunction"):
                raise UnsupportedModelError(COMPILED)
            readers = self._readers(node) if mine and not is_custom(node) else []
            rules = [_rule(operator, attribute, function, handle) for attribute, handle in readers]
            rules = [OTHER if _is_lone(rule, node, readers) else rule for rule in rules]
            options = [
                _options(rule, attribute, node, readers)
                for (attribute, _), rule in zip(readers, rules, strict=True)
            ]
            paired = list(zip(readers, rules, strict=True))
            if self.collector is not None:
                repeatable = (mine or not saved_attributes(node)) and not is_custom(node)
                self.collector.watch(node, operator, self.module, paired, repeatable)
            for ((attribute, handle), rule), given in zip(paired, options, strict=True):
                if handle in self._pending:
                    if call is not None:
                        self.store.note(handle, rule, attribute, call)
                    self._settle(handle, rule, given, operator, attribute)
                elif handle in self._small:
                    self.store.note_small(handle, self._key(operator, attribute)[0])
        self._small.clear()
        self._settle_unclaimed()
        if self.collector is not None:
            self.collector.note_packed(nodes)

    @property
    def catches(self) -> bool:
        """As :class:`Forward`."""
        autocast = torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")
        return torch.is_grad_enabled() and not autocast and not in_backward() and self._is_innermost()

    def skip(self, keys: Iterable[str]) -> None:
        """As :class:`Forward`."""
        self._occurrences.update(key.partition("#")[0] for key in keys)

    def _is_innermost(self) -> bool:
        """Whether what is saved now comes here."""
        top = torch._C._autograd._top_saved_tensors_default_hooks(False)
        return top is not None and top[0] is self.pack_hook

    @property
    def module(self) -> str:
        """Path of the module whose forward is running ('' for the model itself)."""
        return self.path.current

    def _readers(self, node: Node) -> list[tuple[str, Handle]]:
        readers: list[tuple[str, Handle]] = []
        for attribute in saved_attributes(node):
            readers.extend((attribute, handle) for handle in self._handles(node, attribute))
        return readers

    def _handles(self, node: Node, attribute: str) -> list[Handle]:
        self._reading = []
        try:
            getattr(node, f"_saved_{attribute}")
        finally:
            found, self._reading = self._reading, None
        return found

    def _settle(
        self, handle: Handle, rule: Rule, options: dict[str, Any], operator: str, attribute: str
    ) -> None:
        self._pending.remove(handle)
        exact = self.collector.exact_copy(handle) if self.collector is not None else None
        tensor = handle.tensor if self.collector is not None else None
        self.store.settle(handle, rule, lambda: self._key(operator, attribute), options)
        if self.collector is not None and tensor is not None:
            self.collector.total.keep(handle, tensor)
        handle.exact = exact

    def _settle_unclaimed(self) -> None:
        for handle in self._pending:
            self.store.settle(handle, OTHER, lambda: self._key("custom", "saved"), {})
        self._pending.clear()

    def _key(self, operator: str, attribute: str) -> tuple[str, str]:
        name = f"{self.module}:{operator.removesuffix('Backward')}.{attribute}"
        self._occurrences[name] += 1
        count = self._occurrences[name]
        key = name if count == 1 else f"{name}#{count}"
        if self.tracer is not None:
            self.tracer.keys.append(key)
        return key, self.module


COMPILED = (
    "part of the model is compiled by torch.compile: saved-tensor hooks written in Python would unpack "
    "everything before its backward starts and raise the peak. Attach to the eager model instead (drop "
    "torch.compile for this run, or compile only code that saves nothing)."
)


def _rule(operator: str, attribute: str, function: str, handle: Handle) -> Rule:
    if handle.tensor is None:
        return OTHER
    return rule_for(operator, attribute, function, kind=codecs.kind_of(handle.tensor.dtype))


_INVERSE = {Role.BATCH_NORM_INPUT: "inverse_by_channel", Role.NORM_INPUT: "inverse_by_row"}


def _options(rule: Rule, attribute: str, node: Any, readers: list[tuple[str, Handle]]) -> dict[str, Any]:
    """What a codec, or who chooses its bound, must know of the operator."""
    if rule.codec == "interval":
        return {"lower": float(node._saved_min_val), "upper": float(node._saved_max_val)}
    if rule.role in _INVERSE:
        inverse = _inverse(node, readers)
        return {} if inverse is None else {_INVERSE[rule.role]: inverse}
    if rule.role is Role.ATTENTION:
        found = dict(readers)
        query, key = found["query"].tensor, found["key"].tensor
        measures = {"logits": functools.partial(_logits, node, query, key)}
        if attribute in ("query", "key"):
            measures["highest"] = functools.partial(_highest, node, query, key)
        return measures
    if rule.codec != "pool-index":
        return {}
    names = ("kernel_size", "stride", "padding", "dilation")
    options: dict[str, Any] = {name: per_dim(getattr(node, f"_saved_{name}"), 2) for name in names}
    options["stride"] = options["stride"] or options["kernel_size"]
    options["input_shape"] = dict(readers)["self"].geometry[0]
    return options


def _inverse(node: Any, readers: list[tuple[str, Handle]]) -> torch.Tensor | None:
    """One over the deviations that a normalisation saved; None in evaluation."""
    handle = dict(readers).get("result1" if "Rms" in node.name() else "result2")
    inverse = None if handle is None else handle.tensor
    return inverse if inverse is not None and inverse.numel() else None


def _is_lone(rule: Rule, node: Any, readers: list[tuple[str, Handle]]) -> bool:
    """Whether each row that is normalised has one element: its result is always the same, whatever it is.

    What an error costs there rises with its fourth power, so no bound would settle.
    """
    if rule.role is not Role.NORM_INPUT:
        return False
    inverse = _inverse(node, readers)
    return inverse is not None and inverse.numel() == math.prod(dict(readers)["input"].geometry[0])


def _logits(node: Any, query: torch.Tensor | None, key: torch.Tensor | None) -> float:
    """Root mean square that the logits of an attention have where query and key are unrelated."""
    if query is None or key is None:
        return 1.0
    width = math.sqrt(query.shape[-1]) * _root_mean_square(query) * _root_mean_square(key)
    return _scale(node, query) * width


_LOGIT_ERROR = 0.5  # where rows are longest; evenly spread errors then deviate by 0.29


def _highest(node: Any, query: torch.Tensor | None, key: torch.Tensor | None) -> float:
    """The bound at which errors of query and key move no logit far; 0 where the two are not there.

    Backward takes exponentials of logits ``scale * q . k``, so what an error beyond this costs has no limit.
    Deviations of e in the elements of k deviate a logit by ``scale * |q| * e``.
    """
    if query is None or key is None:
        return 0.0
    longest = math.hypot(*(_longest_row(each) for each in (query, key)))
    return _LOGIT_ERROR / (_scale(node, query) * longest) if longest > 0.0 else math.inf


def _longest_row(tensor: torch.Tensor) -> float:
    dtype = torch.promote_types(tensor.dtype, torch.float32)
    return float(torch.linalg.vector_norm(tensor, dim=-1, dtype=dtype).max())


def _scale(node: Any, query: torch.Tensor) -> float:
    return float(node._saved_scale if node._saved_scale is not None else query.shape[-1] ** -0.5)


def _root_mean_square(tensor: torch.Tensor) -> float:
    dtype = torch.promote_types(tensor.dtype, torch.float32)
    return float(torch.linalg.vector_norm(tensor, dtype=dtype)) / math.sqrt(max(tensor.numel(), 1))

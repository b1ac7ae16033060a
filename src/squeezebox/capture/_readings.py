"""Reading the autograd graph: new nodes, what they saved, in which roles, and what codecs must know."""

from __future__ import annotations

import functools
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.graph import Node

from squeezebox import codecs
from squeezebox.capture._entries import Handle
from squeezebox.capture._rules import OTHER, Rule, row, rule_for
from squeezebox.schema import Role

# Leaf nodes (AccumulateGrad) carry the largest 64-bit number instead of a sequence number.
_LEAF_SEQUENCE = 1 << 62
_SAVED: dict[type, tuple[str, ...]] = {}  # a cache of dir(), which is slow


def sequence_number() -> int:
    """The number that the next autograd node made on this thread will get."""
    return int(torch._C._autograd._get_sequence_nr())


def new_nodes(outputs: Any, since: int) -> Iterator[Node]:
    """The nodes behind ``outputs`` that were made at or after sequence number ``since``."""
    stack = [tensor.grad_fn for tensor in tensors_of(outputs)]
    seen: set[int] = set()
    while stack:
        node = stack.pop()
        if node is None:
            continue
        number = node_number(node)
        if number < since or number in seen or number >= _LEAF_SEQUENCE:
            continue
        seen.add(number)
        yield node
        stack.extend(next_node for next_node, _ in node.next_functions)


def node_number(node: Node) -> int:
    """A node's sequence number: unique and rising within a thread."""
    return int(node._sequence_nr())


def is_leaf_node(node: Node) -> bool:
    """Whether the node accumulates into a leaf's gradient."""
    return node_number(node) >= _LEAF_SEQUENCE


def leaf_of(node: Node) -> torch.Tensor:
    """The tensor into whose gradient a leaf's node accumulates."""
    leaf: torch.Tensor = node.variable  # type: ignore[attr-defined]
    return leaf


def is_custom(node: Node) -> bool:
    """Whether the node is a torch.autograd.Function of somebody's own."""
    return isinstance(node, torch.autograd.function.BackwardCFunction)


def leaves(output: torch.Tensor) -> Iterator[torch.Tensor]:
    """The tensors whose ``grad`` a backward from ``output`` adds to."""
    stack = [output.grad_fn]
    seen: set[Node] = set()
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if is_leaf_node(node):
            yield leaf_of(node)
        stack.extend(following for following, _ in node.next_functions)


def saved_attributes(kind: type) -> tuple[str, ...]:
    """Names of the tensors that nodes of a type made in C++ save, in a fixed order."""
    if kind not in _SAVED:
        prefix = "_raw_saved_"
        names = (name for name in dir(kind) if name.startswith(prefix))
        _SAVED[kind] = tuple(name.removeprefix(prefix) for name in names)
    return _SAVED[kind]


def per_dim(sizes: Sequence[int], dims: int) -> tuple[int, ...]:
    """One size for each of the dims that a window slides over; torch accepts a single one for all."""
    return tuple(sizes) * dims if len(sizes) == 1 else tuple(sizes)


def in_backward() -> bool:
    """Whether this thread is running a backward pass (a checkpoint's recomputation, say)."""
    return int(torch._C._current_graph_task_id()) != -1


def tensors_of(outputs: Any) -> Iterator[torch.Tensor]:
    """Every tensor in what an operator returned."""
    if isinstance(outputs, torch.Tensor):
        yield outputs
    elif isinstance(outputs, (tuple, list)):
        for output in outputs:
            yield from tensors_of(output)
    elif isinstance(outputs, dict):
        yield from tensors_of(list(outputs.values()))


@dataclass(frozen=True, slots=True, eq=False)
class Reading:
    """One tensor that a node saved as one of its attributes, and what its backward reads of it."""

    attribute: str
    handle: Handle
    rule: Rule


def readings_of(
    node: Any, operator: str, function: str, readers: Collection[tuple[str, Handle]]
) -> list[Reading]:
    """What the backward of the node reads of each handle; ``function`` is torch's that was called."""
    handles = dict(readers)
    reduction = f"{operator}:{getattr(node, '_saved_reduce', '')}"
    found = []
    for attribute, handle in readers:
        has_own = operator.endswith("ReduceBackward") and row(reduction, attribute) is not None
        rule = _rule(reduction if has_own else operator, attribute, function, handle)
        found.append(Reading(attribute, handle, OTHER if _is_lone(rule, node, handles) else rule))
    return found


def _rule(operator: str, attribute: str, function: str, handle: Handle) -> Rule:
    if handle.tensor is None or handle.tensor.is_nested:  # whose rows' lengths no codec knows
        return OTHER
    return rule_for(operator, attribute, function, kind=codecs.kind_of(handle.tensor.dtype))


_INVERSE = {Role.BATCH_NORM_INPUT: "inverse_by_channel", Role.NORM_INPUT: "inverse_by_row"}


def options_of(reading: Reading, node: Any, handles: Mapping[str, Handle]) -> dict[str, Any]:
    """What a codec, or who chooses its bound, must know of the operator; ``handles`` by attribute."""
    rule = reading.rule
    if rule.codec == "interval":
        return {"lower": float(node._saved_min_val), "upper": float(node._saved_max_val)}
    if rule.role in _INVERSE:
        inverse = _inverse(node, handles)
        return {} if inverse is None else {_INVERSE[rule.role]: inverse}
    if rule.role is Role.ATTENTION:
        query, key = handles["query"].tensor, handles["key"].tensor
        if query is None or key is None:  # a weight that is elsewhere
            return {}
        measures = {"logits": functools.partial(_logits, node, query, key)}
        if reading.attribute in ("query", "key"):
            measures["highest"] = functools.partial(_highest, node, query, key)
        return measures
    if rule.codec != "pool-index":
        return {}
    names = ("kernel_size", "stride", "padding", "dilation")
    options: dict[str, Any] = {name: per_dim(getattr(node, f"_saved_{name}"), 2) for name in names}
    options["stride"] = options["stride"] or options["kernel_size"]
    options["input_shape"] = handles["self"].geometry[0]
    return options


def _inverse(node: Any, handles: Mapping[str, Handle]) -> torch.Tensor | None:
    """One over the deviations that a normalisation saved; None in evaluation."""
    handle = handles.get("result1" if "Rms" in node.name() else "result2")
    inverse = None if handle is None else handle.tensor
    return inverse if inverse is not None and inverse.numel() else None


def _is_lone(rule: Rule, node: Any, handles: Mapping[str, Handle]) -> bool:
    """Whether each row that is normalised has one element: its result is always the same, whatever it is.

    What an error costs there rises with its fourth power, so no bound would settle.
    """
    if rule.role is not Role.NORM_INPUT:
        return False
    inverse = _inverse(node, handles)
    return inverse is not None and inverse.numel() == math.prod(handles["input"].geometry[0])


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

"""Reading the autograd graph: the nodes an operator just made and the tensors they saved."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.autograd.graph import Node

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

"""Where a model can be cut, and the pieces it then consists of."""

from __future__ import annotations

import hashlib
import inspect
import itertools
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node
from torch.utils import _pytree as pytree

from squeezebox.schema import UnsupportedModelError, in_one_line

_MOST_CROSSING = 8  # tensors that a cut may part, at most
_BACKWARD_HOOKS = ("_backward_hooks", "_backward_pre_hooks")
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", *_BACKWARD_HOOKS)
_LARGEST = 0.25  # share of the operators in one piece, above which more tensors may cross


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a model that no pipeline cuts further: called with tensors, it returns a tuple of tensors."""

    name: str
    module: nn.Module


def cut(model: nn.Module, inputs: tuple[Any, ...], keywords: Sequence[str] = ()) -> list[Piece]:
    """Part a model into pieces which, called one after the other, are the model.

    An ``nn.Sequential`` is parted into its children, and stays as it is. Any other model, or one with a
    forward or hooks of its own, is exported
    (``torch.export``) with ``inputs``, one microbatch, and parted where few tensors cross, if possible one:
    its pieces are graphs for inputs of this shape and in the mode, training or evaluation, that the model
    is in; they share its parameters and buffers.

    Args:
        model: any module.
        inputs: tensors; the first piece is called with such.
        keywords: by which the model takes them, "" or nothing for those that it takes by place.

    Raises:
        UnsupportedModelError: torch.export cannot trace the model, no cut is possible, or a parameter is a
            DTensor.
    """
    _require_whole(model)
    if any(keywords) and _is_plain(model):
        raise UnsupportedModelError(
            f"an nn.Sequential takes its inputs by place, and these are called {', '.join(keywords)}. Pass a "
            "tensor, or a tuple of them."
        )
    if _is_plain(model):
        groups = [*_grouped(model)]
        return [
            Piece(name, _Tupled(children, is_first=group is groups[0], is_last=group is groups[-1]))
            for group in groups
            for name, children in [group]
        ]
    _require_no_backward_hooks(model)
    pairs = [*itertools.zip_longest(inputs, keywords, fillvalue="")]
    try:
        by_place = tuple(each for each, name in pairs if not name)
        program = torch.export.export(model, by_place, {name: each for each, name in pairs if name})
    except Exception as error:  # noqa: BLE001  whatever the model's own code raises while it is traced
        raise UnsupportedModelError(
            f"torch.export cannot trace {type(model).__name__}, so there is no telling where to cut it: "
            f"{in_one_line(error)}. Change what it names, or make the model an nn.Sequential."
        ) from error
    traced = program.module()
    assert isinstance(traced, GraphModule)
    spec = program.call_spec.out_spec
    pieces = [Piece(name, GraphModule(traced, graph)) for name, graph in _graphs(traced)]
    last = pieces[-1]
    return [*pieces[:-1], Piece(last.name, _Structured(last.module, spec))]


def _require_whole(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if hasattr(parameter, "device_mesh"):
            raise UnsupportedModelError(
                f"'{name}' is a DTensor, of which each rank has a part, as layers.split_sequence_ and "
                "parallelize_module make them. A stage's rank keeps its weights whole in a flat buffer, and "
                "replicas of it have other batches, so gradients would be summed twice. Split the sequence "
                "or make a pipeline of the model, not both."
            )


def _require_no_backward_hooks(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if any(vars(module)[hooks] for hooks in _BACKWARD_HOOKS):
            raise UnsupportedModelError(
                f"{name or 'the model'} has a backward hook, which torch.export leaves out. Remove it, let "
                "a tensor have it (register_hook), or make the model an nn.Sequential."
            )


def fingerprint(pieces: Sequence[Piece]) -> str:
    """What must be equal where a plan is made and where it is used: names and shapes, not values."""
    rows = [
        f"{piece.name}/{name}:{tuple(tensor.shape)}:{tensor.dtype}"
        for piece in pieces
        for name, tensor in [*piece.module.named_parameters(), *piece.module.named_buffers()]
    ]
    return hashlib.sha256("\n".join(rows).encode()).hexdigest()[:16]


def without_piece(model: nn.Module, pieces: Sequence[Piece]) -> list[Tensor]:
    """Parameters and buffers of a model that no piece has, such as of a module that is not called."""
    held = {id(each) for piece in pieces for each in (*piece.module.parameters(), *piece.module.buffers())}
    return [each for each in (*model.parameters(), *model.buffers()) if id(each) not in held]


class _Tupled(nn.Module):
    """Children of an ``nn.Sequential`` in a row; what they return comes as a tuple.

    As in an ``nn.Sequential``, one that is not the first gets such a tuple as its one argument. Only if it
    needs more than one argument, it gets each tensor as one.
    """

    def __init__(self, children: Sequence[nn.Module], *, is_first: bool, is_last: bool) -> None:
        super().__init__()
        self.inner = children[0] if len(children) == 1 else nn.Sequential(*children)
        self._spreads, self._is_last = is_first or not _takes_one(self.inner), is_last

    def forward(self, *inputs: Tensor) -> tuple[Any, ...]:
        output = self.inner(*inputs) if self._spreads or len(inputs) == 1 else self.inner(inputs)
        if self._is_last or isinstance(output, Tensor):
            return (output,)
        if type(output) is tuple and len(output) > 1 and all(isinstance(each, Tensor) for each in output):
            return output
        size = f" of {len(output)}" if isinstance(output, tuple) else ""
        raise UnsupportedModelError(
            f"{type(self.inner).__name__} in an nn.Sequential returns a {type(output).__name__}{size}, and "
            "only a tensor, or a plain tuple of several, can cross to the next stage. Let it return such."
        )


def _takes_one(module: nn.Module) -> bool:
    try:
        signature = inspect.signature(module.forward)
    except (TypeError, ValueError):  # it is not Python's
        return True
    try:
        signature.bind(None)
    except TypeError:
        return False
    return True


class _Structured(nn.Module):
    """A model's last piece, whose outputs come in the structure that the model gives them."""

    def __init__(self, inner: nn.Module, spec: Any) -> None:
        super().__init__()
        self.inner, self._spec = inner, spec

    def forward(self, *inputs: Tensor) -> tuple[Any, ...]:
        return (pytree.tree_unflatten(self.inner(*inputs), self._spec),)


def _grouped(model: nn.Sequential) -> Iterator[tuple[str, list[nn.Module]]]:
    """Children that begin by writing into what they are given stay with the one before."""
    name, group = "", list[nn.Module]()
    for child_name, child in _children(model):
        # The module without children that comes first is the one that runs first.
        first = next(module for module in child.modules() if not [*module.children()])
        if group and not getattr(first, "inplace", False):
            yield name, group
            group = []
        name = name if group else child_name
        group.append(child)
    if group:
        yield name, group


def _children(model: nn.Sequential, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    for name, child in vars(model)["_modules"].items():  # named_children() leaves out what comes again
        if _is_plain(child):
            yield from _children(child, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", child


def _is_plain(module: nn.Module) -> TypeGuard[nn.Sequential]:
    """Whether it does nothing but call its children in turn."""
    own = vars(module)
    return (
        isinstance(module, nn.Sequential)
        and type(module).forward is nn.Sequential.forward
        and "forward" not in own
        and not any(own[name] for name in _HOOKS)
    )


def _graphs(traced: GraphModule) -> Iterator[tuple[str, Graph]]:
    """Each piece's name and graph."""
    nodes = [node for node in traced.graph.nodes if node.op == "call_function"]
    inputs = [node for node in traced.graph.nodes if node.op == "placeholder"]
    varying = _varying(inputs, nodes)
    body = [node for node in nodes if node in varying]
    outputs = next(node for node in traced.graph.nodes if node.op == "output").args[0]
    assert isinstance(outputs, tuple | list)
    ends = _ends(body, inputs, list(outputs))
    crossing: list[Node] = inputs
    for first, end in pairwise([0, *ends, len(body)]):
        following = list(outputs) if end == len(body) else _alive(end, body, inputs)
        piece = body[first:end]
        yield _name(piece), _graph(piece, crossing, following)
        crossing = following


def _varying(inputs: list[Node], nodes: list[Node]) -> set[Node]:
    """What depends on the inputs, changes something in place or is changed, or draws random numbers.

    All other nodes are constants, computed again in each piece that needs them.
    """
    varying = set(inputs)
    for node in nodes:
        varying.update(each for each in _written(node) if each.op == "call_function")
    for node in nodes:
        if _is_impure(node) or not varying.isdisjoint(node.all_input_nodes):
            varying.add(node)
    return varying


def _is_impure(node: Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    tags = getattr(node.target, "tags", ())
    return (schema is not None and schema.is_mutable) or torch.Tag.nondeterministic_seeded in tags


def _written(node: Node) -> Iterator[Node]:
    """What it writes into: its first argument, and what that is a view of."""
    schema = getattr(node.target, "_schema", None)
    if schema is None or not schema.is_mutable:
        return
    base = node.args[0] if node.args else None
    while isinstance(base, Node):
        yield base
        made = getattr(base.target, "_schema", None)
        is_view = made is not None and any(each.alias_info is not None for each in made.returns)
        is_part = base.target is operator.getitem  # of a list of views, as of split
        base = base.args[0] if (is_view or is_part) and base.args else None


def _alive(position: int, body: list[Node], inputs: list[Node]) -> list[Node]:
    """What is made before a position in ``body`` and needed from there on, in order."""
    place = {node: number for number, node in enumerate(body)}
    made = [*inputs, *body[:position]]
    return [node for node in made if any(place.get(user, len(body)) >= position for user in _users(node))]


def _users(node: Node) -> Iterator[Node]:
    for user in node.users:
        if user.op != "call_module":  # the guards that torch.export puts in
            yield user


def _ends(body: list[Node], inputs: list[Node], outputs: list[Node]) -> list[int]:
    """Positions at which to cut, each piece between two of them having parameters of its own."""
    best: list[int] = []
    # As few crossing tensors as leave no piece too large.
    for most in range(1, _MOST_CROSSING + 1):
        found = [
            position
            for position in range(1, len(body))
            if _path(body[position - 1]) != _path(body[position])
            and _can_cut(position, body, _alive(position, body, inputs), most)
        ]
        kept = _with_parameters(found, body)
        if _largest(kept, body) < _largest(best, body):
            best = kept
        if _largest(best, body) <= _LARGEST * len(body):
            break
    if not best:
        raise UnsupportedModelError(
            f"nowhere between the model's modules do at most {_MOST_CROSSING} tensors cross, so it cannot "
            "become a pipeline. Make it an nn.Sequential of the parts that it should be cut into."
        )
    return best


def _largest(positions: list[int], body: list[Node]) -> int:
    return max(end - first for first, end in pairwise([0, *positions, len(body)]))


def _can_cut(position: int, body: list[Node], alive: list[Node], most: int) -> bool:
    if not alive or len(alive) > most:
        return False
    if not all(isinstance(node.meta.get("val"), Tensor) for node in alive):
        return False
    changed = {node.args[0] for node in body[position:] if _is_impure(node) and node.args}
    changed.update(each for node in body[position:] for each in _written(node))
    return changed.isdisjoint(alive)  # no operator must write into what was received


def _with_parameters(positions: list[int], body: list[Node]) -> list[int]:
    """Leave out cuts after which no parameters would come before the next cut, or none at all."""
    kept: list[int] = []
    last = len(body)
    for position in reversed(positions):
        if _reads_parameters(body[position:last]) and _reads_parameters(body[:position]):
            kept.append(position)
            last = position
    return kept[::-1]


def _reads_parameters(nodes: list[Node]) -> bool:
    return any(source.op == "get_attr" for node in nodes for source in node.all_input_nodes)


def _path(node: Node) -> str:
    stack = node.meta.get("nn_module_stack") or {}
    return str([*stack.values()][-1][0]) if stack else ""


def _name(piece: list[Node]) -> str:
    """The module that a piece is, or the first and last of those it is made of."""
    paths = [_path(node) for node in piece if _path(node)] or ["model"]
    return paths[0] if paths[0] == paths[-1] else f"{paths[0]}..{paths[-1]}"


def _graph(piece: list[Node], inputs: list[Node], outputs: Sequence[Any]) -> Graph:
    """A graph of these nodes alone, with the constants they need."""
    graph = Graph()
    copies: dict[Node, Node] = {node: graph.placeholder(node.name) for node in inputs}

    def copied(node: Node) -> Node:
        if node not in copies:  # a parameter, a buffer or a constant: all that varies comes in order
            for source in node.all_input_nodes:
                copied(source)
            copies[node] = graph.node_copy(node, lambda source: copies[source])
        return copies[node]

    for node in piece:
        copied(node)
    graph.output(tuple(copied(node) if isinstance(node, Node) else node for node in outputs))
    return graph

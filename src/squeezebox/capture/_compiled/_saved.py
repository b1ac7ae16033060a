"""Which values forward saves so that a compiled step's peak stays under a limit, in the least time.

What is not saved is computed again where backward first needs it. Operators that Inductor fuses write
nothing. So computing them again costs next to nothing, and what they read lives longer (He and Yu,
Transcending runtime-memory tradeoffs in checkpointing by being fusion aware, MLSys 2023).
"""

from __future__ import annotations

import bisect
import itertools
import operator
from collections import defaultdict
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import fx
from torch.utils.flop_counter import flop_registry

from squeezebox.capture._compiled._codes import module_path, operator_name
from squeezebox.capture._compiled._liveness import (
    FUSED,
    INPUT,
    KERNEL,
    SUM,
    VIEW,
    Nodes,
    evaluate,
    no_errors,
    order_of,
    uses,
)
from squeezebox.memory import Operator

_SMALL_BYTES = 1 << 14  # of values that no choice is about
_HIGHEST = 0.97  # of the peak: what is above that is looked at where the limit is out of reach
_WINDOWS = (10, 20, 60)  # nodes before a value whose saved ones it may take the place of
_FLOPS, _BYTES = 5e10, 5e9  # a second, of a core: they say which of two choices is faster
_FUSED_BYTES = 3e10  # of values that are computed again within another operator
_HEAVY = frozenset({"exp", "tanh", "erf", "erfc", "sigmoid", "log", "sin", "cos", "pow", "log1p"})
_MADE = frozenset(
    {
        "full",
        "full_like",
        "iota",
        "arange",
        "scalar_tensor",
        "where",
        "expand",
        "clone",
        "embedding",
        "gather",
        "_low_memory_max_pool_offsets_to_indices",
        "max_pool2d_with_indices_backward",
    }
)


@dataclass(frozen=True, slots=True)
class Choice:
    """What is saved, and what that costs by the model of fusion here."""

    saved: frozenset[fx.Node]
    peak_bytes: int
    seconds: float  # of what is computed again
    excess: float  # squares of bytes over the limit, summed over operators
    owner: str  # the operator at whose time the peak is


class Joint:
    """A joint graph of forward and backward.

    Args:
        graph: as torch's partitioner gets it.
        forward: its nodes that forward has to run.
        results: how many of its outputs are forward's.
        spent: gradients that are used up as soon as they are there, and the bytes that this takes besides.
    """

    def __init__(
        self,
        graph: fx.Graph,
        forward: Iterable[fx.Node],
        results: int,
        spent: Mapping[fx.Node, int] = MappingProxyType({}),
    ) -> None:
        self._nodes = nodes = list(graph.nodes)
        self._place = {node: number for number, node in enumerate(nodes)}
        roots: dict[int, fx.Node] = {}
        self._root = {
            node: roots.setdefault(_storage(node, number), node) for number, node in enumerate(nodes)
        }
        self._bytes = {node: _nbytes(node) for node in nodes}
        kinds = {node: self._kind(node) for node in nodes}
        wanted = {node for node in forward if node.op == "call_function"}
        self._free = [node for node in nodes if node in wanted and _is_large(node)]
        self._own = [node for node in self._free if kinds[node] != VIEW]
        self._graph = self._arrays(kinds, wanted, results, spent)
        self._errors = no_errors(len(nodes))

    def _arrays(
        self,
        kinds: Mapping[fx.Node, int],
        wanted: Container[fx.Node],
        results: int,
        spent: Mapping[fx.Node, int],
    ) -> Nodes:
        nodes, outputs = self._nodes, self._nodes[-1].args[0]
        given: Any = list(outputs)
        ahead = [node for node in nodes if node in wanted]
        gradients = [node for node in given[results:] if isinstance(node, fx.Node)]
        behind = [node for node in nodes if node.op == "call_function" and node not in wanted]
        reads = [node.all_input_nodes for node in nodes]
        made, given_back = set(given[:results]), {*gradients} - spent.keys()
        return Nodes(
            starts=np.cumsum([0, *map(len, reads)]),
            sources=np.array([self._place[each] for own in reads for each in own], np.int64),
            root=np.array([self._place[self._root[node]] for node in nodes]),
            nbytes=np.array([self._bytes[node] for node in nodes]),
            kind=np.array([kinds[node] for node in nodes], np.int8),
            heavy=np.array([operator_name(node) in _HEAVY for node in nodes]),
            item=np.array([node.target is operator.getitem for node in nodes]),
            drawn=np.array([_is_drawn(node) for node in nodes]),
            seconds=np.array([self._seconds(node, kinds[node]) if node in wanted else 0.0 for node in nodes]),
            result=np.array([node in made for node in nodes]),
            gradient=np.array([node in given_back for node in nodes]),
            spent=np.array([node in spent for node in nodes]),
            spending=np.array([spent.get(node, 0) for node in nodes]),
            forward=np.array([self._place[node] for node in ahead]),
            backward=np.array([self._place[node] for node in (*behind, *gradients)]),
        )

    def search(self, starts: Iterable[frozenset[fx.Node]], limit_bytes: int) -> Choice:
        """The quickest choice under the limit that is found from one of some, or the lowest."""
        found = [self.within(each, limit_bytes) for each in starts]
        return min(found, key=lambda each: (max(each.peak_bytes, limit_bytes), each.seconds))

    def within(self, saved: Iterable[fx.Node], limit_bytes: int) -> Choice:
        """From a cut, step by step, the choice whose peak is under the limit, or the lowest that was found.

        Where the limit is out of reach, the next steps are about the highest uses alone. At last, what fits
        is saved again.
        """
        first = self.choice(frozenset(saved), limit_bytes)
        best = self._lowered(first, limit_bytes)
        while best.peak_bytes > limit_bytes:
            lower = self._lowered(best, max(limit_bytes, int(_HIGHEST * best.peak_bytes)))
            if lower.peak_bytes >= best.peak_bytes:
                break
            best = lower
        best = self.choice(best.saved, max(limit_bytes, best.peak_bytes))
        for node in sorted(first.saved - best.saved, key=self._bytes.__getitem__, reverse=True):
            more = self.choice(best.saved | {node}, max(limit_bytes, best.peak_bytes))
            if more.excess == 0.0 and more.seconds < best.seconds:
                best = more
        return best

    def choice(self, saved: frozenset[fx.Node], limit_bytes: int) -> Choice:
        """What saving these would cost."""
        peak, at, seconds, excess = evaluate(self._graph, self._flags(saved), self._errors, limit_bytes)
        node = self._nodes[at]
        return Choice(
            saved=saved,
            peak_bytes=int(peak),
            seconds=seconds,
            excess=excess,
            owner=f"{module_path(node) or 'the model'}'s {operator_name(node)}",
        )

    def learn(self, saved: frozenset[fx.Node], ran: Iterable[Operator]) -> None:
        """By how many bytes the model is too low at each kernel of a step that saved these and ran so."""
        flags = self._flags(saved)
        order = order_of(self._graph, flags)
        queues: dict[Any, list[int]] = defaultdict(list)
        for each in ran:
            queues[each.name, _matrices(each.shapes)].append(each.live_bytes)
        for errors, places, used in zip(
            self._errors, (self._graph.forward, order), uses(self._graph, flags, order), strict=True
        ):
            for place, nbytes in zip(places, used, strict=True):
                is_kernel = self._graph.kind[place] == KERNEL
                queue = queues[_signature(self._nodes[place])] if is_kernel else []
                if queue:
                    errors[place] = queue.pop(0) - nbytes

    def _flags(self, saved: Iterable[fx.Node]) -> Any:
        flags = np.zeros(len(self._nodes), np.int8)
        flags[[self._place[node] for node in saved]] = 1
        return flags

    def _lowered(self, best: Choice, limit_bytes: int) -> Choice:
        """Steps that each take off the most excess for their seconds, and of these the lowest peak."""
        best = lowest = self.choice(best.saved, limit_bytes)
        gains = dict[Any, float]()
        while best.excess > 0.0:
            found = self._step(best, limit_bytes, gains)
            if found is None:
                break
            best, lowest = found, min(lowest, found, key=lambda each: each.peak_bytes)
        return lowest

    def _step(self, best: Choice, limit_bytes: int, gains: dict[Any, float]) -> Choice | None:
        """The move that is worth most; those that were worth little last time are tried last."""
        moves = sorted(self._moves(best.saved), key=lambda move: -gains.get(move[0], float("inf")))
        found, worth = None, 0.0
        for number, (name, saved) in enumerate(moves):
            if number >= 12 and worth >= gains.get(name, float("inf")):
                break
            choice = self.choice(saved, limit_bytes)
            gain = best.excess - choice.excess
            gains[name] = gain / (max(choice.seconds - best.seconds, 0.0) + 1e-5) if gain > 0.0 else 0.0
            if gains[name] > worth:
                found, worth = choice, gains[name]
        return found

    def _moves(self, saved: frozenset[fx.Node]) -> Iterable[tuple[Any, frozenset[fx.Node]]]:
        """Without one storage, or with a value in place of those saved shortly before it."""
        free = [node for node in self._free if node in saved]
        places = [self._place[node] for node in free]
        storages: dict[fx.Node, set[fx.Node]] = defaultdict(set)
        for node in free:
            storages[self._root[node]].add(node)
        for root, nodes in storages.items():
            yield root, saved - nodes
        for node, window in itertools.product(self._own, _WINDOWS):
            if node in saved:
                continue
            place = self._place[node]
            before = free[bisect.bisect_left(places, place - window) : bisect.bisect_left(places, place)]
            if self._bytes[node] < sum(self._bytes[each] for each in before):
                yield (node, window), saved.difference(before) | {node}

    def _kind(self, node: fx.Node) -> int:
        if node.op != "call_function":
            return INPUT
        if self._root[node] is not node:
            return VIEW
        name = operator_name(node)
        tags = getattr(node.target, "tags", ())
        if torch.Tag.pointwise in tags or str(getattr(node.target, "_opname", name)) in _MADE:
            return FUSED
        return SUM if torch.Tag.reduction in tags else KERNEL

    def _seconds(self, node: fx.Node, kind: int) -> float:
        if kind == VIEW:
            return 0.0
        flops = _flops(node) if kind == KERNEL else 0.0
        return flops / _FLOPS + self._bytes[node] / (_FUSED_BYTES if kind == FUSED else _BYTES)


def _signature(node: fx.Node) -> Any:
    """Its name and operands as the profiler sees them."""
    schema = getattr(node.target, "_schema", None)
    values = (each.meta.get("val") for each in node.args if isinstance(each, fx.Node))
    shapes = (tuple(each.shape) for each in values if isinstance(each, torch.Tensor))
    return getattr(schema, "name", ""), _matrices(shapes)


def _matrices(shapes: Iterable[tuple[int, ...]]) -> tuple[tuple[int, ...], ...]:
    """The first two that are no vectors."""
    return tuple(each for each in shapes if len(each) > 1)[:2]


def _is_large(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), torch.Tensor) and _nbytes(node) >= _SMALL_BYTES


def _storage(node: fx.Node, number: int) -> int:
    value = node.meta.get("val")
    if isinstance(value, torch.Tensor):
        return int(value.untyped_storage()._cdata)
    return -1 - number


def _nbytes(node: fx.Node) -> int:
    """Of a node's storage; an operator's several results have nodes of their own."""
    value = node.meta.get("val")
    return int(value.untyped_storage().nbytes()) if isinstance(value, torch.Tensor) else 0


def _is_drawn(node: fx.Node) -> bool:
    """Whether it draws from a generator, and would draw another value when it is computed again."""
    seeded = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
    return seeded and not str(node.target).startswith("prims.inductor_random")


def _flops(node: fx.Node) -> float:
    """By torch's own count, where it has one."""
    packet = getattr(node.target, "overloadpacket", None)
    if packet is torch.ops.aten._scaled_dot_product_flash_attention_for_cpu:
        packet = torch.ops.aten._scaled_dot_product_flash_attention
    count = flop_registry.get(packet)
    if count is None:
        return 0.0
    arguments, options = fx.map_arg((node.args, node.kwargs), lambda each: each.meta.get("val"))
    return float(count(*arguments, **options, out_val=node.meta.get("val")))

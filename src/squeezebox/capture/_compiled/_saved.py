"""Which values forward saves, and which in fewer bits, so that a compiled step's peak is under a limit.

Of all such choices, one of little time. What is not saved is computed again where backward first needs it.
Operators that Inductor fuses write nothing. So computing them again costs next to nothing, and what they read
lives longer (He and Yu, Transcending runtime-memory tradeoffs in checkpointing by being fusion aware, MLSys
2023).
"""

from __future__ import annotations

import bisect
import itertools
import operator
from collections import defaultdict
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import torch
from torch import fx
from torch.utils.flop_counter import flop_registry

from squeezebox.capture._compiled._codes import module_path, operator_name
from squeezebox.capture._compiled._liveness import (
    FUSED,
    INPUT,
    KEPT,
    KERNEL,
    PACKED,
    SUM,
    VIEW,
    Nodes,
    evaluate,
    no_errors,
    order_of,
    uses,
)
from squeezebox.memory import Operator, Ran

_SMALL_BYTES = 1 << 14  # of values that no choice is about
_HIGHEST = 0.97  # of the peak: what is above that is looked at where the limit is out of reach
_WINDOWS = (10, 20, 60)  # nodes before a value whose saved ones it may take the place of
_FLOPS, _BYTES = 5e10, 5e9  # a second, of a core: they say which of two choices is faster
_FUSED_BYTES, _HEAVY_BYTES = 2e11, 3e10  # of values that are computed again within another operator
_PACKED_BYTES = 2e9  # of values that are packed and unpacked
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
class Packed:
    """A node whose value is saved in fewer bits."""

    node: fx.Node


@dataclass(frozen=True, slots=True)
class Choice:
    """What is saved, and what that costs by the model of fusion here."""

    saved: frozenset[fx.Node | Packed]
    peak_bytes: int
    seconds: float  # of what is computed again
    excess: float  # squares of bytes over the limit, summed over operators
    owner: str  # the operator at whose time the peak is


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """A joint graph of forward and backward.

    Attributes:
        graph: as torch's partitioner gets it.
        forward: its nodes that forward has to run.
        results: how many of its outputs are forward's.
        spent: gradients that are used up as soon as they are there, and the bytes that this takes besides.
        codes: values that may be saved in fewer bits: bytes of that, and those that packing takes besides.
    """

    graph: fx.Graph
    forward: Sequence[fx.Node]
    results: int
    spent: Mapping[fx.Node, int] = field(default_factory=dict)
    codes: Mapping[fx.Node, tuple[int, int]] = field(default_factory=dict)

    def with_draws(self, cut: Iterable[fx.Node]) -> list[fx.Node]:
        """A cut of torch's, and what backward would draw again, such as the seeds of a dropout's mask."""
        saved, ahead = dict.fromkeys(cut), {*self.forward}
        left = [node for node in self.graph.nodes if node not in ahead and node not in saved]
        while left:
            reader = left.pop()
            for node in reader.all_input_nodes:
                if node.op != "call_function" or node not in ahead or node in saved:
                    continue
                if _is_drawn(node):
                    saved[reader if reader.target is operator.getitem else node] = None
                else:
                    ahead.remove(node)
                    left.append(node)
        return list(saved)

    def names(self, saved: Iterable[fx.Node | Packed]) -> dict[str, bool]:
        """Of those saved here, and whether in fewer bits."""
        found = ((_node_of(each), isinstance(each, Packed)) for each in saved)
        return {node.name: packed for node, packed in found if node.graph is self.graph}

    def saved(self, names: Mapping[str, bool]) -> frozenset[fx.Node | Packed]:
        """The inverse: what has these names, packed where it can be."""
        return frozenset(
            Packed(node) if names[node.name] and node in self.codes else node
            for node in self.graph.nodes
            if node.name in names
        )


class Joint:
    """The joint graphs of a step: all forwards run in order, and then backwards.

    Args:
        parts: in the order in which they run. One may run several times, and saves the same each time.
    """

    def __init__(self, parts: Sequence[Part]) -> None:
        self._nodes = [node for part in parts for node in part.graph.nodes]
        self._places: dict[fx.Node, list[int]] = defaultdict(list)
        for place, node in enumerate(self._nodes):
            self._places[node].append(place)
        self._place = {node: places[0] for node, places in self._places.items()}
        roots: dict[tuple[fx.Graph, int], fx.Node] = {}
        self._root = {
            node: roots.setdefault((node.graph, _storage(node, place)), node)
            for node, place in self._place.items()
        }
        self._bytes = {node: _nbytes(node) for node in self._place}
        self._codes = {node: codes for part in parts for node, codes in part.codes.items()}
        kinds = {node: self._kind(node) for node in self._place}
        wanted = {node for part in parts for node in part.forward if node.op == "call_function"}
        self._free = [node for node in self._place if node in wanted and _is_large(node)]
        self._own = [node for node in self._free if kinds[node] != VIEW]
        self._graph = self._arrays(parts, kinds, wanted)
        self._errors = no_errors(len(self._nodes))

    def _arrays(
        self, parts: Sequence[Part], kinds: Mapping[fx.Node, int], wanted: Container[fx.Node]
    ) -> Nodes:
        nodes, spent = self._nodes, {node: nbytes for part in parts for node, nbytes in part.spent.items()}
        made, given_back = set[fx.Node](), set[fx.Node]()
        ahead, behind, roots, reads = list[int](), list[int](), list[int](), list[list[int]]()
        for part in parts:
            own, outputs = list(part.graph.nodes), cast(Any, part.graph.output_node().args[0])
            shift = len(roots) - self._place[own[0]]
            gradients = [node for node in outputs[part.results :] if isinstance(node, fx.Node)]
            later = [node for node in own if node.op == "call_function" and node not in wanted]
            made.update(outputs[: part.results])
            given_back.update(gradients)
            ahead += [self._place[node] + shift for node in own if node in wanted]
            behind[:0] = [self._place[node] + shift for node in (*later, *gradients)]
            roots += [self._place[self._root[node]] + shift for node in own]
            reads += [[self._place[each] + shift for each in node.all_input_nodes] for node in own]
        return Nodes(
            starts=np.cumsum([0, *map(len, reads)]),
            sources=np.array([place for places in reads for place in places], np.int64),
            root=np.array(roots),
            nbytes=np.array([self._bytes[node] for node in nodes]),
            packed=np.array([self._codes.get(node, (0, 0))[0] for node in nodes]),
            packing=np.array([self._codes.get(node, (0, 0))[1] for node in nodes]),
            kind=np.array([kinds[node] for node in nodes], np.int8),
            heavy=np.array([operator_name(node) in _HEAVY for node in nodes]),
            item=np.array([node.target is operator.getitem for node in nodes]),
            drawn=np.array([_is_drawn(node) for node in nodes]),
            seconds=np.array([self._seconds(node, kinds[node]) if node in wanted else 0.0 for node in nodes]),
            writing=np.array([self._bytes[node] / _BYTES if kinds[node] == FUSED else 0.0 for node in nodes]),
            unpacking=np.array([self._bytes[node] / _PACKED_BYTES for node in nodes]),
            result=np.array([node in made for node in nodes]),
            gradient=np.array([node in given_back and node not in spent for node in nodes]),
            spent=np.array([node in spent for node in nodes]),
            spending=np.array([spent.get(node, 0) for node in nodes]),
            forward=np.array(ahead),
            backward=np.array(behind),
        )

    def search(self, starts: Iterable[frozenset[fx.Node | Packed]], limit_bytes: int) -> Choice:
        """The quickest choice under the limit that is found from one of some, or the lowest."""
        found = [self.within(each, limit_bytes) for each in starts]
        return min(found, key=lambda each: (max(each.peak_bytes, limit_bytes), each.seconds))

    def within(self, saved: Iterable[fx.Node | Packed], limit_bytes: int) -> Choice:
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
        lost = {
            _node_of(each)
            for each in first.saved | best.saved
            if each not in best.saved or isinstance(each, Packed)
        }
        for node in sorted(lost, key=lambda each: (-self._bytes[each], self._place[each])):
            more = self.choice(best.saved - {Packed(node)} | {node}, max(limit_bytes, best.peak_bytes))
            if more.excess == 0.0 and more.seconds < best.seconds:
                best = more
        return best

    def choice(self, saved: frozenset[fx.Node | Packed], limit_bytes: int) -> Choice:
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

    def learn(self, saved: frozenset[fx.Node | Packed], ran: Ran) -> None:
        """By how many bytes the model is too low at the kernels of a step that saved these and ran so.

        And by how many between two of them, at all of what Inductor runs there.
        """
        flags = self._flags(saved)
        order = order_of(self._graph, flags)
        queues: dict[Any, list[Operator]] = defaultdict(list)
        for each in ran.operators:
            queues[each.name, _matrices(each.shapes)].append(each)
        both = (self._graph.forward, order), uses(self._graph, flags, order)[:2], (False, True)
        for errors, places, used, again in zip(self._errors, *both, strict=True):
            before: tuple[int, Operator] | None = None
            for number, place in enumerate(places):
                is_kernel = self._graph.kind[place] == KERNEL and not (again and flags[place] == PACKED)
                queue = queues[_signature(self._nodes[place])] if is_kernel else []
                if not queue:
                    continue
                kernel = queue.pop(0)
                errors[place] = ran.most(kernel.begun, kernel.ended) - used[number]
                if before is not None and before[0] + 1 < number and before[1].ended <= kernel.begun:
                    between = slice(before[0] + 1, number)
                    most = ran.most(ran.freed(before[1].ended), kernel.begun)
                    errors[places[between]] = most - used[between].max()
                before = number, kernel

    def _flags(self, saved: Iterable[fx.Node | Packed]) -> Any:
        places: dict[bool, list[int]] = {False: [], True: []}
        for each in saved:
            places[isinstance(each, Packed)] += self._places[_node_of(each)]
        flags = np.zeros(len(self._nodes), np.int8)
        flags[np.array(places[False], np.int64)] = KEPT
        flags[np.array(places[True], np.int64)] = PACKED
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

    def _moves(self, saved: frozenset[fx.Node | Packed]) -> Iterable[tuple[Any, frozenset[fx.Node | Packed]]]:
        """Without a storage or with it packed, or with a value in place of those saved shortly before it."""
        held = {_node_of(each): each for each in saved}
        free = [node for node in self._free if node in held]
        places = [self._place[node] for node in free]
        storages: dict[fx.Node, set[fx.Node | Packed]] = defaultdict(set)
        for node in free:
            storages[self._root[node]].add(held[node])
        for root, parts in storages.items():
            yield root, saved - parts
            if parts <= self._codes.keys():
                yield (root, PACKED), saved - parts | {Packed(_node_of(each)) for each in parts}
        for node, window in itertools.product(self._own, _WINDOWS):
            if node in held:
                continue
            place = self._place[node]
            first, last = bisect.bisect_left(places, place - window), bisect.bisect_left(places, place)
            before = [held[each] for each in free[first:last]]
            nbytes = sum(map(self._held_bytes, before))
            for each in (node, Packed(node)) if node in self._codes else (node,):
                if self._held_bytes(each) < nbytes:
                    yield (each, window), saved.difference(before) | {each}

    def _held_bytes(self, saved: fx.Node | Packed) -> int:
        return self._codes[saved.node][0] if isinstance(saved, Packed) else self._bytes[saved]

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
        """Of computing it again; what is fused with its readers is not written, and read where it is."""
        if kind == VIEW:
            return 0.0
        if kind == FUSED:
            return self._bytes[node] / (_HEAVY_BYTES if operator_name(node) in _HEAVY else _FUSED_BYTES)
        flops = _flops(node) if kind == KERNEL else 0.0
        return flops / _FLOPS + sum(self._bytes[each] for each in (node, *node.all_input_nodes)) / _BYTES


def _node_of(saved: fx.Node | Packed) -> fx.Node:
    return saved.node if isinstance(saved, Packed) else saved


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

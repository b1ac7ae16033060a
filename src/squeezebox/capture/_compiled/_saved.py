"""Which values forward saves so that a compiled step's peak stays under a limit, in the least time.

What is not saved is computed again where backward first needs it. Operators that Inductor fuses write
nothing. So computing them again costs next to nothing, and what they read lives longer (He and Yu,
Transcending runtime-memory tradeoffs in checkpointing by being fusion aware, MLSys 2023).
"""

from __future__ import annotations

import itertools
import math
import operator
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.utils.flop_counter import flop_registry

from squeezebox.capture._compiled._codes import module_path, operator_name
from squeezebox.memory import Operator

_SMALL_BYTES = 1 << 14  # of values that no choice is about
_HIGHEST = 0.97  # of the peak: what is above that is looked at where the limit is out of reach
_WINDOWS = (10, 20, 60)  # nodes before a value whose saved ones it may take the place of
_FLOPS, _BYTES = 5e10, 5e9  # a second, of a core: they say which of two choices is faster
_FUSED_BYTES = 3e10  # of values that are computed again within another operator
_READS = 4  # of an operator that Inductor writes to memory if several read it
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


Kernel = tuple[str, bool]  # a node's name, and whether backward runs it


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
    """

    def __init__(self, graph: fx.Graph, forward: Iterable[fx.Node], results: int) -> None:
        self._errors = dict[Kernel, int]()  # by how many bytes the model of fusion here was too low
        nodes = list(graph.nodes)
        outputs: Any = nodes[-1].args[0]
        self._place = {node: number for number, node in enumerate(nodes)}
        wanted = set(forward)
        self._forward = [node for node in nodes if node in wanted and node.op == "call_function"]
        self._backward = [node for node in nodes if node.op == "call_function" and node not in wanted]
        self._results = {node for node in outputs[:results] if isinstance(node, fx.Node)}
        self._gradients = [node for node in outputs[results:] if isinstance(node, fx.Node)]
        self._inputs = {node for node in nodes if node.op in ("placeholder", "get_attr")}
        roots: dict[int, fx.Node] = {}
        self._root = {
            node: roots.setdefault(_storage(node, number), node) for number, node in enumerate(nodes)
        }
        self._sources = {node: tuple(node.all_input_nodes) for node in nodes}
        self._bytes = {node: _nbytes(node) for node in nodes}
        self._kinds = {node: self._kind(node) for node in nodes}
        self._free = [node for node in self._forward if _is_large(node)]
        self._flops = {node: _flops(node) for node in self._forward if self._kinds[node] == "kernel"}

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
        order, again = self._order(saved)
        ahead, back = self._uses(saved, order)
        uses = self._corrected(ahead, self._forward, False) + self._corrected(back, order, True)
        nodes = [*self._forward, *order]
        peak, place = max((nbytes, -number) for number, nbytes in enumerate(uses))
        at = nodes[min(-place, len(nodes) - 1)]
        return Choice(
            saved=saved,
            peak_bytes=peak,
            seconds=sum(map(self._seconds, again)),
            excess=math.inf if any(map(_is_drawn, again)) else _excess(uses, limit_bytes),
            owner=f"{module_path(at) or 'the model'}'s {operator_name(at)}",
        )

    def learn(self, saved: frozenset[fx.Node], ran: Iterable[Operator]) -> None:
        """By how many bytes the model is too low at each kernel of a step that saved these and ran so."""
        order, _ = self._order(saved)
        queues: dict[Any, list[int]] = defaultdict(list)
        for each in ran:
            queues[each.name, _matrices(each.shapes)].append(each.live_bytes)
        for is_back, nodes, uses in zip(
            (False, True), (self._forward, order), self._uses(saved, order), strict=True
        ):
            for node, nbytes in zip(nodes, uses, strict=True):
                queue = queues[_signature(node)] if self._kinds[node] == "kernel" else []
                if queue:
                    self._errors[node.name, is_back] = queue.pop(0) - nbytes

    def _uses(self, saved: frozenset[fx.Node], order: Sequence[fx.Node]) -> tuple[list[int], list[int]]:
        kept = {self._root[node] for node in saved if node.op == "call_function"}
        ahead = self._use(self._forward, (), kept | {self._root[node] for node in self._results})
        return ahead, self._use(order, kept, {self._root[node] for node in self._gradients})

    def _corrected(self, uses: Sequence[int], nodes: Sequence[fx.Node], is_back: bool) -> list[int]:
        """With each kernel's error, and between two kernels with the larger one."""
        known = [self._errors.get((node.name, is_back)) for node in nodes]
        before, behind = _last_known(known), _last_known(known[::-1])[::-1]
        return [nbytes + max(errors) for nbytes, *errors in zip(uses, before, behind, strict=True)]

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
        free = [(node, self._place[node]) for node in self._free if node in saved]
        storages: dict[fx.Node, set[fx.Node]] = defaultdict(set)
        for node, _ in free:
            storages[self._root[node]].add(node)
        for root, nodes in storages.items():
            yield root, saved - nodes
        for node, window in itertools.product(self._free, _WINDOWS):
            if node in saved or self._kinds[node] == "view":
                continue
            place = self._place[node]
            before = {each for each, its in free if 0 < place - its <= window}
            if self._bytes[node] < sum(self._bytes[each] for each in before):
                yield (node, window), (saved - before) | {node}

    def _order(self, saved: frozenset[fx.Node]) -> tuple[list[fx.Node], list[fx.Node]]:
        """Backward with what it computes again, right before the first use; and the latter alone."""
        done, order = set(saved) | self._inputs, list[fx.Node]()
        for node in [*self._backward, *self._gradients]:
            missing, stack = set[fx.Node](), [node]
            while stack:
                each = stack.pop()
                if each not in done and each not in missing:
                    missing.add(each)
                    stack.extend(self._sources[each])
            order += sorted(missing, key=self._place.__getitem__)
            done |= missing
        forward = set(self._forward)
        return order, [node for node in order if node in forward]

    def _use(self, order: Sequence[fx.Node], there: Iterable[fx.Node], kept: set[fx.Node]) -> list[int]:
        """Bytes that live while each operator runs; a storage lives to the last that reads it."""
        written = self._written(order, kept)
        reads: dict[fx.Node, frozenset[fx.Node]] = {}
        last: dict[fx.Node, int] = {}
        born = dict.fromkeys(there, 0)
        for place, node in enumerate(order):
            sources = frozenset[fx.Node]().union(
                *(reads.get(each, frozenset([self._root[each]])) for each in self._sources[node])
            )
            if node not in written:
                reads[node] = sources
                continue
            last |= dict.fromkeys(sources, place)
            born.setdefault(self._root[node], place - _is_item(node))
        changes = [0] * (len(order) + 1)
        for root, place in born.items():
            end = len(order) if root in kept else max(last.get(root, place), place) + 1
            changes[place] += self._bytes[root]
            changes[end] -= self._bytes[root]
        return list(itertools.accumulate(changes[:-1]))

    def _written(self, order: Sequence[fx.Node], kept: set[fx.Node]) -> set[fx.Node]:
        """Nodes whose results Inductor writes to memory, unlike views and what it fuses into all readers."""
        readers: dict[fx.Node, list[fx.Node]] = defaultdict(list)
        for node in reversed(order):
            for each in self._sources[node]:
                readers[each] += readers[node] if self._kinds[node] == "view" else [node]
        written, counts = set[fx.Node](), dict[fx.Node, int]()
        for node in order:
            kind = self._kinds[node]
            if kind == "view":
                continue
            if kind == "fused":
                counts[node] = sum(counts.get(each, 1) for each in self._sources[node])
                several = len(readers[node]) > 1 and (counts[node] > _READS or operator_name(node) in _HEAVY)
                outside = any(self._kinds[each] == "kernel" for each in readers[node])
                if not (several or outside or self._root[node] in kept):
                    continue
                counts[node] = 1
            written.add(node)
        return written

    def _kind(self, node: fx.Node) -> str:
        """``view``, ``fused`` into what reads it, ``sum`` over what it reads, or a ``kernel`` of its own."""
        if node.op != "call_function":
            return "input"
        if self._root[node] is not node:
            return "view"
        name = operator_name(node)
        tags = getattr(node.target, "tags", ())
        if torch.Tag.pointwise in tags or str(getattr(node.target, "_opname", name)) in _MADE:
            return "fused"
        return "sum" if torch.Tag.reduction in tags else "kernel"

    def _seconds(self, node: fx.Node) -> float:
        kind = self._kinds[node]
        if kind == "view":
            return 0.0
        return self._flops.get(node, 0.0) / _FLOPS + self._bytes[node] / (
            _FUSED_BYTES if kind == "fused" else _BYTES
        )


def _last_known(values: Iterable[int | None]) -> list[int]:
    """Of each place the last value up to it, 0 before the first."""
    last, found = 0, list[int]()
    for each in values:
        last = last if each is None else each
        found.append(last)
    return found


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


def _excess(uses: Iterable[int], limit_bytes: int) -> float:
    return sum(float(nbytes - limit_bytes) ** 2 for nbytes in uses if nbytes > limit_bytes)


def _storage(node: fx.Node, number: int) -> int:
    value = node.meta.get("val")
    if isinstance(value, torch.Tensor):
        return int(value.untyped_storage()._cdata)
    return -1 - number


def _nbytes(node: fx.Node) -> int:
    """Of a node's storage; an operator's several results have nodes of their own."""
    value = node.meta.get("val")
    return int(value.untyped_storage().nbytes()) if isinstance(value, torch.Tensor) else 0


def _is_item(node: fx.Node) -> bool:
    """Whether it is one of several results, and was written when the node before was."""
    return node.target is operator.getitem


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

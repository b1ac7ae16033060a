"""One pass over the image: which rows of every node a strip needs, and how they are made."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.node import map_arg
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import checkpoint

from squeezebox.streaming._graph import Streamed
from squeezebox.streaming._rows import Operator, Part, is_continuous

Sink = Callable[[Node, Tensor], None]
After = Callable[[list[Any]], None]


class Read(Protocol):
    """Reads rows of a node from a first one up to a last one, and of these some columns, or all."""

    def __call__(self, node: Node, start: int, stop: int, columns: Part | None = None, /) -> Tensor:
        """A tensor that nothing else holds, or the caller's own."""


class Hands(NamedTuple):
    """Where a strip's rows come from and go: every end's own to ``sink``, all that is made to ``after``."""

    read: Read
    sink: Sink
    after: After | None = None


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Pass:
    """The nodes that a pass makes, in order, up to what it reduces, stores or gives.

    ``ends`` are these: every reduction with its input, and the others with themselves; ``ended`` is the same
    the other way round. ``operators`` are of those nodes that are not read, from the image, a target or the
    store. ``last`` are the nodes that are done with once a node has been made, ``known`` those that an
    earlier pass has made and stored.
    """

    streamed: Streamed
    ends: Mapping[Node, Node]
    ended: Mapping[Node, tuple[Node, ...]]
    operators: dict[Node, Operator]
    order: tuple[Node, ...]
    last: Mapping[Node, tuple[Node, ...]]
    known: frozenset[Node]

    @property
    def reduced(self) -> list[Node]:
        """The reductions among the ends."""
        return [node for node in self.ends if node in self.streamed.reductions]

    @property
    def given(self) -> frozenset[Node]:
        """The nodes that are read from the store."""
        made = self.streamed.operators
        return frozenset(each for each in self.order if each in made and each not in self.operators)

    def parts(self, start: int, stop: int, whole: int) -> dict[Node, Part]:
        """Which rows of every end a strip owns: the image's ``start`` to ``stop`` of ``whole``.

        Strips that follow one another own every row once, whatever the resolution.
        """
        owned = {}
        for node, source in self.ends.items():
            count = self.streamed.rows[source].count
            owned[node] = (start * count // whole, stop * count // whole)
        return {node: part for node, part in owned.items() if part[0] < part[1]}

    def demands(self, owned: Mapping[Node, Part]) -> dict[Node, list[Part]]:
        """The rows of every node from which a strip's own rows are made, within the image, in order."""
        wanted: dict[Node, list[Part]] = {}
        for node, part in owned.items():
            _widen(wanted, self.ends[node], *part)
        for node, operator in reversed(self.operators.items()):
            for part in wanted.get(node, ()):
                for need in operator.needs(*part):
                    _widen(wanted, *need)
        return wanted

    def sizes(self, owned: Mapping[Node, Part]) -> list[int]:
        """The rows that a strip has of every node; strips of equal ones take the same memory."""
        parts = chain.from_iterable(self.demands(owned).values())
        return [stop - start for start, stop in parts]

    def run(self, owned: Mapping[Node, Part], singles: Mapping[Node, Any], hands: Hands) -> None:
        """Make a strip."""
        strip = _Strip(self, self.demands(owned), hands.read, singles, hands.after)
        for node in self.order:
            if node in strip.demanded:
                strip.make(node)
            for end in self.ended.get(node, ()):
                if end in owned:
                    hands.sink(end, strip.rows(node, *owned[end]))
            strip.forget(self.last[node])

    def one_by_one(
        self, owned: Mapping[Node, Part], read: Read, singles: Mapping[Node, Any]
    ) -> Iterator[tuple[Node, Callable[[], list[Any]]]]:
        """Every node that a strip has, with what makes its rows, cut off from the nodes before it."""
        strip = _Strip(self, self.demands(owned), read, singles)
        for node in self.order:
            if node in strip.demanded:
                strip.cut_off(node)
                yield node, partial(strip.make, node)
            strip.forget(self.last[node])

    def run_again(self, owned: Mapping[Node, Part], singles: Mapping[Node, Any], hands: Hands) -> None:
        """As :meth:`run`, keeping only what crosses from one group of operators to the next.

        There are about as many groups as operators in each; backward makes a group's inner values again.
        """
        strip = _Strip(self, self.demands(owned), hands.read, singles, hands.after)
        order = [node for node in self.order if node in strip.demanded]
        length = max(round(len(order) ** 0.5), 1)
        for first in range(0, len(order), length):
            group = order[first : first + length]
            self._run_group(group, strip, set(order[first + length :]), owned)
            for end in owned:
                if self.ends[end] in group:
                    hands.sink(end, strip.rows(self.ends[end], *owned[end]))
            for node in group:
                strip.forget(self.last[node])

    def _run_group(
        self, group: list[Node], strip: _Strip, later: set[Node], owned: Mapping[Node, Part]
    ) -> None:
        for node in group:
            if node in self.given:
                strip.make(node)
        group = [node for node in group if node not in self.given]
        if not later:  # backward begins with them
            for node in group:
                strip.make(node)
            return
        ends = {self.ends[end] for end in owned}
        out = [node for node in group if node in ends or not later.isdisjoint(node.users)]
        held = [node for node in strip.held if not set(group).isdisjoint(node.users)]
        flat = {node: strip.held[node] for node in held}

        def make(*values: Any) -> tuple[Any, ...]:
            inner = _Strip(self, strip.demanded, strip.read, strip.singles, strip.after)
            inner.held.update(zip(flat, values, strict=True))
            for node in group:
                inner.make(node)
            return tuple(inner.held[node] for node in out)

        made = checkpoint(make, *flat.values(), use_reentrant=False, preserve_rng_state=False)
        strip.held.update(zip(out, made, strict=True))


class _Strip:
    """The rows that are there while a strip is made."""

    def __init__(
        self,
        work: Pass,
        demanded: dict[Node, list[Part]],
        read: Read,
        singles: Mapping[Node, Any],
        after: After | None = None,
    ) -> None:
        self.work, self.demanded, self.read, self.singles = work, demanded, read, singles
        self.after = after
        self.held: dict[Node, list[Any]] = {}  # what is made of each part

    def rows(self, node: Node, start: int, stop: int) -> Any:
        parts = self.demanded[node]
        place = next(place for place, (_, last) in enumerate(parts) if stop <= last)
        value = self.held[node][place]
        if parts[place] == (start, stop):
            return value
        first, form = parts[place][0], self.work.streamed.rows[node]
        if isinstance(value, tuple | list):
            return tuple(form.take(each, start - first, stop - first) for each in value)
        return form.take(value, start - first, stop - first)

    def known(self, node: Node, start: int, stop: int) -> Tensor | None:
        if node not in self.work.known:
            return None
        with torch.no_grad():
            return self.read(node, start, stop)

    def value(self, argument: Any) -> Any:
        if isinstance(argument, Node):
            return self.singles[argument]
        return map_arg(argument, self.singles.__getitem__)

    def make(self, node: Node) -> list[Any]:
        operator = self.work.operators.get(node)
        self.held[node] = [
            self.read(node, *part) if operator is None else operator.run(self, *part)
            for part in self.demanded[node]
        ]
        if self.after is not None:
            self.after(self.held[node])
        return self.held[node]

    def cut_off(self, node: Node) -> None:
        """Have autograd begin at what the node reads."""
        for source in node.all_input_nodes:
            derives = source in self.work.streamed.differentiable

            def cut(x: Tensor, derives: bool = derives) -> Tensor:
                return x.detach().requires_grad_(derives and is_continuous(x))

            if source in self.held:
                self.held[source] = tree_map_only(Tensor, cut, self.held[source])

    def forget(self, nodes: tuple[Node, ...]) -> None:
        for node in nodes:
            self.held.pop(node, None)


def plan_pass(streamed: Streamed, number: int, stored: frozenset[Node]) -> Pass:
    """The pass of this number; it stores what is of its own level, and reads what is of a lower one."""
    ends = {node: streamed.source(node) for node in streamed.reduced_in(number)}
    kept = stored.union(streamed.maps)
    ends |= {node: node for node in streamed.rows if node in kept and streamed.level[node] == number}
    return pass_to(streamed, ends, _below(streamed, number, stored))


def plan_way_back(ahead: Pass, number: int, stored: frozenset[Node], packed: bool) -> Pass:
    """The pass again, for gradients: unless ``packed``, it knows what the way ahead has stored."""
    streamed = ahead.streamed
    ends = {end: node for end, node in ahead.ends.items() if end in streamed.differentiable}
    back = pass_to(streamed, ends, _below(streamed, number, stored))
    return back if packed else replace(back, known=stored.intersection(ends))


def _below(streamed: Streamed, number: int, stored: frozenset[Node]) -> frozenset[Node]:
    return frozenset(node for node in stored if streamed.level[node] < number)


def pass_to(streamed: Streamed, ends: Mapping[Node, Node], given: frozenset[Node] = frozenset()) -> Pass:
    """The pass that makes these ends, from the image, the targets and what is ``given``."""
    needed, ahead = set[Node](), [*ends.values()]
    while ahead:
        node = ahead.pop()
        if node not in needed:
            needed.add(node)
            if node not in given:
                ahead.extend(each for each in node.all_input_nodes if each in streamed.rows)
    order = tuple(node for node in streamed.rows if node in needed)
    last_use = {node: node for node in order}
    for node in order:
        for source in node.all_input_nodes:
            if source in last_use:
                last_use[source] = node
    done: dict[Node, list[Node]] = {node: [] for node in order}
    for node, user in last_use.items():
        done[user].append(node)
    return Pass(
        streamed=streamed,
        ends=ends,
        ended={node: tuple(end for end in ends if ends[end] is node) for node in ends.values()},
        operators={
            node: streamed.operators[node]
            for node in order
            if node in streamed.operators and node not in given
        },
        order=order,
        last={node: tuple(nodes) for node, nodes in done.items()},
        known=frozenset(),
    )


def _widen(wanted: dict[Node, list[Part]], node: Node, start: int, stop: int) -> None:
    """Add rows; two parts become one unless there are more rows between them than in both."""
    parts: list[Part] = []
    for first, last in sorted([*wanted.get(node, ()), (start, stop)]):
        if parts and first - parts[-1][1] <= last - first + parts[-1][1] - parts[-1][0]:
            first, last = parts[-1][0], max(parts.pop()[1], last)
        parts.append((first, last))
    wanted[node] = parts


def inputs_of(one: Pass) -> list[Node]:
    """The values without rows that a pass reads."""
    streamed = one.streamed
    read = chain.from_iterable(node.all_input_nodes for node in one.operators)
    return [node for node in dict.fromkeys(read) if node not in streamed.rows]


def as_tuple(value: Any) -> tuple[Tensor, ...]:
    """A tensor, or several, as a tuple."""
    return (value,) if isinstance(value, torch.Tensor) else tuple(value)

"""One pass over the image: which rows of every node a strip needs, and how they are made."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.node import map_arg
from torch.utils.checkpoint import checkpoint

from squeezebox.streaming._graph import Streamed
from squeezebox.streaming._rows import Rows

Part = tuple[int, int]
Read = Callable[[Node, int, int], Tensor]
Sink = Callable[[Node, Tensor], None]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Pass:
    """The nodes that a pass makes, in order, up to what it reduces.

    ``last`` are the nodes that are done with once a node has been made.
    """

    streamed: Streamed
    reduced: tuple[Node, ...]
    order: tuple[Node, ...]
    last: Mapping[Node, tuple[Node, ...]]

    def parts(self, start: int, stop: int, whole: int) -> dict[Node, Part]:
        """Which rows of every reduction's input a strip owns: the image's ``start`` to ``stop`` of ``whole``.

        Strips that follow one another own every row once, whatever the resolution.
        """
        owned = {}
        for node in self.reduced:
            count = self.streamed.rows[self.streamed.source(node)].count
            owned[node] = (start * count // whole, stop * count // whole)
        return {node: part for node, part in owned.items() if part[0] < part[1]}

    def demands(self, owned: Mapping[Node, Part]) -> dict[Node, Part]:
        """The rows of every node from which a strip's own rows are made, within the image."""
        wanted: dict[Node, Part] = {}
        for node, part in owned.items():
            _widen(wanted, self.streamed.source(node), *part)
        for node in reversed(self.order):
            if node in wanted and node in self.streamed.operators:
                for source, start, stop in self.streamed.operators[node].needs(*wanted[node]):
                    _widen(wanted, source, start, stop)
        return wanted

    def run(self, owned: Mapping[Node, Part], read: Read, singles: Mapping[Node, Any], sink: Sink) -> None:
        """Make a strip; ``sink`` gets every reduction and the rows of its input that the strip owns."""
        strip = _Strip(self.streamed.rows, self.demands(owned), read, singles)
        for node in self.order:
            if node in strip.demanded:
                strip.make(node, self.streamed)
            for reduced in self.reduced:
                if reduced in owned and self.streamed.source(reduced) is node:
                    sink(reduced, strip.rows(node, *owned[reduced]))
            strip.forget(self.last[node])

    def run_again(
        self, owned: Mapping[Node, Part], read: Read, singles: Mapping[Node, Any], sink: Sink
    ) -> None:
        """As :meth:`run`, keeping only what crosses from one group of operators to the next.

        There are about as many groups as operators in each; backward makes a group's inner values again.
        """
        strip = _Strip(self.streamed.rows, self.demands(owned), read, singles)
        order = [node for node in self.order if node in strip.demanded]
        length = max(round(len(order) ** 0.5), 1)
        for first in range(0, len(order), length):
            group = order[first : first + length]
            self._run_group(group, strip, set(order[first + length :]), owned)
            for reduced in owned:
                if self.streamed.source(reduced) in group:
                    sink(reduced, strip.rows(self.streamed.source(reduced), *owned[reduced]))
            for node in group:
                strip.forget(self.last[node])

    def _run_group(
        self, group: list[Node], strip: _Strip, later: set[Node], owned: Mapping[Node, Part]
    ) -> None:
        ends = {self.streamed.source(reduced) for reduced in owned}
        out = [node for node in group if node in ends or not later.isdisjoint(node.users)]
        held = [node for node in strip.held if not set(group).isdisjoint(node.users)]
        flat = {node: strip.held[node] for node in held}

        def make(*values: Any) -> tuple[Any, ...]:
            inner = _Strip(strip.forms, strip.demanded, strip.read, strip.singles)
            inner.held.update(zip(flat, values, strict=True))
            for node in group:
                inner.make(node, self.streamed)
            return tuple(inner.held[node] for node in out)

        made = checkpoint(make, *flat.values(), use_reentrant=False, preserve_rng_state=False)
        strip.held.update(zip(out, made, strict=True))


class _Strip:
    """The rows that are there while a strip is made."""

    def __init__(
        self, forms: Mapping[Node, Rows], demanded: dict[Node, Part], read: Read, singles: Mapping[Node, Any]
    ) -> None:
        self.forms, self.demanded, self.read, self.singles = forms, demanded, read, singles
        self.held: dict[Node, Any] = {}

    def rows(self, node: Node, start: int, stop: int) -> Any:
        first, value = self.demanded[node][0], self.held[node]
        form = self.forms[node]
        if isinstance(value, tuple | list):
            return tuple(form.take(each, start - first, stop - first) for each in value)
        return form.take(value, start - first, stop - first)

    def value(self, argument: Any) -> Any:
        return map_arg(argument, lambda node: self.singles[node])

    def make(self, node: Node, streamed: Streamed) -> None:
        start, stop = self.demanded[node]
        operator = streamed.operators.get(node)
        made = self.read(node, start, stop) if operator is None else operator.run(self, start, stop)
        self.held[node] = made

    def forget(self, nodes: tuple[Node, ...]) -> None:
        for node in nodes:
            self.held.pop(node, None)


def plan_pass(streamed: Streamed, number: int) -> Pass:
    """The pass of this number."""
    reduced = tuple(streamed.reduced_in(number))
    sources = [streamed.source(node) for node in reduced]
    needed, ahead = set[Node](), [*sources]
    while ahead:
        node = ahead.pop()
        if node not in needed:
            needed.add(node)
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
        reduced=reduced,
        order=order,
        last={node: tuple(nodes) for node, nodes in done.items()},
    )


def _widen(wanted: dict[Node, Part], node: Node, start: int, stop: int) -> None:
    known = wanted.get(node, (start, stop))
    wanted[node] = (min(known[0], start), max(known[1], stop))


def inputs_of(one: Pass) -> list[Node]:
    """The values without rows that a pass reads."""
    streamed = one.streamed
    read = chain.from_iterable(node.all_input_nodes for node in one.order)
    return [node for node in dict.fromkeys(read) if node not in streamed.rows]


def as_tuple(value: Any) -> tuple[Tensor, ...]:
    """A tensor, or several, as a tuple."""
    return (value,) if isinstance(value, torch.Tensor) else tuple(value)

"""How long every operator of a graph takes here, forward and back: measured on two strips."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from squeezebox.memory import freed_kept, return_all
from squeezebox.streaming._graph import Streamed
from squeezebox.streaming._prepared import Prepared
from squeezebox.streaming._stages import Stage
from squeezebox.streaming._strip import Pass, as_tuple, pass_to

_TIMES = 2  # strips of each height, after a first one
_LOW = 1  # rows of the strip that tells what an operator takes for being started

Rate = tuple[float, float]
"""Seconds for being started, and for each element of the output."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rates:
    """Of every node that has rows and of every reduction: forward, and back. ``copying`` is for a byte."""

    ahead: Mapping[Node, Rate]
    back: Mapping[Node, Rate]
    copying: float


@dataclass(kw_only=True, slots=True)
class _Seen:
    """Of one strip: seconds and elements of every node."""

    ahead: dict[Node, float] = field(default_factory=dict)
    back: dict[Node, float] = field(default_factory=dict)
    elements: dict[Node, int] = field(default_factory=dict)
    copying: dict[Node, float] = field(default_factory=dict)


def measured_rates(prepared: Prepared, height: int) -> Rates:
    """Run strips in the middle, of one row and of ``height``, operator by operator, nothing handed on."""
    with freed_kept():
        low, high = (_timed_strips(prepared, each) for each in (_LOW, height))
    largest = max(high.copying, key=high.elements.__getitem__)
    return Rates(
        ahead={node: _rate(low, high, node, low.ahead, high.ahead) for node in high.ahead},
        back={node: _rate(low, high, node, low.back, high.back) for node in high.back},
        copying=high.copying[largest],
    )


def _timed_strips(prepared: Prepared, height: int) -> _Seen:
    """The mean of all but the first, which finds libraries unprepared; the next finds memory returned."""
    first = _strip(prepared, height)
    return_all()
    others = [_strip(prepared, height) for _ in range(_TIMES)]

    def mean(name: str) -> dict[Node, float]:
        each = [getattr(one, name) for one in others]
        return {node: sum(one[node] for one in each) / len(each) for node in each[0]}

    return _Seen(ahead=mean("ahead"), back=mean("back"), copying=mean("copying"), elements=first.elements)


def whole_pass(streamed: Streamed) -> Pass:
    """All operators in one pass, from the image."""
    ends = {node: streamed.source(node) for node in streamed.reductions}
    return pass_to(streamed, ends | {node: node for node in streamed.maps})


def _rate(low: _Seen, high: _Seen, node: Node, first: dict[Node, float], second: dict[Node, float]) -> Rate:
    """The line through two strips, or through one and nothing."""
    few, many, seconds = low.elements.get(node, 0), high.elements[node], second[node]
    if node not in first or not 0 < few < many:
        return 0.0, seconds / max(many, 1)
    each = max(seconds - first[node], 0.0) / (many - few)
    return max(seconds - each * many, 0.0), each


def _strip(prepared: Prepared, height: int) -> _Seen:
    streamed, seen = prepared.streamed, _Seen()
    crossing = streamed.crossing()
    work, run = whole_pass(prepared.streamed), prepared.run(None, prepared.blank)
    stage = Stage(work=work, number=0, reduces=True, derives=False)
    run.values.pretend(stage, streamed.reductions)
    singles = run.values.for_strips(stage)
    start = prepared.middle(work, height)
    owned = work.parts(start, start + height, prepared.rows)
    derives = streamed.program.loss in streamed.differentiable
    with torch.set_grad_enabled(derives):
        for node, make in work.one_by_one(owned, prepared.read, singles):
            seen.ahead[node], made = _timed(prepared, make)
            seen.elements[node] = sum(as_tuple(part)[0].numel() for part in made)
            _back(prepared, node, made, seen)
            x = as_tuple(made[0])[0].detach()
            if node in crossing:
                seconds, _ = _timed(prepared, x.clone)
                seen.copying[node] = seconds / max(x.numel() * x.element_size(), 1)
            for end in streamed.reductions.keys() & owned.keys() & {*work.ended.get(node, ())}:
                seen.ahead[end], _ = _timed(
                    prepared, partial(streamed.reductions[end].partial, x, owned[end][0])
                )
                seen.elements[end] = x.numel()
    return seen


def _back(prepared: Prepared, node: Node, made: list[Any], seen: _Seen) -> None:
    """Go back through what a node has made, if autograd knows it."""
    parts = [x for part in made for x in as_tuple(part) if isinstance(x, Tensor)]
    outputs = [x for x in parts if x.requires_grad and x.grad_fn is not None]
    if outputs:
        ones = [torch.ones_like(x) for x in outputs]
        seen.back[node], _ = _timed(prepared, partial(torch.autograd.backward, outputs, ones))


def _timed(prepared: Prepared, work: Callable[[], Any]) -> tuple[float, Any]:
    begun = now(prepared.device)
    result = work()
    return now(prepared.device) - begun, result


def now(device: torch.device) -> float:
    """Seconds, once the device has done what it was given to do."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()

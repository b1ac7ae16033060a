"""A training step that moves saved tensors out and back on streams of their own, at random speeds.

Goes in: a step's trace. Comes out: in how many timings some operator read bytes that were no longer its
tensor's, with offsets by the order of issue and with offsets by safe sharing.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from benchmarks._step_trace import Trace
from squeezebox import memory
from squeezebox.schema import Layout, Operator

_AHEAD = 8  # operators before its first use in backward, a tensor is asked back
_BEHIND = 16  # operators after its last use in forward, its copy out is waited for
_COPY = 10.0  # what a copy takes, in operators, on average
_LARGE = 2**20  # bytes from which a tensor is moved


def compare(step: Trace, runs: int) -> dict[str, Any]:
    """Two layouts of the same step, each run with the same random durations."""
    operators, nbytes = offloaded(step)
    buffers, conflicts = memory.safe_sharing(operators, nbytes, kept=step.kept)
    by_issue, safe = memory.layout(buffers), memory.layout(buffers, conflicts=conflicts)
    names = [each.name for each in buffers]
    rng = np.random.default_rng(0)
    wrong = {"issue": 0, "safe": 0}
    for _ in range(runs):
        seconds = rng.lognormal(0.0, 1.0, len(operators))
        seconds *= [1.0 if each.stream == "main" else _COPY for each in operators]
        order = events(operators, seconds)
        for key, made in (("issue", by_issue), ("safe", safe)):
            wrong[key] += clobbered(operators, order, names, nbytes, made)
    return {
        "operators": len(operators),
        "tensors": len(buffers),
        "moved": sum(each.stream == "out" for each in operators),
        "runs": runs,
        "wrong_by_issue": wrong["issue"],
        "wrong_safe": wrong["safe"],
        "bytes_by_issue": by_issue.nbytes,
        "bytes_safe": safe.nbytes,
        "bytes_not_moved": memory.layout(step.buffers).nbytes,
    }


def offloaded(step: Trace) -> tuple[list[Operator], dict[str, int]]:
    """The step with copies out after saved tensors' last uses in forward, and back ahead of backward's.

    Main waits for a copy out some operators later, so that its bytes can be used again.
    """
    moved = saved(step)
    nbytes = step.nbytes
    out, back = defaultdict(list), defaultdict(list)
    for name, (last, first) in moved.items():
        out[last].append(name)
        back[max(first - _AHEAD, step.backward)].append(name)
        nbytes[f"{name} again"] = nbytes[name]
    operators: list[Operator] = []
    for number, operator in enumerate(step.operators):
        operator = replace(operator, waits=tuple(f"out {name}" for name in out[number - _BEHIND]))
        for name in back[number]:
            waits = (f"out {name}", operators[-1].name)
            operators.append(Operator(name=f"in {name}", stream="in", writes=(f"{name} again",), waits=waits))
        if number >= step.backward:
            operator = replace(
                operator, reads=tuple(f"{r} again" if r in moved else r for r in operator.reads)
            )
        operators.append(operator)
        operators += [Operator(name=f"out {name}", stream="out", reads=(name,)) for name in out[number]]
    return operators, nbytes


def saved(step: Trace) -> dict[str, tuple[int, int]]:
    """Large tensors that backward only reads: their last use before it, and the first in it."""
    uses, written = defaultdict(list), set()
    for number, operator in enumerate(step.operators):
        for name in {*operator.reads, *operator.writes}:
            uses[name].append(number)
        if number >= step.backward:
            written |= {*operator.writes}
    found = {}
    for name, nbytes in step.nbytes.items():
        before = [each for each in uses[name] if each < step.backward]
        after = [each for each in uses[name] if each >= step.backward]
        if before and after and nbytes >= _LARGE and name not in written | step.kept:
            found[name] = (before[-1], after[0])
    return found


def events(operators: Sequence[Operator], seconds: np.ndarray) -> list[tuple[float, int, int]]:
    """(time, 0 for an end and 1 for a begin, operator), in order; each begins as soon as it may."""
    newest: dict[str, float] = {}
    ended: dict[str, float] = {}
    first: dict[str, float] = {}  # when a tensor's first writer ended
    found: list[tuple[float, int, int]] = []
    for number, operator in enumerate(operators):
        waits = [ended[name] for name in operator.waits]
        waits += [first[name] for name in (*operator.reads, *operator.writes) if name in first]
        begin = max([0.0, newest.get(operator.stream, 0.0), *waits])
        end = begin + float(seconds[number])
        newest[operator.stream] = ended[operator.name] = end
        for name in operator.writes:
            first.setdefault(name, end)
        found += [(begin, 1, number), (end, 0, number)]
    heapq.heapify(found)
    return [heapq.heappop(found) for _ in range(len(found))]


def clobbered(
    operators: Sequence[Operator],
    order: Sequence[tuple[float, int, int]],
    names: Sequence[str],
    nbytes: Mapping[str, int],
    layout: Layout,
) -> bool:
    """Whether an operator ends a read of bytes that another one has begun to write over."""
    number_of = {name: number for number, name in enumerate(names)}
    starts = np.array(layout.offsets)
    ends = starts + np.array([nbytes[name] for name in names])
    intact = np.ones(len(names), bool)
    begun: set[str] = set()
    for _, begins, number in order:
        operator = operators[number]
        if not begins and not all(intact[number_of[name]] for name in operator.reads if name in number_of):
            return True
        for name in operator.writes if begins else ():
            if name in number_of and name not in begun:
                begun.add(name)
                mine = number_of[name]
                intact &= (starts >= ends[mine]) | (ends <= starts[mine])
                intact[mine] = True
    return False


def text(row: dict[str, Any]) -> str:
    return (
        "## Two copy streams beside the step\n\n"
        f"ResNet-50's step with {row['moved']} saved tensors moved out and back on streams of their "
        f"own ({row['operators']} operators, {row['tensors']} tensors), "
        f"simulated with {row['runs']} random sets of durations. With offsets by the order of issue, some "
        f"operator read bytes that had been written over in {row['wrong_by_issue']} of them; the arena had "
        f"{row['bytes_by_issue'] / 2**20:.1f} MiB. With offsets by safe sharing: in {row['wrong_safe']}; "
        f"{row['bytes_safe'] / 2**20:.1f} MiB. With nothing moved: {row['bytes_not_moved'] / 2**20:.1f} MiB."
    )

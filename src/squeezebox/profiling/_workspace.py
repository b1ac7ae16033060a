"""What operators take on a CPU and give back before they return: counted on a few samples of theirs.

Convolutions copy into layouts of their own, which differ with shapes, strides and the processor. So each is
run on zeros, at two small batches, and the line through both is followed to the batch that is asked about.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.autograd.profiler import record_function
from torch.utils._python_dispatch import _disable_current_modes

from squeezebox.memory import Recording
from squeezebox.profiling._workspace_rules import RNN, RULES, Batched, Operand, Workspace, aten

MOST_BYTES = 1 << 30  # of the operands of an operator that is run
_PREFIX = "squeezebox workspace "


def workspace_of(func: Any, arguments: Any, named: Any) -> Workspace | None:
    """What to ask :func:`measured` for; None where the operator is not known to take more than it returns."""
    if func not in RULES:
        return None
    found = Workspace(
        func,
        tuple(_described(argument) for argument in arguments),
        tuple((name, _described(argument)) for name, argument in (named or {}).items()),
    )
    empty = any(0 in operand.shape for operand in found.operands)
    return None if empty and isinstance(RULES[func], Batched) else found


def measured(workspaces: Iterable[Workspace]) -> dict[Workspace, int]:
    """Bytes of each at its highest moment, beyond what it leaves behind.

    Those of operators of which even a few samples need more than MOST_BYTES, and all where another profiler
    is active, are taken for as many bytes as their batched operands have.
    """
    wanted = set(workspaces)
    counted = _run(list({trial for workspace in wanted for trial in _trials(workspace)}))
    return {workspace: _at_batch(workspace, counted) for workspace in wanted}


def as_on_cpu(func: Any, arguments: Any, out: Any) -> Any:
    """A fake operator's results, as large as the real one's on a CPU; within a fake mode."""
    if func is aten.mkldnn_rnn_layer.default:
        workspace = workspace_of(func, arguments, None)
        kept = 0 if workspace is None else _kept(workspace)
        return (*out[:3], torch.empty(kept, dtype=torch.uint8))
    if func is aten.native_batch_norm.default:  # statistics are as wide as what the layer holds
        wide = next((held.dtype for held in arguments[1:5] if held is not None), arguments[0].dtype)
        return (out[0], *(torch.empty_like(statistic, dtype=wide) for statistic in out[1:]))
    if func in (aten.col2im.default, aten.im2col.default):  # made like the input, and then resized
        storage = out.untyped_storage()
        storage.resize_(max(storage.nbytes(), arguments[0].nbytes))
    return out


@functools.lru_cache(maxsize=64)
def _kept(workspace: Workspace) -> int:
    """Bytes that a recurrent layer keeps for its backward, which its fake kernel leaves out."""
    sizes, known = _batches(workspace, RNN), list[int]()
    with _disable_current_modes(), torch.enable_grad():
        for trial in _trials(workspace):
            kept = workspace.func(*map(_made, trial.arguments))[3]
            known.append(0 if kept is None else kept.nbytes)  # None where nothing is trained
    if len(known) < len(sizes):
        return 0
    return known[0] if len(sizes) == 1 else _on_line(sizes, known, _batch(workspace, RNN))


def _described(argument: Any) -> Any:
    if isinstance(argument, torch.Tensor):
        return Operand(tuple(argument.shape), argument.stride(), argument.dtype)
    return tuple(map(_described, argument)) if isinstance(argument, (list, tuple)) else argument


def _trials(workspace: Workspace) -> list[Workspace]:
    rule = RULES[workspace.func]
    if not isinstance(rule, Batched):
        return []
    trials = [_with_batch(workspace, rule, size) for size in _batches(workspace, rule)]
    return [trial for trial in trials if _operand_bytes(trial.operands) <= MOST_BYTES]


def _batches(workspace: Workspace, rule: Batched) -> tuple[int, ...]:
    """A batch of no fewer samples than there are threads, and its double."""
    batch, few = _batch(workspace, rule), max(rule.least, torch.get_num_threads())
    return (few, 2 * few) if batch > 2 * few else (batch,)


def _batch(workspace: Workspace, rule: Batched) -> int:
    place, dim = next(iter(rule.places.items()))
    return int(workspace.arguments[place].shape[dim])


def _with_batch(workspace: Workspace, rule: Batched, batch: int) -> Workspace:
    def resized(place: int, argument: Any) -> Any:
        if place == rule.made:
            return None
        if place not in rule.places or argument is None:
            return argument
        return argument.resized(rule.places[place], batch)

    return workspace._replace(
        arguments=tuple(resized(place, argument) for place, argument in enumerate(workspace.arguments))
    )


def _operand_bytes(operands: Iterable[Operand]) -> int:
    return sum(operand.nbytes for operand in operands)


def _at_batch(workspace: Workspace, counted: dict[Workspace, int]) -> int:
    rule = RULES[workspace.func]
    if not isinstance(rule, Batched):
        return rule(workspace)
    sizes = _batches(workspace, rule)
    found = [counted.get(_with_batch(workspace, rule, size)) for size in sizes]
    known = [nbytes for nbytes in found if nbytes is not None]
    if len(known) < len(sizes):
        batched = (workspace.arguments[place] for place in rule.places)
        return _operand_bytes(operand for operand in batched if operand is not None)
    if len(sizes) == 1:
        return known[0]
    return _on_line(sizes, known, _batch(workspace, rule))


def _on_line(sizes: Sequence[int], known: Sequence[int], batch: int) -> int:
    """What two batches predict of another."""
    slope = (known[1] - known[0]) / (sizes[1] - sizes[0])
    return max(0, round(known[1] + slope * (batch - sizes[1])))


def _run(trials: list[Workspace]) -> dict[Workspace, int]:
    recording = Recording(torch.device("cpu"))
    if not trials or not recording.start():
        return {}
    try:
        with _disable_current_modes(), torch.enable_grad():
            for number, trial in enumerate(trials):
                _run_one(number, trial)
        return dict(zip(trials, _most(recording.events(), len(trials)), strict=True))
    finally:
        recording.close()


def _run_one(number: int, trial: Workspace) -> None:
    made = [_made(argument) for argument in trial.arguments]
    named = {name: _made(argument) for name, argument in trial.named}
    rule = RULES[trial.func]
    if isinstance(rule, Batched):
        rule.prepare(made)
    with record_function(f"{_PREFIX}{number}"):
        pass
    left = trial.func(*made, **named)
    with record_function(f"{_PREFIX}-1"):
        pass
    del left


def _made(argument: Any) -> Any:
    if isinstance(argument, Operand):
        made = torch.empty_strided(argument.shape, argument.stride, dtype=argument.dtype, device="cpu")
        return made.zero_()
    return argument


def _most(events: Iterable[tuple[str, int, int]], count: int) -> list[int]:
    """Of each trial, the most that was live in it beyond what was left at its end."""
    most, number, live, highest = [0] * count, -1, dict[int, int](), 0
    for name, address, nbytes in events:
        if name.startswith(_PREFIX):
            if number >= 0:
                most[number] = highest - sum(live.values())
            number, live, highest = int(name.removeprefix(_PREFIX)), {}, 0
        elif nbytes > 0:
            live[address] = nbytes
            highest = max(highest, sum(live.values()))
        elif nbytes:
            live.pop(address, None)
    return most

"""What operators take on a CPU and give back before they return: counted on a few samples of theirs.

Convolutions copy into layouts of their own, which differ with shapes, strides and the processor. So each is
run on zeros, at two small batches, and the line through both is followed to the batch that is asked about.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch.autograd.profiler import record_function
from torch.utils._python_dispatch import _disable_current_modes

from squeezebox.profiling._peak import Recording

aten = torch.ops.aten
MOST_BYTES = 1 << 30  # of the operands of an operator that is run
_PREFIX = "squeezebox workspace "


class Operand(NamedTuple):
    """A tensor argument without its values."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Of the elements that its strides reach."""
        last = sum((size - 1) * step for size, step in zip(self.shape, self.stride, strict=True))
        return 0 if 0 in self.shape else (last + 1) * self.dtype.itemsize


class Workspace(NamedTuple):
    """An operator and its arguments; equal ones take the same memory."""

    func: Any
    arguments: tuple[Any, ...]


def workspace_of(func: Any, arguments: Any, named: Any) -> Workspace | None:
    """What to ask :func:`measured` for; None where the operator is not known to take more than it returns."""
    if func not in _RULES or named:
        return None
    found = Workspace(func, tuple(_described(argument) for argument in arguments))
    operands = (argument for argument in found.arguments if isinstance(argument, Operand))
    return None if any(0 in operand.shape for operand in operands) else found


def measured(workspaces: Iterable[Workspace]) -> dict[Workspace, int]:
    """Bytes of each at its highest moment, beyond what it leaves behind.

    Those of operators of which even two samples need more than MOST_BYTES, and all where another profiler is
    active, are taken for as many bytes as their batched operands have.
    """
    wanted = set(workspaces)
    counted = _run(list({trial for workspace in wanted for trial in _trials(workspace)}))
    return {workspace: _at_batch(workspace, counted) for workspace in wanted}


def _described(argument: Any) -> Any:
    if isinstance(argument, torch.Tensor):
        return Operand(tuple(argument.shape), argument.stride(), argument.dtype)
    return tuple(argument) if isinstance(argument, (list, tuple)) else argument


def _copied(workspace: Workspace) -> int:
    """A product copies an operand, unless its rows or columns lie one after another."""
    operands = [argument for argument in workspace.arguments if isinstance(argument, Operand)]
    return sum(_dense(operand) for operand in operands[-2:] if not _is_matrix(operand))


def _dense(operand: Operand) -> int:
    count = operand.dtype.itemsize
    for size in operand.shape:
        count *= size
    return count


def _is_matrix(operand: Operand) -> bool:
    (rows, columns), (down, right) = operand.shape[-2:], operand.stride[-2:]
    return (right == 1 and down >= max(1, columns)) or (down == 1 and right >= max(1, rows))


class _Batched(NamedTuple):
    """Counted at two batches; the batch is the first size of the arguments of these numbers."""

    places: tuple[int, ...]


_RULES: MappingProxyType[Any, _Batched | Callable[[Workspace], int]] = MappingProxyType(
    {
        aten.convolution.default: _Batched((0,)),
        aten.convolution_backward.default: _Batched((0, 1)),
        aten.native_batch_norm_backward.default: _Batched((0, 1)),
        aten._adaptive_avg_pool2d_backward.default: _Batched((0, 1)),
        aten.mm.default: _copied,
        aten.bmm.default: _copied,
        aten.addmm.default: _copied,
    }
)


def _trials(workspace: Workspace) -> list[Workspace]:
    rule = _RULES[workspace.func]
    if not isinstance(rule, _Batched):
        return []
    trials = [_with_batch(workspace, rule.places, size) for size in _batches(workspace, rule)]
    return [trial for trial in trials if _operand_bytes(trial, range(len(trial.arguments))) <= MOST_BYTES]


def _batches(workspace: Workspace, rule: _Batched) -> tuple[int, ...]:
    """A batch of no fewer samples than there are threads, and its double."""
    batch, few = workspace.arguments[rule.places[0]].shape[0], max(2, torch.get_num_threads())
    return (few, 2 * few) if batch > 2 * few else (batch,)


def _with_batch(workspace: Workspace, places: tuple[int, ...], batch: int) -> Workspace:
    def resized(place: int, argument: Any) -> Any:
        return argument._replace(shape=(batch, *argument.shape[1:])) if place in places else argument

    return workspace._replace(
        arguments=tuple(resized(place, argument) for place, argument in enumerate(workspace.arguments))
    )


def _operand_bytes(workspace: Workspace, places: Iterable[int]) -> int:
    operands = (workspace.arguments[place] for place in places)
    return sum(operand.nbytes for operand in operands if isinstance(operand, Operand))


def _at_batch(workspace: Workspace, counted: dict[Workspace, int]) -> int:
    rule = _RULES[workspace.func]
    if not isinstance(rule, _Batched):
        return rule(workspace)
    sizes = _batches(workspace, rule)
    found = [counted.get(_with_batch(workspace, rule.places, size)) for size in sizes]
    known = [nbytes for nbytes in found if nbytes is not None]
    if len(known) < len(sizes):
        return _operand_bytes(workspace, rule.places)
    if len(sizes) == 1:
        return known[0]
    batch: int = workspace.arguments[rule.places[0]].shape[0]
    slope = (known[1] - known[0]) / (sizes[1] - sizes[0])
    return max(0, round(known[1] + slope * (batch - sizes[1])))


def _run(trials: list[Workspace]) -> dict[Workspace, int]:
    recording = Recording(torch.device("cpu"))
    if not trials or not recording.start():
        return {}
    try:
        with _disable_current_modes(), torch.no_grad():
            for number, trial in enumerate(trials):
                _run_one(number, trial)
        return dict(zip(trials, _most(recording.events(), len(trials)), strict=True))
    finally:
        recording.close()


def _run_one(number: int, trial: Workspace) -> None:
    made = [_made(argument) if isinstance(argument, Operand) else argument for argument in trial.arguments]
    with record_function(f"{_PREFIX}{number}"):
        pass
    left = trial.func(*made)
    with record_function(f"{_PREFIX}-1"):
        pass
    del left


def _made(operand: Operand) -> torch.Tensor:
    return torch.empty_strided(operand.shape, operand.stride, dtype=operand.dtype, device="cpu").zero_()


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

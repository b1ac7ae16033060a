"""What operators take on a CPU and give back before they return: counted on a few samples of theirs.

Convolutions copy into layouts of their own, which differ with shapes, strides and the processor. So each is
run on zeros, at two small batches, and the line through both is followed to the batch that is asked about.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch.autograd.profiler import record_function
from torch.utils._python_dispatch import _disable_current_modes

from squeezebox.memory import Recording

aten = torch.ops.aten
MOST_BYTES = 1 << 30  # of the operands of an operator that is run
_PREFIX = "squeezebox workspace "


class Operand(NamedTuple):
    """A tensor argument without its values."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    def resized(self, dim: int, size: int) -> Operand:
        """The same with another size in one dimension; what lies outside of it moves together."""
        shape = (*self.shape[:dim], size, *self.shape[dim + 1 :])
        own, before = self.stride[dim], self.shape[dim]
        stride = tuple(step // before * size if step > own else step for step in self.stride)
        return Operand(shape, stride, self.dtype)

    @property
    def nbytes(self) -> int:
        """Of the elements that its strides reach."""
        last = sum((size - 1) * step for size, step in zip(self.shape, self.stride, strict=True))
        return 0 if 0 in self.shape else (last + 1) * self.dtype.itemsize


class Workspace(NamedTuple):
    """An operator and its arguments; equal ones take the same memory."""

    func: Any
    arguments: tuple[Any, ...]
    named: tuple[tuple[str, Any], ...] = ()

    @property
    def operands(self) -> list[Operand]:
        """All tensors among the arguments."""
        values = [*self.arguments, *(value for _, value in self.named)]
        return [value for value in values if isinstance(value, Operand)]


def workspace_of(func: Any, arguments: Any, named: Any) -> Workspace | None:
    """What to ask :func:`measured` for; None where the operator is not known to take more than it returns."""
    if func not in _RULES:
        return None
    found = Workspace(
        func,
        tuple(_described(argument) for argument in arguments),
        tuple((name, _described(argument)) for name, argument in (named or {}).items()),
    )
    empty = any(0 in operand.shape for operand in found.operands)
    return None if empty and isinstance(_RULES[func], _Batched) else found


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
        return (*out[:3], torch.empty(_saved_workspace(func, arguments), dtype=torch.uint8))
    if func in (aten.col2im.default, aten.im2col.default):  # made like the input, and then resized
        storage = out.untyped_storage()
        storage.resize_(max(storage.nbytes(), arguments[0].nbytes))
    return out


def _saved_workspace(func: Any, arguments: Any) -> int:
    """Bytes that a recurrent layer keeps for its backward, which its fake kernel leaves out."""
    workspace = workspace_of(func, arguments, None)
    if workspace is None:
        return 0
    sizes, known = _batches(workspace, _RNN), list[int]()
    with _disable_current_modes(), torch.enable_grad():
        for trial in _trials(workspace):
            known.append(func(*map(_made, trial.arguments))[3].nbytes)
    if len(known) < len(sizes):
        return 0
    return known[0] if len(sizes) == 1 else _on_line(sizes, known, _batch(workspace, _RNN))


def _described(argument: Any) -> Any:
    if isinstance(argument, torch.Tensor):
        return Operand(tuple(argument.shape), argument.stride(), argument.dtype)
    return tuple(map(_described, argument)) if isinstance(argument, (list, tuple)) else argument


def _copied(workspace: Workspace) -> int:
    """A product copies an operand whose rows or columns do not lie one after another."""
    return sum(_dense(operand) for operand in workspace.operands[-2:] if not _is_matrix(operand))


def _dense(operand: Operand) -> int:
    count = operand.dtype.itemsize
    for size in operand.shape:
        count *= size
    return count


def _is_matrix(operand: Operand) -> bool:
    (rows, columns), (down, right) = operand.shape[-2:], operand.stride[-2:]
    return (right == 1 and down >= max(1, columns)) or (down == 1 and right >= max(1, rows))


def _attention(workspace: Workspace) -> int:
    """Scores of a block of queries and keys a thread, as torch's FlashAttentionKernel.cpp allocates them."""
    query, key = workspace.operands[:2]
    rows, columns = _blocks(query, key)
    threads, narrow = torch.get_num_threads(), query.dtype.itemsize < 4
    scratch = 4 * rows * (columns + 2 + query.shape[-1])
    return int(threads * (scratch + narrow * query.dtype.itemsize * rows * columns))


def _attention_backward(workspace: Workspace) -> int:
    """Scores and their gradients, and a copy of the size of the queries."""
    query, key = workspace.operands[1:3]
    rows, columns = _blocks(query, key)
    width = 4 + (query.dtype.itemsize if query.dtype.itemsize < 4 else 0)
    return int(_dense(query) + 2 * torch.get_num_threads() * width * rows * columns + 4 * rows)


def _blocks(query: Operand, key: Operand) -> tuple[int, int]:
    length = query.shape[-2]
    rows = 256 if length >= 768 else 64 if length >= 192 else 32
    return min(rows, length), min(512, key.shape[-2])


def _unfolding(workspace: Workspace) -> int:
    """The result is made like the input, and grows."""
    return _dense(workspace.operands[0])


def _folding(workspace: Workspace) -> int:
    """As unfolding, where blocks do not overlap so much that the result is smaller."""
    made = _dense(workspace.operands[0])
    (height, width), (rows, columns) = workspace.arguments[1:3]
    blocks = workspace.operands[0].shape[-1]
    return made if height * width > rows * columns * blocks else 0


def _embedding_bag(workspace: Workspace) -> int:
    """Indices' bags are summed up from their beginnings, except by the quick path for sums."""
    arguments = (*workspace.arguments, *_BAG_DEFAULTS[len(workspace.arguments) :])
    mode, padding = arguments[4], arguments[8]
    return 0 if mode == _BAG_SUM and padding < 0 else _dense(workspace.operands[1])


def _embedding_bag_backward(workspace: Workspace) -> int:
    """Of maxima, those of bags that are not empty; else indices sorted, their order, and the bags of both."""
    grad, indices, _, bag_of_each, bags, maxima = workspace.operands[:6]
    if workspace.arguments[_BAG_MODE] == _BAG_MAXIMUM:
        return _dense(grad) + _dense(maxima) + _dense(bags)
    weights, known = workspace.operands[6:], 0 not in bag_of_each.shape
    return (3 if known else 4) * _dense(indices) + sum(map(_dense, weights))


_BAG_SUM, _BAG_MAXIMUM, _BAG_MODE = 0, 2, 8  # modes of embedding_bag, an argument of its backward
_BAG_DEFAULTS = (None, None, None, False, _BAG_SUM, False, None, False, -1)


class _Batched(NamedTuple):
    """Counted at two batches, the smaller one of at least ``least`` samples.

    The batch is the size of the arguments of these numbers, in the dimension that each names. ``prepare``
    puts in what other operators make.
    """

    places: Mapping[int, int]
    least: int = 2
    prepare: Callable[[list[Any]], None] = lambda arguments: None


def _save_workspace(arguments: list[Any]) -> None:
    """Give a recurrent layer's backward what its forward keeps."""
    values = arguments[:7]
    reverse, mode, hidden_size, num_layers, has_biases, train, bidirectional, sizes, batch_first = arguments[
        13:22
    ]
    flags = (reverse, sizes, mode, hidden_size, num_layers, has_biases, bidirectional, batch_first, train)
    arguments[22] = aten.mkldnn_rnn_layer.default(*values, *flags)[3]


_RNN = _Batched({0: 1, 5: 0, 6: 0}, least=16)
_RNN_BACKWARD = _Batched(
    {0: 1, 5: 0, 6: 0, 7: 1, 8: 0, 9: 0, 10: 1, 11: 0, 12: 0}, least=16, prepare=_save_workspace
)


_RULES: MappingProxyType[Any, _Batched | Callable[[Workspace], int]] = MappingProxyType(
    {
        aten.convolution.default: _Batched({0: 0}),
        aten.convolution_backward.default: _Batched({0: 0, 1: 0}),
        aten.native_batch_norm_backward.default: _Batched({0: 0, 1: 0}),
        aten._adaptive_avg_pool2d_backward.default: _Batched({0: 0, 1: 0}),
        aten.col2im.default: _folding,
        aten.im2col.default: _unfolding,
        aten.mkldnn_rnn_layer.default: _RNN,
        aten.mkldnn_rnn_layer_backward.default: _RNN_BACKWARD,
        aten._embedding_bag.default: _embedding_bag,
        aten._embedding_bag_backward.default: _embedding_bag_backward,
        aten._scaled_dot_product_flash_attention_for_cpu.default: _attention,
        aten._scaled_dot_product_flash_attention_for_cpu_backward.default: _attention_backward,
        aten.mm.default: _copied,
        aten.bmm.default: _copied,
        aten.addmm.default: _copied,
    }
)


def _trials(workspace: Workspace) -> list[Workspace]:
    rule = _RULES[workspace.func]
    if not isinstance(rule, _Batched):
        return []
    trials = [_with_batch(workspace, rule, size) for size in _batches(workspace, rule)]
    return [trial for trial in trials if _operand_bytes(trial.operands) <= MOST_BYTES]


def _batches(workspace: Workspace, rule: _Batched) -> tuple[int, ...]:
    """A batch of no fewer samples than there are threads, and its double."""
    batch, few = _batch(workspace, rule), max(rule.least, torch.get_num_threads())
    return (few, 2 * few) if batch > 2 * few else (batch,)


def _batch(workspace: Workspace, rule: _Batched) -> int:
    place, dim = next(iter(rule.places.items()))
    return int(workspace.arguments[place].shape[dim])


def _with_batch(workspace: Workspace, rule: _Batched, batch: int) -> Workspace:
    def resized(place: int, argument: Any) -> Any:
        if place not in rule.places or argument is None:
            return argument
        return argument.resized(rule.places[place], batch)

    return workspace._replace(
        arguments=tuple(resized(place, argument) for place, argument in enumerate(workspace.arguments))
    )


def _operand_bytes(operands: Iterable[Operand]) -> int:
    return sum(operand.nbytes for operand in operands)


def _at_batch(workspace: Workspace, counted: dict[Workspace, int]) -> int:
    rule = _RULES[workspace.func]
    if not isinstance(rule, _Batched):
        return rule(workspace)
    sizes = _batches(workspace, rule)
    found = [counted.get(_with_batch(workspace, rule, size)) for size in sizes]
    known = [nbytes for nbytes in found if nbytes is not None]
    if len(known) < len(sizes):
        return _operand_bytes(workspace.arguments[place] for place in rule.places)
    if len(sizes) == 1:
        return known[0]
    return _on_line(sizes, known, _batch(workspace, rule))


def _on_line(sizes: Sequence[int], known: Sequence[int], batch: int) -> int:
    """What two batches foretell of another."""
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
    rule = _RULES[trial.func]
    if isinstance(rule, _Batched):
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

"""What operators take on a CPU beyond their results: by formula, or counted on a few samples of theirs.

Convolutions copy into layouts of their own, which differ with shapes, strides and the processor. So each is
run on zeros, at two small batches, and the line through both is followed to the batch that is asked about.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch.autograd.profiler import record_function
from torch.utils._python_dispatch import _disable_current_modes

from squeezebox.memory import Recording

aten = torch.ops.aten


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


def _copied(workspace: Workspace) -> int:
    """A product copies an operand whose rows or columns do not lie one after another."""
    return sum(dense(operand) for operand in workspace.operands[-2:] if not _is_matrix(operand))


def dense(operand: Operand) -> int:
    """Bytes of a copy."""
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
    return int(dense(query) + 2 * torch.get_num_threads() * width * rows * columns + 4 * rows)


def _blocks(query: Operand, key: Operand) -> tuple[int, int]:
    length = query.shape[-2]
    rows = 256 if length >= 768 else 64 if length >= 192 else 32
    return min(rows, length), min(512, key.shape[-2])


def _unfolding(workspace: Workspace) -> int:
    """The result is made like the input, and grows."""
    return dense(workspace.operands[0])


def _folding(workspace: Workspace) -> int:
    """As unfolding, where blocks do not overlap so much that the result is smaller."""
    made = dense(workspace.operands[0])
    (height, width), (rows, columns) = workspace.arguments[1:3]
    blocks = workspace.operands[0].shape[-1]
    return made if height * width > rows * columns * blocks else 0


def _embedding_bag(workspace: Workspace) -> int:
    """Indices' bags are summed up from their beginnings, except by the quick path for sums."""
    arguments = (*workspace.arguments, *_BAG_DEFAULTS[len(workspace.arguments) :])
    mode, padding = arguments[4], arguments[8]
    return 0 if mode == _BAG_SUM and padding < 0 else dense(workspace.operands[1])


def _embedding_bag_backward(workspace: Workspace) -> int:
    """Of maxima, those of bags that are not empty; else indices sorted, their order, and the bags of both."""
    grad, indices, _, bag_of_each, bags, maxima = workspace.operands[:6]
    if workspace.arguments[_BAG_MODE] == _BAG_MAXIMUM:
        return dense(grad) + dense(maxima) + dense(bags)
    weights, known = workspace.operands[6:], 0 not in bag_of_each.shape
    return (3 if known else 4) * dense(indices) + sum(map(dense, weights))


def _scattering(workspace: Workspace) -> int:
    """In 16 bits, results in float32, or a row of them a thread where rows have one index; means: counts."""
    own, index, *source = workspace.operands
    elements = dense(own) // own.dtype.itemsize
    wide = 4 * elements if own.dtype in (torch.bfloat16, torch.float16) else 0
    is_of_rows = len(index.shape) > 1 and index.stride[0] == 1 and not any(index.stride[1:])
    if source and is_of_rows and workspace.arguments[1] == 0:
        return wide // max(own.shape[0], 1) * torch.get_num_threads()
    if "mean" in workspace.arguments:
        return sum(map(dense, (own, *source))) + (wide or elements)
    return wide


_BAG_SUM, _BAG_MAXIMUM, _BAG_MODE = 0, 2, 8  # modes of embedding_bag, an argument of its backward
_BAG_DEFAULTS = (None, None, None, False, _BAG_SUM, False, None, False, -1)


class Batched(NamedTuple):
    """Counted at two batches, the smaller one of at least ``least`` samples.

    The batch is the size of the arguments of these numbers, in the dimension that each names. The argument
    ``made`` is left out, and put in by ``prepare``: what another operator makes.
    """

    places: Mapping[int, int]
    least: int = 2
    made: int | None = None
    prepare: Callable[[list[Any]], None] = lambda arguments: None


def _save_workspace(arguments: list[Any]) -> None:
    """Give a recurrent layer's backward what its forward keeps."""
    values = arguments[:7]
    reverse, mode, hidden_size, num_layers, has_biases, train, bidirectional, sizes, batch_first = arguments[
        13:22
    ]
    flags = (reverse, sizes, mode, hidden_size, num_layers, has_biases, bidirectional, batch_first, train)
    arguments[22] = aten.mkldnn_rnn_layer.default(*values, *flags)[3]


RNN = Batched({0: 1, 5: 0, 6: 0}, least=16)
_RNN_BACKWARD = Batched(
    {0: 1, 5: 0, 6: 0, 7: 1, 8: 0, 9: 0, 10: 1, 11: 0, 12: 0}, least=16, made=22, prepare=_save_workspace
)


_SCATTERING = [
    getattr(getattr(aten, name), form)
    for name in ("scatter", "scatter_", "scatter_add", "scatter_add_", "scatter_reduce", "scatter_reduce_")
    for form in getattr(aten, name).overloads()
]
RULES: MappingProxyType[Any, Batched | Callable[[Workspace], int]] = MappingProxyType(
    {
        aten.convolution.default: Batched({0: 0}),
        aten.convolution_backward.default: Batched({0: 0, 1: 0}),
        aten.native_batch_norm_backward.default: Batched({0: 0, 1: 0}),
        aten.max_pool2d_with_indices_backward.default: Batched({0: 0, 1: 0, 7: 0}),
        aten._adaptive_avg_pool2d_backward.default: Batched({0: 0, 1: 0}),
        aten.col2im.default: _folding,
        aten.im2col.default: _unfolding,
        aten.mkldnn_rnn_layer.default: RNN,
        aten.mkldnn_rnn_layer_backward.default: _RNN_BACKWARD,
        aten._embedding_bag.default: _embedding_bag,
        aten._embedding_bag_backward.default: _embedding_bag_backward,
        aten._scaled_dot_product_flash_attention_for_cpu.default: _attention,
        aten._scaled_dot_product_flash_attention_for_cpu_backward.default: _attention_backward,
        **dict.fromkeys(_SCATTERING, _scattering),
        aten.mm.default: _copied,
        aten.bmm.default: _copied,
        aten.addmm.default: _copied,
    }
)


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

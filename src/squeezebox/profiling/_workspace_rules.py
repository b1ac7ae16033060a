"""What operators take on a CPU beyond their results: formulas, and which ones are counted."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

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
        aten.mm.default: _copied,
        aten.bmm.default: _copied,
        aten.addmm.default: _copied,
    }
)

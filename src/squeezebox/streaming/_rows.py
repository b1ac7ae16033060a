"""Which part of a tensor a strip has: rows along the streamed axis, and how an operator makes them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.fx import Node

from squeezebox.schema import OptionError, UnsupportedModelError

Part = tuple[int, int]
"""Rows, or columns, from the first up to but not including the last."""

Need = tuple[Node, int, int]
"""An operator's input and the rows of it, from the first up to but not including the last."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rows:
    """Where a tensor has the streamed axis: dimension ``dim`` has ``before * count * after`` elements.

    ``before`` and ``after`` are 1 unless a view has merged the axis with its neighbours.
    """

    dim: int
    count: int
    before: int = 1
    after: int = 1

    @property
    def merged(self) -> bool:
        """Whether other axes share the dimension."""
        return self.before != 1 or self.after != 1

    def size(self, rows: int) -> int:
        """Elements along the dimension of this many rows."""
        return self.before * rows * self.after

    def apart(self, tensor: Tensor) -> Tensor:
        """With the dimension as three: what is before the axis in it, the axis, what is after."""
        parts: Tensor = tensor.unflatten(self.dim, (self.before, -1, self.after))
        return parts

    def take(self, tensor: Tensor, start: int, stop: int) -> Tensor:
        """Rows ``start`` to ``stop`` of those that the tensor has."""
        if self.size(stop - start) == tensor.shape[self.dim]:
            return tensor
        if not self.merged:
            return tensor.narrow(self.dim, start, stop - start)
        return self.apart(tensor).narrow(self.dim + 1, start, stop - start).flatten(self.dim, self.dim + 2)


class Strip(Protocol):
    """What an operator reads while a strip is made."""

    def rows(self, node: Node, start: int, stop: int) -> Any:
        """These rows of a tensor (or of a tuple of tensors) that has rows."""

    def known(self, node: Node, start: int, stop: int) -> Tensor | None:
        """These rows of what the node gives, where an earlier pass has stored them."""

    def value(self, argument: Any) -> Any:
        """An argument in which every node without rows has become its value."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Operator:
    """How rows of one node are made from rows of others.

    ``needs(a, b)`` gives the rows of every input that rows a to b are made from, within the image;
    ``run(strip, a, b)`` makes exactly these rows.
    """

    rows: Rows
    needs: Callable[[int, int], list[Need]]
    run: Callable[[Strip, int, int], Any]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Call:
    """A node of the graph with the rows of those among its inputs that have any."""

    node: Node
    inputs: Mapping[Node, Rows]

    @property
    def target(self) -> Any:
        """The operator."""
        return self.node.target

    @property
    def args(self) -> Any:
        """The node's positional arguments."""
        return self.node.args

    @property
    def shape(self) -> tuple[int, ...]:
        """The whole output's shape, the first one's of several."""
        return shape_of(self.node)

    def refuse(self, why: str) -> UnsupportedModelError:
        """The error that names operator, module and reason."""
        return refusal(self.node, why)

    def source(self) -> tuple[Node, Rows]:
        """The first argument and its rows, unmerged: for operators that look at neighbouring rows."""
        node = self.node.args[0]
        assert isinstance(node, Node)
        if node not in self.inputs or len(self.inputs) > 1:
            raise self.refuse("its other arguments depend on the image, row by row")
        if self.inputs[node].merged:
            raise self.refuse("the streamed axis has been merged with another one before")
        return node, self.inputs[node]


def run_node(node: Node, arguments: Any, keywords: Any) -> Any:
    """A node's operator on these arguments, which may be laid out otherwise than when it was traced.

    Raises:
        OptionError: labels are out of range.
    """
    target: Any = node.target
    if target is torch.ops.aten.view.default:
        target = torch.ops.aten.reshape.default
    try:
        return target(*arguments, **keywords)
    except RuntimeError as error:
        if target is not torch.ops.aten.gather.default or "out of bounds" not in str(error):
            raise
        values, dim, index = arguments[:3]
        count = values.shape[dim]
        raise OptionError(
            f"labels go from {int(index.min())} to {int(index.max())}, but the model gives {count} classes, "
            f"0 to {count - 1}. Correct the target, name what does not count as ignore_index= of the loss, "
            "or give the model more outputs."
        ) from error


def is_continuous(x: Tensor) -> bool:
    """Whether it can have a gradient: of floating point or complex numbers."""
    return x.is_floating_point() or x.is_complex()


def is_narrow(x: Tensor) -> bool:
    """Whether it is of floating point numbers in fewer bits than float32 has."""
    return x.is_floating_point() and x.element_size() < 4


def widened(x: Tensor) -> Tensor:
    """In float32 where it is narrow: what torch computes moments and sums in."""
    return x.float() if is_narrow(x) else x


def shape_of(node: Node) -> tuple[int, ...]:
    """The whole shape of a node's tensor, or of the first of its tensors."""
    value = node.meta["val"]
    return tuple((value[0] if isinstance(value, tuple | list) else value).shape)


def refusal(node: Node, why: str, change: str = "") -> UnsupportedModelError:
    """The error that names operator, module and reason, and what to change."""
    change = change or _CHANGES.get(str(getattr(node.target, "overloadpacket", "")), "Change it")
    return UnsupportedModelError(
        f"{place_of(node)} cannot be streamed exactly: {node.target} ({why}). {change}, or train on smaller "
        "images without StreamedStep."
    )


def place_of(node: Node) -> str:
    """The module that a node is of, or the loss, in words."""
    stack = [*(node.meta.get("nn_module_stack") or {}).values()]
    path = str(stack[-1][0]) if stack else ""
    path = path.removeprefix("model.") if path not in ("", "model") else path
    kind = str(stack[-1][1]).rpartition(".")[2] if stack else ""
    return f"module '{path}' ({kind})" if path else "the loss"


_CHANGES = {
    "aten.any": "Write attention over all pixels as scores.softmax(-1) @ values",  # torch's own asks for it
    "aten.index": "Write x[mask].mean() as (x * mask).sum() / mask.sum(), if that is the index",
    "aten.masked_select": "Write x[mask].mean() as (x * mask).sum() / mask.sum()",
    "aten.nonzero": "Write what is chosen by a mask as (x * mask).sum() / mask.sum()",
    **dict.fromkeys(
        ("aten.bmm", "aten.mm", "aten.scaled_dot_product_attention"),
        "Have pixels attend to a few places, with keys and values of adaptive_avg_pool2d(x, 16)",
    ),
    "aten.max_pool3d_with_indices": "Write max_pool3d(x, 2) as max_pool2d(x.flatten(1, 2), 2).unflatten(1, "
    "x.shape[1:3]).unflatten(2, (-1, 2)).amax(3)",
    **dict.fromkeys(("aten.max", "aten.min"), "Write x.max(dim).values as x.amax(dim)"),
    "aten.topk": "Its values stream, and its places do not: write x.gather(dim, x.topk(k, dim).indices) as "
    "x.topk(k, dim).values",
    "aten.sort": "Take a loss without order, such as Dice or Jaccard in place of Lovasz",
    "aten.native_dropout": "Set its probability to 0, put it into eval(), or behind the pooling",
}

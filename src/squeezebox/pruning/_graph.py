"""Which channels depend on each other: the model's graph of aten operators, followed from input to output.

A table of rules says what each operator does with dimensions. What an unknown operator reads stays as it is.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import Node

from squeezebox.pruning._channels import Axis, Channels, Placements, Segment, fix, unite

Axes = list[Axis]

_SAME = (
    "relu relu_ relu6 relu6_ gelu gelu_ silu silu_ mish mish_ sigmoid sigmoid_ tanh tanh_ hardtanh hardtanh_ "
    "hardswish hardswish_ hardsigmoid hardsigmoid_ leaky_relu leaky_relu_ elu elu_ selu selu_ softplus "
    "dropout dropout_ feature_dropout clone contiguous detach to _to_copy alias neg exp sqrt rsqrt abs "
    "square pow clamp clamp_ clamp_min"
).split()
_PAIRS = "add add_ sub sub_ mul mul_ div div_ maximum minimum".split()
_POOLS = (
    "max_pool1d max_pool2d max_pool3d avg_pool1d avg_pool2d avg_pool3d adaptive_avg_pool1d "
    "adaptive_avg_pool2d adaptive_avg_pool3d upsample_nearest1d upsample_nearest2d upsample_nearest3d "
    "upsample_bilinear2d upsample_bicubic2d upsample_trilinear3d _upsample_nearest_exact2d"
).split()
_SHAPES = "flatten view reshape _unsafe_view unflatten squeeze unsqueeze expand".split()
_CONVOLUTIONS = "conv1d conv2d conv3d".split()
_TRANSPOSED = "conv_transpose1d conv_transpose2d conv_transpose3d".split()


class Dependencies:
    """Follows a graph's nodes in order; ``placements`` is what comes out."""

    def __init__(self, names: dict[str, str], shapes: dict[str, torch.Size]) -> None:
        """Names are those of parameters and buffers, by the graph's own."""
        self.placements = Placements(shapes)
        self.names = names
        self._axes: dict[Node, Any] = {}

    def follow(self, nodes: Sequence[Node]) -> None:
        """Every node once, in order."""
        for node in nodes:
            if node.op == "output":
                self._fix_all(node)
            elif node.op == "call_function":
                self._axes[node] = self._called(node)

    def axes(self, node: Node) -> Axes:
        """Of a tensor's dimensions; a parameter's are new channels where nothing is known of them."""
        if node.name in self.names:
            name = self.names[node.name]
            return [self.placements.axis(name, dim) for dim in range(len(self.placements.shapes[name]))]
        found = self._axes.get(node)
        return list(found) if found is not None else [None] * len(_shape(node))

    def _called(self, node: Node) -> Any:
        if node.target is operator.getitem:
            source, index = node.args
            return self._axes[source][index] if source in self._axes else None  # type: ignore[index]
        name = str(node.target).split(".")[1] if str(node.target).startswith("aten.") else ""
        rule = _RULES.get(name)
        found = rule(self, node) if rule is not None else None
        if found is None:
            self._fix_all(node)
            return _unknown(node.meta.get("val"))
        return found

    def _fix_all(self, node: Node) -> None:
        for each in node.all_input_nodes:
            if isinstance(each.meta.get("val"), torch.Tensor):
                for axis in self.axes(each):
                    fix(axis)

    def bind(self, node: Any, dim: int, axis: Axis) -> Axis:
        """A parameter's dimension has these channels; what is no parameter of its own fixes them."""
        if not isinstance(node, Node):
            return axis
        if node.name not in self.names:
            fix(axis)
            return None
        return self.placements.bind(self.names[node.name], dim, axis)


def _unknown(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return [None] * value.dim()
    return [_unknown(each) for each in value] if isinstance(value, (tuple, list)) else None


def _shape(node: Node) -> tuple[int, ...]:
    return tuple(node.meta["val"].shape)


# --- rules: the axes of what an operator returns, or None where it is as an unknown one -------------------


def _same(graph: Dependencies, node: Node) -> Axes:
    """Elementwise, of the one tensor that is given, wherever it stands."""
    inputs = node.all_input_nodes
    return graph.axes(inputs[0]) if len(inputs) == 1 else _pair(graph, node)


def _pair(graph: Dependencies, node: Node) -> Axes:
    """Elementwise, with broadcasting: dimensions of the same size have to stay alike."""
    tensors = node.all_input_nodes
    shape = _shape(node)
    found: Axes = [None] * len(shape)
    for dim, size in enumerate(shape):
        meeting = []
        for each in tensors:
            own = dim - (len(shape) - len(_shape(each)))
            if own >= 0 and _shape(each)[own] == size > 1:
                meeting.append(graph.axes(each)[own])
        found[dim] = meeting[0] if meeting else None
        for other in meeting[1:]:
            found[dim] = unite(found[dim], other)
    return found


def _pool(graph: Dependencies, node: Node) -> Axes:
    axes = graph.axes(_node(node.args[0]))
    for axis in axes[2:]:
        fix(axis)
    return [*axes[:2], *[None] * (len(axes) - 2)]


def _convolution(graph: Dependencies, node: Node) -> Axes | None:
    """Of weights (out, in / groups, ...). Depthwise ones hand channels on; other groups stay as they are."""
    return _weighted(graph, node, groups=_argument(node, 6, "groups", 1), into=1, out=0)


def _transposed(graph: Dependencies, node: Node) -> Axes | None:
    return _weighted(graph, node, groups=_argument(node, 6, "groups", 1), into=0, out=1)


def _weighted(graph: Dependencies, node: Node, groups: int, into: int, out: int) -> Axes | None:
    x, weight, bias = _node(node.args[0]), _node(node.args[1]), _argument(node, 2, "bias", None)
    axes, shape = graph.axes(x), _shape(weight)
    if len(axes) != len(shape) or weight.name not in graph.names:
        return None
    for dim in range(2, len(shape)):
        fix(axes[dim])
        graph.bind(weight, dim, None)
    depthwise = groups == shape[0] == _shape(x)[1] and shape[1] == 1
    if groups > 1 and not depthwise:
        return None
    if depthwise:
        graph.bind(weight, 1, None)
        through = graph.bind(weight, 0, axes[1])
    else:
        graph.bind(weight, into, axes[1])
        through = graph.axes(weight)[out]
    return [axes[0], graph.bind(bias, 0, through), *[None] * (len(axes) - 2)]


def _linear(graph: Dependencies, node: Node) -> Axes | None:
    x, weight, bias = _node(node.args[0]), _node(node.args[1]), _argument(node, 2, "bias", None)
    if weight.name not in graph.names:
        return None
    axes = graph.axes(x)
    graph.bind(weight, 1, axes[-1])
    return [*axes[:-1], graph.bind(bias, 0, graph.axes(weight)[0])]


def _batch_norm(graph: Dependencies, node: Node) -> Axes:
    axes = graph.axes(_node(node.args[0]))
    for each in node.args[1:5]:
        axes[1] = graph.bind(each, 0, axes[1])
    return axes


def _layer_norm(graph: Dependencies, node: Node) -> Axes:
    """Moments are over the last dimensions, which therefore stay."""
    axes, last = graph.axes(_node(node.args[0])), len(node.args[1])  # type: ignore[arg-type]
    for axis in axes[-last:]:
        fix(axis)
    return [*axes[:-last], *[None] * last]


def _embedding(graph: Dependencies, node: Node) -> Axes:
    weight = _node(node.args[0])
    fix(graph.axes(weight)[0])
    return [*graph.axes(_node(node.args[1])), graph.axes(weight)[1]]


def _reduced(graph: Dependencies, node: Node) -> Axes | None:
    dims: Any = node.args[1] if len(node.args) > 1 else None
    if not isinstance(dims, (list, tuple)):
        return None
    axes = graph.axes(_node(node.args[0]))
    gone = {dim % len(axes) for dim in dims}
    for dim in gone:
        fix(axes[dim])
    if _argument(node, 2, "keepdim", False):
        return [None if dim in gone else axis for dim, axis in enumerate(axes)]
    return [axis for dim, axis in enumerate(axes) if dim not in gone]


def _permuted(graph: Dependencies, node: Node) -> Axes:
    axes = graph.axes(_node(node.args[0]))
    order: Any = node.args[1]
    return [axes[dim] for dim in order]


def _transpose(graph: Dependencies, node: Node) -> Axes:
    axes = graph.axes(_node(node.args[0]))
    dims: Any = node.args[1:3]
    one, other = (dim % len(axes) for dim in dims)
    axes[one], axes[other] = axes[other], axes[one]
    return axes


def _joined(graph: Dependencies, node: Node) -> Axes:
    parts: Any = node.args[0]
    axes = [graph.axes(each) for each in parts]
    dim = _argument(node, 1, "dim", 0) % len(axes[0])
    found: Axes = []
    for each in range(len(axes[0])):
        along = [part[each] for part in axes]
        if each == dim:
            found.append(_chained(along, [_shape(part)[dim] for part in parts]))
        else:
            first = along[0]
            for other in along[1:]:
                first = unite(first, other)
            found.append(first)
    return found


def _chained(axes: Sequence[Axis], sizes: Sequence[int]) -> Axis:
    """One after the other; a part that may not change is channels that stay."""
    found: list[Segment] = []
    for axis, size in zip(axes, sizes, strict=True):
        found += axis if axis is not None else [Segment(Channels(size, fixed=True))]
    return tuple(found)


def _cut(graph: Dependencies, node: Node) -> Any:
    """Slices and parts: dimensions that keep their size go on."""
    axes, shape = graph.axes(_node(node.args[0])), _shape(_node(node.args[0]))
    value = node.meta["val"]
    parts = [value] if isinstance(value, torch.Tensor) else list(value)
    if any(part.dim() != len(shape) for part in parts):
        return None
    kept = [all(part.shape[dim] == size for part in parts) for dim, size in enumerate(shape)]
    for axis, stays in zip(axes, kept, strict=True):
        if not stays:
            fix(axis)
    found = [axis if stays else None for axis, stays in zip(axes, kept, strict=True)]
    return found if isinstance(value, torch.Tensor) else [list(found) for _ in parts]


def _reshaped(graph: Dependencies, node: Node) -> Axes:
    """Dimensions that stay go on; one that takes in others behind it has several elements a channel."""
    axes, shape, new = graph.axes(_node(node.args[0])), _shape(_node(node.args[0])), _shape(node)
    found: Axes = []
    i = 0
    for size in new:
        if size == 1:
            found.append(None)
            continue
        while i < len(shape) and shape[i] == 1:
            i += 1
        first, product = i, 1
        while i < len(shape) and product < size:
            product *= shape[i]
            i += 1
        if product != size:
            break
        for other in axes[first + 1 : i]:
            fix(other)
        inner = product // shape[first]
        found.append(tuple(Segment(each.channels, each.inner * inner) for each in axes[first] or ()) or None)
    else:
        return found
    return _after_break(axes, shape, new)


def _after_break(axes: Axes, shape: Sequence[int], new: Sequence[int]) -> Axes:
    """Where dimensions are cut up: equal ones at the front go on, the others stay as they are."""
    front = 0
    while front < min(len(shape), len(new)) and shape[front] == new[front]:
        front += 1
    for axis in axes[front:]:
        fix(axis)
    return [*axes[:front], *[None] * (len(new) - front)]


def _node(value: Any) -> Node:
    found: Node = value
    return found


def _argument(node: Node, place: int, name: str, default: Any) -> Any:
    return node.args[place] if len(node.args) > place else node.kwargs.get(name, default)


_RULES: dict[str, Callable[[Dependencies, Node], Any]] = {
    **dict.fromkeys(_SAME, _same),
    **dict.fromkeys(_PAIRS, _pair),
    **dict.fromkeys(_POOLS, _pool),
    **dict.fromkeys(_SHAPES, _reshaped),
    **dict.fromkeys(_CONVOLUTIONS, _convolution),
    **dict.fromkeys(_TRANSPOSED, _transposed),
    **dict.fromkeys(("mean", "sum", "amax"), _reduced),
    **dict.fromkeys(("slice", "narrow", "split", "split_with_sizes", "chunk"), _cut),
    "linear": _linear,
    "batch_norm": _batch_norm,
    "layer_norm": _layer_norm,
    "embedding": _embedding,
    "permute": _permuted,
    "transpose": _transpose,
    "cat": _joined,
}

"""The first layers of a graph that torch.compile found, worked in slices of the batch before the rest."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from typing import Any, cast

import torch
from torch import fx
from torch.utils._pytree import tree_leaves

from squeezebox.capture._region import CHAINED, CONVOLUTIONS, POOLINGS, chain_of, deferred
from squeezebox.capture._slices import Sliced


class FirstLayers:
    """A graph cut behind its first layers, up to a pooling.

    Attributes:
        rest: the graph without them, whose last input is their result.
    """

    def __init__(self, graph: fx.GraphModule, layers: Sequence[fx.Node]) -> None:
        own = set(layers)
        self._layers, self._result = layers, layers[-1].meta["example_value"]
        self._given = [node for node in graph.graph.nodes if node.op == "placeholder"]
        self._read = [node for node in self._given if not own.issuperset(node.users)]
        rest = fx.Graph()
        copies = {node: rest.node_copy(node) for node in self._read}
        copies[layers[-1]] = rest.placeholder("first_layers")
        copies[layers[-1]].meta = {"example_value": self._result}
        for node in graph.graph.nodes:
            if node not in own and node.op != "placeholder":
                copies[node] = rest.node_copy(node, copies.__getitem__)
        self.rest = fx.GraphModule(graph, rest)

    def inputs(self, given: Sequence[Any]) -> list[Any]:
        """Of the rest, for these of the graph; the layers' result is a fake tensor."""
        values, form = dict(zip(self._given, given, strict=True)), self._result
        with form.fake_mode:
            result = torch.empty_strided(form.shape, form.stride(), dtype=form.dtype, device=form.device)
        return [*(values[node] for node in self._read), result.requires_grad_()]

    def before(self, compiled: Callable[..., Any], slices: int) -> Callable[..., Any]:
        """The graph's function, with the rest as it is compiled."""

        def run(*given: Any) -> Any:
            values = dict(zip(self._given, given, strict=True))
            calls = [deferred(node.target, *self._arguments(node, values), "") for node in self._layers]
            chain, tensors = chain_of(calls)
            image: Any = self._layers[0].args[0]
            x = values[image]
            result: torch.Tensor = Sliced.apply(chain, min(slices, len(x)), x, *tensors)  # type: ignore[no-untyped-call]
            if result.stride() != self._result.stride():  # which the rest is compiled for
                result = result.new_empty_strided(result.shape, self._result.stride()).copy_(result)
            return compiled(*(values[node] for node in self._read), result)

        return run

    def _arguments(self, node: fx.Node, values: dict[fx.Node, Any]) -> tuple[Any, Any]:
        args, kwargs = fx.map_arg((node.args[1:], node.kwargs), values.__getitem__)
        return (None, *args), dict(kwargs)


def first_layers(graph: fx.GraphModule) -> FirstLayers | None:
    """The graph cut behind the first pooling of a batch; None where there is none that slices could reach."""
    read, layers = set[fx.Node](), list[fx.Node]()
    for node in graph.graph.nodes:  # what others have read before might have been changed in place
        if node.op == "call_function" and (_continues(node, layers[-1]) if layers else _begins(node)):
            if not _is_given(node, read, is_first=not layers):
                return None
            layers.append(node)
            if node.target in POOLINGS:
                return FirstLayers(graph, layers)
        elif layers and layers[-1] in node.all_input_nodes:
            return None
        else:
            read.update(node.all_input_nodes)
    return None


def _begins(node: fx.Node) -> bool:
    image = node.args[0] if node.target in CONVOLUTIONS else None
    if not isinstance(image, fx.Node) or image.op != "placeholder":
        return False
    x: Any = image.meta["example_value"]
    is_batch = x.dim() == CONVOLUTIONS[cast(Any, node.target)] and x.dtype in (torch.float32, torch.float64)
    return is_batch and len(x) > 0 and not x.requires_grad and _derives(node, x.dtype)


def _continues(node: fx.Node, before: fx.Node) -> bool:
    is_next = node.target in CHAINED and bool(node.args) and node.args[0] is before
    return is_next and len(before.users) == 1 and _derives(node, before.meta["example_value"].dtype)


def _derives(node: fx.Node, dtype: torch.dtype) -> bool:
    """Whether its result is a tensor of this type, with a gradient; autocast would change the type."""
    value = node.meta.get("example_value")
    return isinstance(value, torch.Tensor) and value.dtype == dtype and value.requires_grad


def _is_given(node: fx.Node, read: Container[fx.Node], *, is_first: bool) -> bool:
    """Whether all that it reads, but the layer before, are inputs of the graph that nobody has read yet."""
    others = tree_leaves((node.args[1 - is_first :], node.kwargs))
    return all(each.op == "placeholder" and each not in read for each in others if isinstance(each, fx.Node))

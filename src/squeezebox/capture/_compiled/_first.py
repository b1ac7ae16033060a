"""The first layers of a graph that torch.compile found, worked in slices of the batch before the rest."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
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
    layers = list[fx.Node]()
    for node in _chain(graph.graph):
        layers.append(node)
        if node.target in POOLINGS:
            return FirstLayers(graph, layers)
    return None


def _chain(graph: fx.Graph) -> Iterator[fx.Node]:
    """From a convolution of an input without gradient, the calls that each alone read the one before."""
    node = next((node for node in graph.nodes if _begins(node)), None)
    while node is not None:
        yield node
        follows = list(node.users) if len(node.users) == 1 else []
        node = next((user for user in follows if _continues(user, node)), None)


def _begins(node: fx.Node) -> bool:
    image = node.args[0] if node.target in CONVOLUTIONS else None
    if not isinstance(image, fx.Node) or image.op != "placeholder":
        return False
    x: Any = image.meta["example_value"]
    dims = CONVOLUTIONS[cast(Any, node.target)]
    return x.dim() == dims and not x.requires_grad and _derives(node, x.dtype)


def _continues(node: fx.Node, before: fx.Node) -> bool:
    values = [each for each in tree_leaves((node.args, node.kwargs)) if each is before]
    follows = node.target in CHAINED and node.args[0] is before and len(values) == 1
    return follows and _derives(node, before.meta["example_value"].dtype)


def _derives(node: fx.Node, dtype: torch.dtype) -> bool:
    """Whether its result is a tensor of this type, with a gradient; autocast would change the type."""
    value = node.meta.get("example_value")
    return isinstance(value, torch.Tensor) and value.dtype == dtype and value.requires_grad

"""A graph network's modules, as stages that are taken part by part."""

from __future__ import annotations

import copy
import inspect
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from squeezebox.schema import OptionError, SqueezeboxError, UnsupportedModelError
from squeezebox.streaming._held import held_by
from squeezebox.streaming._nodes import Edges, Graph, Part, kind_of, sorted_edges
from squeezebox.streaming._rows import is_narrow

_PROBE_NODES = 12


@dataclass(frozen=True, slots=True)
class Stage:
    """A layer that reads neighbours, if any, and the modules behind it that take each node by itself."""

    layer: nn.Module | None
    rowwise: tuple[nn.Module, ...]

    def __call__(self, part: Part, x: Tensor) -> Tensor:
        dtype = x.dtype
        if self.layer is not None:
            weights = {"edge_weight": part.weights} if self.takes_weights else {}
            x = self.layer(x, part.edges, **weights)[: part.stop - part.start]
        for module in self.rowwise:
            x = module(x)
        if getattr(x, "dtype", dtype) != dtype:
            raise UnsupportedModelError(
                f"layers give {x.dtype} for rows of {dtype}, and what they hand on is kept in one precision. "
                "Leave torch.autocast out."
            )
        return x

    def reads(self, part: Part) -> np.ndarray:
        """The nodes whose rows it needs."""
        return part.own if self.layer is None else np.concatenate([part.own, part.others])

    @property
    def takes_weights(self) -> bool:
        """Whether its layer takes edges' weights."""
        return self.layer is not None and "edge_weight" in inspect.signature(self.layer.forward).parameters

    @property
    def modules(self) -> tuple[nn.Module, ...]:
        """All of them."""
        return (*self.rowwise, *(() if self.layer is None else (self.layer,)))

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Those that are trained, each once."""
        found = {id(p): p for module in self.modules for p in module.parameters() if p.requires_grad}
        return list(found.values())


def modes_of(stages: list[Stage]) -> tuple[tuple[bool, ...], dict[str, str]]:
    """Which modules, and modules of these, are in training, and the plain values that they hold by name."""
    own = [module for stage in stages for module in stage.modules]
    plain = {name: value for name, value in held_by(own, ()).values.items() if "tensor " not in value}
    return tuple(each.training for module in own for each in module.modules()), plain


def leaves_below(output: Tensor) -> list[Tensor]:
    """The tensors that a gradient by the output goes to, each once, in the order in which it finds them."""
    found: dict[int, Tensor] = {}
    known, waiting = set[Any](), [output.grad_fn]
    while waiting:
        node: Any = waiting.pop()
        if node is None or node in known:
            continue
        known.add(node)
        if hasattr(node, "variable"):
            found[id(node.variable)] = node.variable
        waiting.extend(following for following, _ in node.next_functions)
    return list(found.values())


def stages_of(modules: list[nn.Module]) -> list[Stage]:
    """The modules in order, one stage for each layer with what follows it."""
    stages: list[Stage] = []
    for module in modules:
        if _reads_edges(module):
            stages.append(Stage(module, ()))
        elif stages:
            stages[-1] = Stage(stages[-1].layer, (*stages[-1].rowwise, module))
        else:
            stages.append(Stage(None, (module,)))
    return stages


def require_trained(stages: list[Stage], graph: Graph) -> None:
    """Raises where nothing is trained, or not on the CPU, or the graph's weights are nobody's."""
    devices = {str(p.device) for stage in stages for p in stage.parameters}
    if not devices:
        raise UnsupportedModelError("the model has no parameter that is trained; there is nothing to step.")
    if devices != {"cpu"}:
        raise UnsupportedModelError(
            f"the model is on {max(devices)}, and a graph's parts are computed on the CPU; call model.cpu()."
        )
    dtype = next(p.dtype for stage in stages for p in stage.parameters)
    for name, values in (("features", graph.features), ("weights", graph.weights)):
        if isinstance(values, Tensor) and values.requires_grad:
            raise OptionError(
                f"the graph's {name} require a gradient, and there is none by them; give {name}.detach()."
            )
    given = dtype if graph.weights is None else kind_of(graph.weights)
    if torch.promote_types(dtype, given) != dtype:
        raise OptionError(
            f"the graph's weights are {given}, and the model's parameters {dtype}, so layers would hand on "
            f"{given}; give weights of {dtype}."
        )
    narrow = [p.dtype for stage in stages for p in stage.parameters if is_narrow(p)]
    if narrow:
        raise UnsupportedModelError(
            f"the model has parameters of {narrow[0]}; call model.float(), which adds parts up more exactly."
        )
    if graph.weights is not None and not any(stage.takes_weights for stage in stages):
        raise OptionError("the graph has weights, but no layer takes edge_weight; leave weights= out.")


def widths_of(stages: list[Stage], graph: Graph, dtype: torch.dtype) -> list[int]:
    """How wide each stage's output is, by trying it on a small graph.

    Raises:
        UnsupportedModelError: a module's output is another one in parts than whole.
        OptionError: a module fails on rows as wide as the features, or as what comes before it gives.
    """
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        few = _probe(graph, dtype)
        edges = sorted_edges(few)
        x, widths = few.features, []
        for number, stage in enumerate(stages):
            for place, tried in enumerate(_apart(stage)):
                try:
                    x = _require_local(copy.deepcopy(tried), edges, x, is_first=number > 0 and place == 0)
                except RuntimeError as error:
                    if isinstance(error, SqueezeboxError):
                        raise
                    raise _failing(tried, x, graph, error) from error
            widths.append(x.shape[1])
    return widths


def _failing(tried: Stage, x: Tensor, graph: Graph, error: RuntimeError) -> OptionError:
    module = tried.rowwise[0] if tried.layer is None else tried.layer
    return OptionError(
        f"{type(module).__name__} fails on rows of {x.shape[1]:,} numbers, with features of "
        f"{graph.features.shape[0]:,} x {graph.features.shape[1]:,}. Give it as many inputs. It was tried "
        f"on {len(x)} rows: {error}"
    )


def _apart(stage: Stage) -> list[Stage]:
    """Its modules one by one."""
    alone = [Stage(None, (module,)) for module in stage.rowwise]
    return alone if stage.layer is None else [Stage(stage.layer, ()), *alone]


def _reads_edges(module: nn.Module) -> bool:
    taken = [
        each
        for each in inspect.signature(module.forward).parameters.values()
        if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)
    ]
    return len(taken) > 1 and (taken[1].name == "edge_index" or taken[1].default is inspect.Parameter.empty)


def _probe(graph: Graph, dtype: torch.dtype) -> Graph:
    """A small graph with an isolated node, a self-loop, and nodes of unequal degrees."""
    edges = torch.randint(_PROBE_NODES - 1, (2, 4 * _PROBE_NODES))
    weights = None if graph.weights is None else torch.rand(edges.shape[1] + 1).to(kind_of(graph.weights))
    return Graph(
        features=torch.randn(_PROBE_NODES, graph.features.shape[1], dtype=dtype),
        edges=torch.cat([edges, torch.zeros(2, 1, dtype=torch.int64)], 1),
        targets=None,
        weights=weights,
    )


@torch.no_grad()
def _require_local(stage: Stage, edges: Edges, x: Tensor, is_first: bool) -> Tensor:
    """Its output, which has to be the same in parts; the first of a later stage may not change its input."""
    given = x.clone()
    whole = stage(edges.part(0, edges.count), given)
    if is_first and not torch.equal(given, x):
        module = stage.rowwise[0] if stage.layer is None else stage.layer
        raise UnsupportedModelError(
            f"{type(module).__name__} changes its input in place, and there is a gradient by that; have it "
            "make a new tensor, as x.relu() does, and not x.relu_()."
        )
    parts = [edges.part(*cut) for cut in ((0, 3), (3, 5), (5, edges.count))]
    apart = [stage(part, x[torch.from_numpy(stage.reads(part))]) for part in parts]
    shapes = all(isinstance(each, Tensor) and each.ndim == 2 for each in (whole, *apart))
    tolerance = 1e-9 if x.dtype == torch.float64 else 1e-3
    if not shapes or not torch.allclose(torch.cat(apart), whole, rtol=tolerance, atol=tolerance):
        module = stage.rowwise[0] if stage.layer is None else stage.layer
        raise UnsupportedModelError(
            f"{type(module).__name__} gives other outputs for parts of a graph than for all of it: it reads "
            "more than a node and the edges that end at it, or draws noise. Put dropout and batch "
            "normalisation into eval(). Where a layer takes degrees from the edges, give Graph(weights=) and "
            "let it use those."
        )
    return whole

"""A training step on a whole graph, part by part."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from squeezebox.memory import PeakMeter, mapped_file, usual_folder, within_room
from squeezebox.reports import human_bytes, parse_size
from squeezebox.schema import BudgetError, OptionError, UnsupportedModelError
from squeezebox.streaming._nodes import Edges, Graph, Part, rows_of

_PROBE_NODES = 12


@dataclass(frozen=True, slots=True)
class _Stage:
    """A layer that reads neighbours, if any, and the modules behind it that take each node by itself."""

    layer: nn.Module | None
    rowwise: tuple[nn.Module, ...]

    def __call__(self, part: Part, x: Tensor) -> Tensor:
        if self.layer is not None:
            weights = {"edge_weight": part.weights} if _takes_weights(self.layer) else {}
            x = self.layer(x, part.edges, **weights)[: part.stop - part.start]
        for module in self.rowwise:
            x = module(x)
        return x

    def reads(self, part: Part) -> np.ndarray:
        """The nodes whose rows it needs."""
        return part.read if self.layer is not None else part.read[: part.stop - part.start]

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Those that are trained, each once."""
        modules = (*self.rowwise, *(() if self.layer is None else (self.layer,)))
        found = {id(p): p for module in modules for p in module.parameters() if p.requires_grad}
        return list(found.values())


class GraphStep:
    """Loss and gradients of a graph network on all of its graph, computed part by part.

    ``step()`` adds to the parameters' gradients what backward of the mean of ``loss_fn(outputs, targets)``
    would, up to the order of summation (1e-12 in float64), and returns that mean. A part is an interval of
    nodes with all edges that end at them. Each layer goes over the parts, reads the rows of a part's nodes
    and of their neighbours, and writes the part's outputs to a temporary file. Backward goes over layers and
    parts again in the opposite order, and runs each once more.

    Gradients are added when the step is complete: an exception leaves them as they were. Hooks on parameters
    are not called.

    Args:
        model: the modules in order, such as an nn.Sequential or a list. Those whose forward takes a second
            argument get ``(x, edge_index)``, and ``edge_weight=`` if they name it, as layers of
            torch_geometric do; the others get ``x``. A node's output may depend on that node and on edges
            that end at it: a small graph is tried, and a layer that reads more is refused.
        graph: features, edges and targets. Edges are held in memory, beyond ``memory``.
        memory: bytes that a step's tensors may take in addition to edges, model and gradients, such as
            "2GiB".
        loss_fn: ``loss_fn(outputs, targets)`` gives a number for each node: torch's with
            ``reduction="none"``. Cross entropy by default.
        folder: where outputs and their gradients are kept between layers, in a file without a name. By
            default a temporary folder on a disk.

    Raises:
        OptionError: memory is not a size, or edges, nodes, targets or weights do not fit the features.
        UnsupportedModelError: a module draws noise, or reads more than a node and its edges.
        BudgetError: one node with its edges takes more than the memory.
    """

    def __init__(
        self,
        model: Iterable[nn.Module],
        graph: Graph,
        memory: int | str,
        *,
        loss_fn: Callable[[Tensor, Tensor], Tensor] | None = None,
        folder: str | Path | None = None,
    ) -> None:
        self._graph, self._memory_bytes = graph, parse_size("memory", memory)
        self._loss_fn = loss_fn or nn.CrossEntropyLoss(reduction="none")
        self._folder = Path(usual_folder().path if folder is None else folder)
        self._stages = _stages(list(model))
        if not any(stage.parameters for stage in self._stages):
            raise UnsupportedModelError(
                "the model has no parameter that is trained; there is nothing to step."
            )
        if graph.weights is not None and not any(
            stage.layer is not None and _takes_weights(stage.layer) for stage in self._stages
        ):
            raise OptionError("the graph has weights, but no layer takes edge_weight; leave weights= out.")
        self._dtype = next(p.dtype for stage in self._stages for p in stage.parameters)
        self._edges = Edges(graph)
        self._counts = np.ones(self._edges.count, bool)
        if graph.nodes is not None:
            self._counts = np.zeros(self._edges.count, bool)
            self._counts[np.asarray(graph.nodes)] = True
        self._require_local()
        self._cuts = self._fitting_cuts()

    @property
    def parts(self) -> int:
        """How many parts the graph is cut into."""
        return len(self._cuts)

    @within_room("a step on a graph in parts")
    def __call__(self) -> Tensor:
        """One step.

        Returns:
            The loss's mean over the graph's ``nodes``.

        Raises:
            OutputError: the folder cannot be written to, or its disk has not enough room.
            DatasetError: the features' file has become shorter.
            OptionError: the loss does not give a number for each node.
        """
        store = _Rows(self._folder, self._edges.count, self._widths, self._dtype)
        sums: dict[nn.Parameter, Tensor] = {}
        for number in range(len(self._stages) - 1):
            for part in self._parts():
                with torch.no_grad():
                    store.values[number][part.start : part.stop] = self._output(number, part, store)[
                        1
                    ].numpy()
        loss = torch.zeros((), dtype=torch.float64)
        for number in reversed(range(len(self._stages))):
            for part in self._parts():
                loss += self._backward(number, part, store, sums)
        for parameter, gradient in sums.items():
            parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
        return loss.to(self._dtype)

    @within_room("a prediction on a graph in parts")
    @torch.no_grad()
    def predict(self, out: np.ndarray) -> np.ndarray:
        """The model's output for every node, written to ``out``: an array of nodes x outputs.

        Raises:
            OutputError, DatasetError: as in a step.
        """
        store = _Rows(self._folder, self._edges.count, self._widths, self._dtype)
        for number in range(len(self._stages)):
            onto = out if number == len(self._stages) - 1 else store.values[number]
            for part in self._parts():
                onto[part.start : part.stop] = self._output(number, part, store)[1].numpy()
        return out

    def _parts(self) -> Iterable[Part]:
        return (self._edges.part(*cut) for cut in self._cuts)

    def _output(self, number: int, part: Part, store: _Rows) -> tuple[Tensor, Tensor]:
        """What a stage reads, and what it makes of it."""
        stage = self._stages[number]
        below = self._graph.features if number == 0 else store.values[number - 1]
        x = rows_of(below, stage.reads(part)).to(self._dtype)
        x.requires_grad_(torch.is_grad_enabled() and number > 0)
        return x, stage(part, x)

    def _backward(self, number: int, part: Part, store: _Rows, sums: dict[nn.Parameter, Tensor]) -> Tensor:
        """Add a stage's gradients over a part; the last stage gives the part's share of the loss."""
        stage, parameters = self._stages[number], self._stages[number].parameters
        with torch.enable_grad():
            x, output = self._output(number, part, store)
            share = torch.zeros((), dtype=torch.float64)
            gradient = None
            if number == len(self._stages) - 1:
                output = self._loss(part, output)
                share = output.detach().double()
            else:
                gradient = torch.from_numpy(store.gradients[number][part.start : part.stop])
            wanted = [*parameters, *([x] if number else [])]
            if not output.requires_grad:
                return share
            found = list(torch.autograd.grad(output, wanted, gradient, allow_unused=True))
        if number and (below := found.pop()) is not None:
            store.gradients[number - 1][stage.reads(part)] += below.numpy()
        for parameter, each in zip(parameters, found, strict=True):
            if each is not None:
                sums[parameter] = each if parameter not in sums else sums[parameter] + each
        return share

    def _loss(self, part: Part, output: Tensor) -> Tensor:
        counts = self._counts[part.start : part.stop]
        targets = rows_of(self._graph.targets, np.arange(part.start, part.stop)[counts])
        output = output[torch.from_numpy(counts)]
        losses = self._loss_fn(output, targets)
        if losses.shape[:1] != output.shape[:1]:
            raise OptionError(
                f"loss_fn gives the shape {tuple(losses.shape)} for {len(output):,} nodes; give one with a "
                'number for each node, such as torch\'s with reduction="none".'
            )
        size = losses[0].numel() if len(losses) else 1
        return losses.sum() / (size * int(self._counts.sum()))

    def _require_local(self) -> None:
        """Try every stage on a small graph, whole and in parts, and note how wide its output is."""
        with torch.random.fork_rng([]):
            torch.manual_seed(0)
            few = _probe(self._graph, self._dtype)
            edges = Edges(few)
            x = few.features
            self._widths: list[int] = []
            for stage in self._stages:
                for tried in _apart(stage):
                    x = _require_local(copy.deepcopy(tried), edges, x)
                self._widths.append(x.shape[1])

    def _fitting_cuts(self) -> list[tuple[int, int]]:
        """Parts that stay within the memory: those with most edges and that read most rows are measured."""
        parts = 1
        while True:
            cuts = self._edges.cuts(parts)
            start, stop = max(cuts, key=lambda cut: self._guess(*cut))
            peak = self._guess(start, stop)
            if peak <= self._memory_bytes:
                peak = self._measured(self._edges.part(start, stop))
            if peak <= self._memory_bytes:
                most = max((self._edges.part(*cut) for cut in cuts), key=lambda part: len(part.read))
                start, stop, peak = most.start, most.stop, max(peak, self._measured(most))
            if peak <= self._memory_bytes:
                return cuts
            if stop - start == 1:
                raise BudgetError(
                    f"node {start:,} with its edges takes {human_bytes(peak)}, and memory= is "
                    f"{human_bytes(self._memory_bytes)}. Give at least that."
                )
            parts *= 2

    def _guess(self, start: int, stop: int) -> int:
        """Bytes that a part takes at least: its edges, and its nodes' inputs and outputs."""
        edges = int(self._edges.ends[stop] - self._edges.ends[start])
        width = self._graph.features.shape[1] + self._widths[0]
        return int(16 * edges + (stop - start) * width * self._dtype.itemsize)

    def _measured(self, part: Part) -> int:
        """The peak of a part, over all stages and the loss, with made-up rows."""
        peak, width = 0, self._graph.features.shape[1]
        for stage, wider in zip(self._stages, self._widths, strict=True):
            meter = PeakMeter(torch.device("cpu"))
            if not meter.start():
                raise OptionError("torch's profiler is active, so parts cannot be measured; leave it first.")
            try:
                x = torch.ones(len(stage.reads(part)), width, dtype=self._dtype, requires_grad=True)
                output = stage(part, x)
                output = self._loss(part, output) if stage is self._stages[-1] else output.sum()
                torch.autograd.grad(output, [*stage.parameters, x], allow_unused=True)
            finally:
                peak = max(peak, meter.stop(()).total_bytes)
            width = wider
        return peak + part.edges.nbytes + part.read.nbytes


class _Rows:
    """Outputs of all stages but the last, and their gradients, in a mapped file without a name.

    Raises:
        OutputError: the folder is missing or not writable, or the disk has not enough room.
    """

    def __init__(self, folder: Path, count: int, widths: list[int], dtype: torch.dtype) -> None:
        sizes = [count * width * dtype.itemsize for width in widths[:-1]]
        mapped = mapped_file(folder, 2 * sum(sizes), "layers' outputs and their gradients")
        self.values: list[np.ndarray] = []
        self.gradients: list[np.ndarray] = []
        kind, at = torch.empty(0, dtype=dtype).numpy().dtype, 0
        for rows in (self.values, self.gradients):
            for size, width in zip(sizes, widths[:-1], strict=True):
                rows.append(mapped[at : at + size].view(kind).reshape(count, width))
                at += size


def _stages(modules: list[nn.Module]) -> list[_Stage]:
    stages: list[_Stage] = []
    for module in modules:
        if _reads_edges(module):
            stages.append(_Stage(module, ()))
        elif stages:
            stages[-1] = _Stage(stages[-1].layer, (*stages[-1].rowwise, module))
        else:
            stages.append(_Stage(None, (module,)))
    return stages


def _apart(stage: _Stage) -> list[_Stage]:
    """Its modules one by one."""
    alone = [_Stage(None, (module,)) for module in stage.rowwise]
    return alone if stage.layer is None else [_Stage(stage.layer, ()), *alone]


def _reads_edges(module: nn.Module) -> bool:
    taken = [
        each
        for each in inspect.signature(module.forward).parameters.values()
        if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)
    ]
    return len(taken) > 1 and (taken[1].name == "edge_index" or taken[1].default is inspect.Parameter.empty)


def _takes_weights(module: nn.Module) -> bool:
    return "edge_weight" in inspect.signature(module.forward).parameters


def _probe(graph: Graph, dtype: torch.dtype) -> Graph:
    """A small graph with an isolated node, a self-loop, and nodes of unequal degrees."""
    edges = torch.randint(_PROBE_NODES - 1, (2, 4 * _PROBE_NODES))
    weights = None if graph.weights is None else torch.rand(edges.shape[1] + 1).to(_kind(graph.weights))
    return Graph(
        features=torch.randn(_PROBE_NODES, graph.features.shape[1], dtype=dtype),
        edges=torch.cat([edges, torch.zeros(2, 1, dtype=torch.int64)], 1),
        targets=None,
        weights=weights,
    )


def _kind(values: Any) -> torch.dtype:
    return values.dtype if isinstance(values, Tensor) else torch.as_tensor(np.asarray(values)[:0]).dtype


@torch.no_grad()
def _require_local(stage: _Stage, edges: Edges, x: Tensor) -> Tensor:
    """Its output, which has to be the same in parts."""
    whole = stage(edges.part(0, edges.count), x)
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

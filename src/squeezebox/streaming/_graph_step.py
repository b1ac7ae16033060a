"""A training step on a whole graph, part by part."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, MutableMapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from squeezebox.memory import Ceiling, PeakMeter, ProcessMeter, return_all, usual_folder, within_room
from squeezebox.reports import human_bytes, parse_size
from squeezebox.schema import BudgetError, OptionError
from squeezebox.streaming._boundary import Boundary, Features, PartFile
from squeezebox.streaming._files import release
from squeezebox.streaming._given import require_modes
from squeezebox.streaming._graph_layers import leaves_below, modes_of, require_trained, stages_of, widths_of
from squeezebox.streaming._held import modules_of
from squeezebox.streaming._nodes import Graph, Part, Reader, edges_of, kind_of, order_of, sorted_edges
from squeezebox.streaming._order import better_order
from squeezebox.streaming._outputs import require_apart
from squeezebox.streaming._ranks import Exchange, Ranks

Sums = MutableMapping[Tensor, Tensor]
"""Gradients by what they are of; a leaf that the loss makes for one part goes with that part."""

_OWN_BYTES = 32 << 20  # what torch takes for itself, and not for a part
_MESSAGES = 32  # of the memory, one by so much for rows on their way to other ranks; four while they travel
_FIRST = 1 / 32  # of the memory: what the part that is measured first should at most take


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
        memory: bytes by which a step may grow the process, within 32 MiB, in addition to gradients, such as
            "2GiB".
        loss_fn: ``loss_fn(outputs, targets)`` gives a number for each node: torch's with
            ``reduction="none"``. Cross entropy by default.
        order: the nodes in the order in which parts take them: all their numbers. By default the one that is
            given, or another one where its parts read a tenth fewer rows of other parts.
        group: a process group whose ranks share the nodes, an interval of them in order each. All give the
            same model and graph, and get the loss and gradients of the whole. Features are read where they
            are; outputs that edges of other ranks begin at are sent, and their gradients sent back.
        message_bits: 2 to 8, sends both in 2, 4 or 8 bits an element, with this average, rounded at random:
            then gradients have noise, but no bias. By default they are sent as they are.
        folder: where outputs, or their gradients, and copies of features are kept, in files without a name.
            By default a temporary folder on a disk.

    Raises:
        OptionError: memory is not a size, or edges, nodes, targets or weights do not fit the features.
        UnsupportedModelError: a module draws noise, reads more than a node and its edges, or is on a GPU.
        BudgetError: one node with its edges takes more than the memory.
        OutputError: the folder cannot be written to, or its disk has not enough room.
    """

    def __init__(
        self,
        model: Iterable[nn.Module],
        graph: Graph,
        memory: int | str,
        *,
        loss_fn: Callable[[Tensor, Tensor], Tensor] | None = None,
        order: Any = None,
        group: Any = None,
        message_bits: float | None = None,
        folder: str | Path | None = None,
    ) -> None:
        require_modes()
        self._graph, self._memory_bytes = graph, parse_size("memory", memory)
        self._loss_fn = loss_fn or nn.CrossEntropyLoss(reduction="none")
        self._folder = Path(usual_folder().path if folder is None else folder)
        self._stages = stages_of(list(model))
        require_trained(self._stages, graph)
        self._dtype = next(p.dtype for stage in self._stages for p in stage.parameters)
        self._widths = widths_of(self._stages, graph, self._dtype)
        self._tried = dict([modes_of(self._stages)])
        self._ranks = None if group is None else Ranks(group, message_bits)
        self._number(None if order is None else order_of(order, graph))
        self._cuts, self._part_bytes = self._fitting_cuts()
        parts = (
            len(self._cuts) if self._ranks is None else self._ranks.count * self._ranks.most(len(self._cuts))
        )
        if order is None and parts > 1:
            better = better_order(edges_of(graph), int(graph.features.shape[0]), parts)
            if better is not None:
                self._number(better)
                self._cuts, self._part_bytes = self._fitting_cuts()
        came = [] if self._exchange is None else self._exchange.came
        self._boundary = Boundary(self._edges, self._cuts, came)
        self._marginal = self._marginal_parts()
        self._features = Features(graph.features, self._order, self._boundary, self._folder)
        # What stages hand on; in backward a part's gradients take the place of what it has read there.
        self._between = [
            PartFile(self._boundary, self._folder, width, self._dtype, "layers' outputs")
            for width in self._widths[:-1]
        ]

    def _number(self, order: np.ndarray | None) -> None:
        """Sort edges, and what the loss takes, by the order; on ranks, those of this rank."""
        self._edges, self._order, self._exchange = sorted_edges(self._graph, order), order, None
        counts = np.ones(self._edges.count, bool)
        if self._graph.nodes is not None:
            counts[:] = False
            counts[np.asarray(self._graph.nodes)] = True
        self._counted = int(counts.sum())
        if self._ranks is not None:
            row_bytes = self._ranks.count * max(self._widths) * self._dtype.itemsize
            most = max(-self._ranks.most(-self._memory_bytes) // (_MESSAGES * row_bytes), 1)
            self._exchange = Exchange(self._ranks, self._edges, most)
            self._edges, nodes = self._exchange.edges, self._exchange.nodes
            self._order = nodes if order is None else order[nodes]
        self._counts = counts if self._order is None else counts[self._order]
        self._targets = Reader(self._graph.targets, self._order)

    @property
    def message_bytes(self) -> int:
        """What this rank has sent to others for rows of layers' outputs and their gradients so far."""
        return 0 if self._ranks is None else self._ranks.sent_bytes

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
            OutputError: the file in the folder cannot be read or written.
            DatasetError: the features' file has become shorter, or has changed.
            OptionError: the loss does not give a number for each node.
            UnsupportedModelError: modules are in other modes, or hold other numbers, since, and draw noise or
                read more with these.
        """
        require_modes()
        self._check()
        sums: Sums = WeakTensorKeyDictionary()
        for number in range(len(self._stages) - 1):
            for place, part in self._parts(number, Exchange.forward):
                with torch.no_grad():
                    self._between[number].write(place, self._output(number, place, part)[1])
        loss = torch.zeros((), dtype=torch.float64)
        for number in reversed(range(len(self._stages))):
            for place, part in self._parts(number - 1, Exchange.backward):
                loss += self._backward(number, place, part, sums)
        if self._ranks is not None:
            self._together(loss, sums)
        for parameter, gradient in sums.items():
            parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
        return loss.to(self._dtype)

    @within_room("a prediction on a graph in parts")
    @torch.no_grad()
    def predict(self, out: np.ndarray) -> np.ndarray:
        """The model's output for every node, on ranks every own one, written to ``out``: nodes x outputs.

        Args:
            out: an array of floating point numbers, one row for each of the graph's nodes.

        Returns:
            ``out``.

        Raises:
            OptionError: ``out`` is no such array, or shares memory with the features.
            OutputError, DatasetError, UnsupportedModelError: as in a step.
        """
        self._check()
        self._require_fitting(out)
        for number in range(len(self._stages)):
            for place, part in self._parts(number, Exchange.forward):
                output = self._output(number, place, part)[1]
                if number < len(self._between):
                    self._between[number].write(place, output)
                elif self._order is None:
                    out[part.start : part.stop] = output.numpy()
                else:
                    out[self._order[part.own]] = output.numpy()
                release(out)
        return out

    def _check(self) -> None:
        """Try modules again whose modes or numbers have changed, and look whether features have."""
        modes, numbers = modes_of(self._stages)
        if self._tried.get(modes) != numbers:
            widths_of(self._stages, self._graph, self._dtype)
            self._tried[modes] = numbers
        self._features.require_unchanged()

    def _require_fitting(self, out: Any) -> None:
        shape, kind = (int(self._graph.features.shape[0]), self._widths[-1]), str(self._dtype)[6:]
        wanted = f"an array of {shape[0]:,} x {shape[1]:,} numbers of {kind}"
        if not isinstance(out, np.ndarray):
            raise OptionError(f"out is a {type(out).__name__}; give numpy's, {wanted}.")
        if out.shape != shape or not np.can_cast(kind, out.dtype, "same_kind"):
            raise OptionError(f"out is {out.shape} of {out.dtype}; give {wanted}.")
        if not out.flags.writeable or 0 in out.strides:
            raise OptionError(f"out is read-only, or has one place for several numbers; give {wanted}.")
        require_apart("out", out, [self._graph.features])

    def _together(self, loss: Tensor, sums: Sums) -> None:
        """Add up all ranks' shares; what no rank has a gradient of stays without."""
        ranks: Any = self._ranks
        ranks.add(loss)
        modules = [*(own for stage in self._stages for own in stage.modules), *modules_of(self._loss_fn)]
        known = (each for module in modules for each in module.parameters())
        parameters = [*dict.fromkeys([*known, *sums])]  # each once, in an order that all ranks have
        used = ranks.add(torch.tensor([each in sums for each in parameters], dtype=torch.int64))
        for parameter, count in zip(parameters, used.tolist(), strict=True):
            if count:
                given = sums.get(parameter, torch.zeros_like(parameter))
                sums[parameter] = ranks.add(given.contiguous())

    def _parts(
        self, number: int, exchange: Callable[[Exchange, PartFile], None]
    ) -> Iterator[tuple[int, Part]]:
        """All parts; then rows between the stages of this number are exchanged, if there are such.

        Those that other ranks read of, or that read of these, are first, and their messages travel in a
        thread of their own while the others are computed, as AdaQP's (section 4.2) central nodes are.
        """
        # Returning freed memory costs page faults; what is freed but not whole again grows with a part.
        spare_bytes = max(_OWN_BYTES // 2, 7 * _OWN_BYTES // 8 - self._memory_bytes // 4)
        ceiling = Ceiling(self._memory_bytes + spare_bytes)

        def given(places: list[int]) -> Iterator[tuple[int, Part]]:
            for place in places:
                ceiling.make_room(self._part_bytes)
                yield place, self._boundary.part(place)

        central = [place for place in range(self._boundary.parts) if place not in self._marginal]
        yield from given(self._marginal)
        if self._exchange is None or not 0 <= number < len(self._between):
            yield from given(central)
            return
        with ThreadPoolExecutor(1) as pool:
            travelling = pool.submit(exchange, self._exchange, self._between[number])
            yield from given(central)
            travelling.result()

    def _marginal_parts(self) -> list[int]:
        """Parts that other ranks read of, or that read of other ranks."""
        if self._exchange is None:
            return []
        sent = np.searchsorted(self._exchange.sent, self._cuts)
        return [
            place
            for place, (first, last) in enumerate(sent)
            if first < last or (self._boundary.others(place) >= self._boundary.count).any()
        ]

    def _output(self, number: int, place: int, part: Part) -> tuple[Tensor, Tensor]:
        """What a stage reads, and what it makes of it."""
        stage = self._stages[number]
        if number:
            x = self._between[number - 1].read(place)
        else:
            x = self._features.read(place, others=stage.layer is not None).to(self._dtype)
        x.requires_grad_(torch.is_grad_enabled() and number > 0)
        return x, stage(part, x)

    def _backward(self, number: int, place: int, part: Part, sums: Sums) -> Tensor:
        """Add a stage's gradients over a part; the last stage gives the part's share of the loss."""
        with torch.enable_grad():
            x, output = self._output(number, place, part)
            share = torch.zeros((), dtype=torch.float64)
            gradient = None
            if number == len(self._stages) - 1:
                output = self._loss(part, output)
                share = output.detach().double()
            else:
                gradient = self._between[number].total(place)
            wanted = leaves_below(output)
            found = torch.autograd.grad(output, wanted, gradient, allow_unused=True) if wanted else ()
        below = None
        for leaf, each in zip(wanted, found, strict=True):
            if leaf is x:
                below = each
            elif each is not None:
                sums[leaf] = each if leaf not in sums else sums[leaf] + each
        if number:
            self._between[number - 1].give(place, torch.zeros_like(x) if below is None else below)
        return share

    def _loss(self, part: Part, output: Tensor) -> Tensor:
        counts = self._counts[part.start : part.stop]
        targets = self._targets(part.own[counts])
        output = output[torch.from_numpy(counts)]
        try:
            losses = self._loss_fn(output, targets)
        except IndexError as error:
            raise OptionError(
                f"the loss fails: {error} Targets go from {targets.min()} to {targets.max()}, and the model "
                f"gives {output.shape[1]} numbers for each node. Correct the targets, or widen the last one."
            ) from error
        if losses.shape[:1] != output.shape[:1]:
            raise OptionError(
                f"loss_fn gives the shape {tuple(losses.shape)} for {len(output):,} nodes; give one with a "
                'number for each node, such as torch\'s with reduction="none".'
            )
        size = losses[0].numel() if len(losses) else 1
        return losses.sum() / (size * self._counted)

    def _fitting_cuts(self) -> tuple[list[tuple[int, int]], int]:
        """Parts that stay within the memory, and what the largest takes.

        Those with most edges and that read most rows are measured, of small parts first.
        """
        count, room = self._edges.count, self._memory_bytes
        if self._ranks is not None:
            room -= 4 * room // _MESSAGES
        parts = min(max(int(self._guess(0, count) / (_FIRST * room)), 1), count)
        peak = self._largest(self._edges.cuts(parts))[1]
        parts = min(max(int(parts * peak / room), 1), count)
        while True:
            cuts = self._edges.cuts(parts)
            (start, stop), peak = self._largest(cuts)
            if peak <= room:
                return cuts, peak
            if stop - start == 1:
                node = start if self._order is None else int(self._order[start])
                raise BudgetError(
                    f"node {node:,} with its edges takes {human_bytes(peak)}, and memory= has "
                    f"{human_bytes(room)} for it. Give more."
                )
            parts = min(max(int(parts * peak / room), parts + 1 + parts // 16), count)

    def _largest(self, cuts: list[tuple[int, int]]) -> tuple[tuple[int, int], int]:
        """The part that takes most, and its peak."""
        likely = {
            max(cuts, key=lambda cut: self._guess(*cut)),
            max(cuts, key=lambda cut: len(self._edges.part(*cut).others)),
        }
        measured = {cut: self._measured(*cut) for cut in likely}
        largest = max(measured, key=lambda cut: measured[cut])
        return largest, measured[largest]

    def _guess(self, start: int, stop: int) -> int:
        """Bytes that a part takes at least: its edges, and its nodes' inputs and outputs."""
        edges = int(self._edges.ends[stop] - self._edges.ends[start])
        width = self._graph.features.shape[1] + self._widths[0]
        return int(16 * edges + (stop - start) * width * self._dtype.itemsize)

    def _measured(self, start: int, stop: int) -> int:
        """The peak of a part, over all stages and the loss, with made-up rows.

        It is that of its tensors, or what the process grows by, where that is more: the C library keeps what
        is freed in between, and operators have memory that torch does not see.
        """
        return_all()
        given = kind_of(self._graph.features)
        meter, process, part_bytes = PeakMeter(torch.device("cpu")), ProcessMeter(), 0
        process.start()
        if not meter.start():
            raise OptionError("torch's profiler is active, so parts cannot be measured; leave it first.")
        try:
            part, width = self._edges.part(start, stop), self._graph.features.shape[1]
            for stage, wider in zip(self._stages, self._widths, strict=True):
                rows = len(stage.reads(part))
                x = torch.ones(rows, width, dtype=given if stage is self._stages[0] else self._dtype)
                x = x.to(self._dtype).requires_grad_(stage is not self._stages[0])
                output = stage(part, x)
                output = self._loss(part, output) if stage is self._stages[-1] else output.sum()
                wanted = leaves_below(output)
                if wanted:
                    torch.autograd.grad(output, wanted, allow_unused=True)
                width = wider
        finally:
            part_bytes = meter.stop(()).total_bytes
        return max(part_bytes, (process.stop() or 0) - _OWN_BYTES)

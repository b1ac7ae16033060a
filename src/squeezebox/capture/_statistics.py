"""Gradient norms and local error measurements on the steps whose statistics are due."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.graph import Node

from squeezebox import codecs
from squeezebox.bounds import law
from squeezebox.capture._entries import Entry, Handle, Row
from squeezebox.capture._held import Packed
from squeezebox.capture._readings import (
    Reading,
    is_custom,
    is_leaf_node,
    leaf_of,
    node_number,
    per_dim,
    sequence_number,
)
from squeezebox.capture._rules import operator_name
from squeezebox.capture._store import Store
from squeezebox.capture._total import (
    Gradients,
    Target,
    TotalError,
    Traces,
    differences,
    energy_of,
    repeat,
)
from squeezebox.schema import (
    Check,
    Edge,
    Injection,
    NodeStatistics,
    Reads,
    Role,
    StepStatistics,
    TensorStatistics,
)

# Operators whose weight gradient is linear in a saved input: that input's attribute, the weight's edge.
_WEIGHTED = {
    "ConvolutionBackward": ("input", 1),
    "AddmmBackward": ("mat1", 2),
    "MmBackward": ("self", 1),
    "LinearBackward": ("input", 1),
    "GroupedMmBackward": ("self", 1),  # expert by expert, each of its own rows: the sum is over all rows
}
_WEIGHTED_ROLES = frozenset({Role.CONV_INPUT, Role.LINEAR_INPUT})
_AS_SIGNAL = frozenset({"WeightNormInterfaceBackward"})  # through which white noise goes as the signal does


@dataclass(slots=True)
class _Watched:
    """One node between its forward and its backward."""

    number: int
    operator: str
    module: str
    targets: list[Target]
    lossy: list[Reading]  # saved tensors of which backward reads the values
    moments: dict[str, tuple[float, float, float]]  # attribute -> nonzero fraction, mean square, mean
    repeatable: bool
    custom: bool
    parameter: str = ""
    fan: float = 0.0


class Collector:
    """Hooks every node of one step's graph; afterwards knows what each tensor's error costs.

    Reads two norms a node. Operators that are linear in what they save follow the error law; any other
    one is run again on a perturbed copy of what it saved, which shows the error it hands on.

    Tensors chosen by ``checked`` keep their exact values until backward. A weighted layer's gradient
    from them is compared with the lossy one; any other operator's true error is sent through the rest
    of the backward, together with the gradient, down to the parameters.
    """

    def __init__(
        self,
        store: Store,
        parameter_names: dict[int, str],
        checked: Callable[[bool, int], bool],
        step: int,
    ) -> None:
        self.nodes: list[NodeStatistics] = []
        self.tensors: dict[str, TensorStatistics] = {}
        self.checks: list[Check] = []
        self.counts = {True: 0, False: 0}  # lossy tensors of weighted layers, and of other operators
        self.floor_bytes = 0
        self.interrupted = False  # a backward began and has not ended
        self.total = TotalError(store)
        self._store = store
        self._parameter_names = parameter_names
        self._checked = checked
        self._step = step
        self._hooks: list[Any] = []
        self._first = sequence_number()
        self._watched: set[int] = set()  # numbers of nodes
        self._exact: set[int] = set()
        self._saved_bytes: dict[int, int] = {}
        self._traces = Traces()

    def is_new(self, node: Node) -> bool:
        """Whether the node was made in this step, and is not watched yet."""
        number = node_number(node)
        return number >= self._first and number not in self._watched and not is_leaf_node(node)

    def watch(self, node: Any, operator: str, module: str, readings: list[Reading], repeatable: bool) -> None:
        """Note a new node, take its saved tensors' moments while they are there, hook its backward.

        ``repeatable``: what the node saved is ours, so its backward may be run a second time.
        """
        lossy = [each for each in readings if each.rule.reads is Reads.VALUES]
        watched = _Watched(
            number=node_number(node),
            operator=operator,
            module=module,
            targets=[_target(next_node, index) for next_node, index in node.next_functions],
            lossy=lossy,
            moments={
                each.attribute: _moments(each.handle.tensor)
                for each in lossy
                if each.handle.tensor is not None
            },
            repeatable=repeatable and all(map(_is_plain, node._input_metadata)),
            custom=is_custom(node),
        )
        self._watched.add(watched.number)
        self.total.expect(watched.targets)
        self._saved_bytes[watched.number] = sum(
            each.handle.nbytes for each in readings if each.handle.is_pending and each.rule.reads
        )
        if operator in _WEIGHTED and lossy:  # what others saved would have to be recomputed
            watched.fan = _fan(node, operator)
            watched.parameter = self._parameter_name(node.next_functions[_WEIGHTED[operator][1]][0])
        for each in lossy:
            self._choose(each.handle, each.rule.role in _WEIGHTED_ROLES)

        def hook(grad_inputs: Gradients, grad_outputs: Gradients) -> None:
            # Not the node from outside: it would refer to itself, beyond the garbage collector's sight.
            running = torch._C._current_autograd_node()
            if not self.interrupted:
                self.interrupted = True
                torch.autograd.Variable._execution_engine.queue_callback(self._ended)
            with torch.no_grad():
                self._weigh(watched, running, grad_inputs, grad_outputs)

        self._hooks.append(node.register_hook(hook))

    def _ended(self) -> None:
        self.interrupted = False

    def note_packed(self, nodes: list[Node]) -> None:
        """After an operator's tensors are packed: what its backward will need on top of all packed ones."""
        for node in nodes:
            working = _working_set(node, self._saved_bytes.pop(node_number(node), 0))
            self.floor_bytes = max(self.floor_bytes, self._store.packed_bytes + working)

    def exact_copy(self, handle: Handle) -> torch.Tensor | None:
        """The handle's tensor, to be kept with its packed form, if its layer is checked this step."""
        if id(handle) not in self._exact or handle.tensor is None:
            return None
        return handle.tensor.detach()

    @property
    def usable(self) -> bool:
        """Whether backward has ended, and its gradients are finite: a loss scaled too far says nothing."""
        energies = [edge.energy for node in self.nodes for edge in node.edges]
        return bool(energies) and not self.interrupted and math.isfinite(sum(energies))

    def result(self, mean_abs_momentum: dict[str, float]) -> StepStatistics:
        """Everything that backward has shown so far."""
        return StepStatistics(
            nodes=tuple(self.nodes),
            tensors=tuple(self.tensors.values()),
            mean_abs_momentum=mean_abs_momentum,
            noise=self.total.noise,
            checks=(*self.checks, *self._traces.checks(self._step, self.nodes)),
        )

    def close(self) -> None:
        """Take every hook off the graph; safe to call twice."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._traces.clear()
        self.total.close()

    def _choose(self, handle: Handle, weighted: bool) -> None:
        if handle.tensor is not None and self._checked(weighted, self.counts[weighted]):
            self._exact.add(id(handle))
        self.counts[weighted] += handle.tensor is not None

    def _parameter_name(self, node: Any) -> str:
        """The parameter behind an edge, seen through one transpose or cast."""
        for _ in range(3):
            if node is None:
                return ""
            if is_leaf_node(node):
                return self._parameter_names.get(id(node.variable), "")
            node = node.next_functions[0][0] if node.next_functions else None
        return ""

    def _weigh(self, watched: _Watched, node: Any, grad_inputs: Gradients, grad_outputs: Gradients) -> None:
        """Take the node's statistics; what it saved is held exactly from now on where there are none."""
        try:
            self._after(watched, node, grad_inputs, grad_outputs)
        except ArithmeticError as error:
            self.total.fail()
            for reading in watched.lossy:
                if (entry := reading.handle.entry) is not None:
                    self._store.unweighed[entry.row.key] = f"its error cannot be weighed: {error}"

    def _after(self, watched: _Watched, node: Any, grad_inputs: Gradients, grad_outputs: Gradients) -> None:
        """The node's backward has run, and what it saved is still there."""
        out_energy = sum(energy_of(gradient) for gradient in grad_outputs)
        edges = tuple(
            _edge(watched, number, gradient, out_energy) for number, gradient in enumerate(grad_inputs)
        )
        injections: list[Injection] = []
        for reading in watched.lossy:
            handle = reading.handle
            if handle.entry is None or handle.entry.row.exact or reading.attribute not in watched.moments:
                continue
            self._note_tensor(watched, reading, handle.entry, grad_outputs)
            if reading.rule.role in _WEIGHTED_ROLES:
                injections.append(self._by_law(watched, reading.attribute, handle.entry.row.key, out_energy))
                if handle.exact is not None:
                    self._compare(watched, node, handle, grad_inputs, grad_outputs)
            elif isinstance(handle.held, Packed) and watched.repeatable:
                injections.extend(self._probe(node, handle, grad_inputs, grad_outputs))
                if handle.exact is not None:
                    self._trace(watched, node, handle, grad_inputs, grad_outputs)
        self._traces.pass_on(
            watched.number, node, watched.targets, len(grad_outputs), repeatable=watched.repeatable
        )
        self.total.pass_on(
            watched.number,
            node,
            watched.targets,
            [each.handle for each in watched.lossy],
            grad_inputs,
            grad_outputs,
            repeatable=watched.repeatable,
        )
        self.nodes.append(
            NodeStatistics(
                number=watched.number,
                operator=watched.operator,
                module=watched.module,
                grad_energy=out_energy,
                edges=edges,
                injections=tuple(injections),
            )
        )
        watched.lossy.clear()

    def _by_law(self, watched: _Watched, name: str, key: str, out_energy: float) -> Injection:
        energy = law.linear(watched.moments[name][0], watched.fan, out_energy)
        return Injection(key=key, edge=_WEIGHTED[watched.operator][1], energy=energy, layer=True)

    def _compare(
        self, watched: _Watched, node: Any, handle: Handle, grad_inputs: Gradients, grad_outputs: Gradients
    ) -> None:
        """Measure one layer's weight gradient error and compare it with the law's."""
        attribute, edge = _WEIGHTED[watched.operator]
        exact, handle.exact = handle.exact, None
        if exact is None or handle.entry is None or not isinstance(handle.held, Packed):
            return
        expected = law.linear(watched.moments[attribute][0], watched.fan, energy_of(grad_outputs[0]))
        gradient = repeat(node, grad_outputs, {handle: exact})[edge]
        energy, lossy = energy_of(gradient), grad_inputs[edge]
        if gradient is not None and lossy is not None and energy > 0.0:
            self.checks.append(
                Check(
                    key=handle.entry.row.key,
                    step=self._step,
                    layer=True,
                    measured=energy_of(gradient.sub_(lossy)) / energy,
                    predicted=handle.entry.row.bound**2 * expected / energy,
                )
            )

    def _probe(
        self, node: Any, handle: Handle, grad_inputs: Gradients, grad_outputs: Gradients
    ) -> list[Injection]:
        """Perturb one saved tensor by its own bound and see what reaches each edge."""
        row = handle.entry.row if handle.entry is not None else None
        if row is None or row.bound == 0.0:
            return []
        decoded = self._store.unpack(handle)
        perturbed = torch.empty_like(decoded).uniform_(-row.bound, row.bound, generator=self._random(decoded))
        scale = handle.held.scale if isinstance(handle.held, Packed) else None
        if scale is not None:
            scale.multiply(perturbed)
        perturbed.add_(decoded)
        del decoded
        errors = differences(repeat(node, grad_outputs, {handle: perturbed}), grad_inputs)
        return [
            Injection(key=row.key, edge=edge, energy=energy_of(error) / row.bound**2)
            for edge, error in enumerate(errors)
            if error is not None
        ]

    def _random(self, tensor: torch.Tensor) -> torch.Generator:
        """A generator of its own for every probe: the caller's random stream stays as it is."""
        return torch.Generator(tensor.device).manual_seed((self._step << 24) + len(self.nodes))

    def _trace(
        self, watched: _Watched, node: Any, handle: Handle, grad_inputs: Gradients, grad_outputs: Gradients
    ) -> None:
        """Start the true error of one tensor on its way to the parameters."""
        exact, handle.exact = handle.exact, None
        if handle.entry is None or exact is None or handle.entry.row.bound == 0.0:
            return
        errors = differences(repeat(node, grad_outputs, {handle: exact}), grad_inputs)
        self._traces.start(handle.entry.row, watched.number, watched.targets, errors)

    def _note_tensor(
        self, watched: _Watched, reading: Reading, entry: Entry, grad_outputs: Gradients
    ) -> None:
        if entry.row.key in self.tensors:
            return
        nonzero, mean_square, mean = watched.moments[reading.attribute]
        gradient = grad_outputs[0] if reading.rule.role is Role.CONV_INPUT else None
        self.tensors[entry.row.key] = TensorStatistics(
            key=entry.row.key,
            role=reading.rule.role,
            numel=entry.numel,
            nonzero=nonzero,
            rms=_rms_in_unit(entry.row, nonzero, mean_square, mean),
            mean_abs_loss=0.0 if gradient is None else codecs.mean_abs(gradient),
            batch=0 if gradient is None else gradient.shape[0],
            positions=0 if gradient is None else math.prod(gradient.shape[2:]),
            parameter=watched.parameter,
            bound=entry.row.bound,
            scaled=entry.row.scaled,
        )


def _edge(watched: _Watched, number: int, gradient: torch.Tensor | None, out_energy: float) -> Edge:
    target, _, leaf = watched.targets[number]
    energy = energy_of(gradient)
    if watched.operator in _WEIGHTED and number == _WEIGHTED[watched.operator][1]:
        attribute = _WEIGHTED[watched.operator][0]
        mean_square = watched.moments.get(attribute, (0.0, 0.0, 0.0))[1]
        return Edge(target=target, parameter=leaf, energy=energy, gain=watched.fan * mean_square)
    white = leaf and not watched.custom and watched.operator not in _AS_SIGNAL
    return Edge(target=target, parameter=leaf, energy=energy, gain=1.0 if white else None)


def _fan(node: Any, operator: str) -> float:
    """Products that one weight gradient sums, per output element: the law's C_in * k^2."""
    if operator != "ConvolutionBackward":
        attribute = _WEIGHTED[operator][0]
        saved = getattr(node, f"_saved_{attribute}")
        return float(saved.shape[-1]) if saved is not None else 0.0  # of a frozen weight
    weight = node._saved_weight
    kernel = weight.shape[2:]
    windows = (node._saved_stride, node._saved_padding, node._saved_dilation)
    size_in = tuple(node._saved_input.shape[2:])
    size_out = tuple(node._input_metadata[0].shape[2:])
    fan = float(weight.shape[1])
    if node._saved_transposed:  # a convolution from the output's grid to the input's
        fan = float(weight.shape[0]) / node._saved_groups * math.prod(size_in) / math.prod(size_out)
        size_in, size_out = size_out, size_in
    sizes = (size_in, size_out, kernel, *(per_dim(each, len(kernel)) for each in windows))
    for here in zip(*sizes, strict=True):
        fan *= here[2] * law.valid_fraction(*here)
    return fan


def _working_set(node: Any, saved_bytes: int) -> int:
    """Bytes of a node's incoming and outgoing gradients and of what it unpacks, parameters' apart."""
    operator = operator_name(node.name())
    weight_edge = _WEIGHTED[operator][1] if operator in _WEIGHTED else -1
    incoming = sum(_metadata_bytes(metadata) for metadata in node._input_metadata)
    outgoing = sum(
        _metadata_bytes(next_node._input_metadata[number])
        for edge, (next_node, number) in enumerate(node.next_functions)
        if next_node is not None and not is_leaf_node(next_node) and edge != weight_edge
    )
    if saved_bytes == 0:  # views and sums hand on what they got; to a parameter alone, its gradient
        return max(incoming, outgoing) if outgoing else 0
    if operator == "NativeBatchNormBackward":  # its CPU kernel allocates the input's gradient twice
        outgoing *= 2
    return incoming + outgoing + saved_bytes


def _metadata_bytes(metadata: Any) -> int:
    if not _is_plain(metadata):
        return 0
    return int(torch.Size(metadata.shape).numel()) * int(metadata.dtype.itemsize)


def _is_plain(metadata: Any) -> bool:
    """Whether all sizes are numbers; a jagged nested tensor has one that is none."""
    return all(isinstance(size, int) for size in metadata.shape)


def _target(node: Node | None, index: int) -> Target:
    if node is None:
        return None, 0, False
    return (None, id(leaf_of(node)), True) if is_leaf_node(node) else (node_number(node), index, False)


def _moments(tensor: torch.Tensor) -> tuple[float, float, float]:
    count = max(tensor.numel(), 1)
    return int(torch.count_nonzero(tensor)) / count, codecs.energy(tensor) / count, codecs.mean(tensor)


def _rms_in_unit(row: Row, nonzero: float, mean_square: float, mean: float) -> float:
    """Root mean square of the non-zero elements, or the deviation, in the unit of the tensor's bound."""
    if row.scaled:
        return 1.0
    if row.dense:
        return math.sqrt(max(mean_square - mean**2, 0.0))
    return (mean_square / nonzero) ** 0.5 if nonzero > 0.0 else 0.0

"""Gradient norms and local error measurements on the steps whose statistics are due."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.autograd.graph import Node

from squeezebox.bounds import law
from squeezebox.capture._graph import is_leaf_node, node_number
from squeezebox.capture._rules import Rule
from squeezebox.capture._store import Handle, Store
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

Readers = list[tuple[tuple[str, Handle], Rule]]
Gradients = tuple[torch.Tensor | None, ...]

# Operators whose weight gradient is linear in a saved input: that input's attribute, the weight's edge.
_WEIGHTED = {
    "ConvolutionBackward": ("input", 1),
    "AddmmBackward": ("mat1", 2),
    "MmBackward": ("self", 1),
    "LinearBackward": ("input", 1),
}
# The edge whose gradient reads the attribute, where both operands are activations.
_OPERAND_EDGE = {"self": 1, "mat2": 0, "other": 0}
_CLOSED_FORM = frozenset(
    {Role.CONV_INPUT, Role.LINEAR_INPUT, Role.BATCH_NORM_INPUT, Role.PRODUCT, Role.MATMUL_OPERAND}
)


@dataclass(slots=True)
class _Watched:
    """One node between its forward and its backward."""

    number: int
    operator: str
    module: str
    targets: list[tuple[int | None, bool]]
    lossy: list[tuple[str, Handle, Rule]]  # saved tensors of which backward reads the values
    moments: dict[str, tuple[float, float]]  # attribute -> nonzero fraction, mean square
    parameter: str = ""
    fan: float = 0.0
    invstd: torch.Tensor | None = None
    scale: torch.Tensor | None = None
    injections: list[Injection] = field(default_factory=list)


class Collector:
    """Hooks every node of one step's graph; afterwards knows what each tensor's error costs.

    Reads two norms a node; operators without a closed law are run again on a perturbed copy of what
    they saved. Weighted layers chosen by ``check`` (called with a running number) keep their exact
    input until backward, where the gradient from it is compared with the one from the lossy input.
    """

    def __init__(
        self,
        store: Store,
        parameter_names: dict[int, str],
        check: Callable[[int], bool],
        step: int,
    ) -> None:
        self.nodes: list[NodeStatistics] = []
        self.tensors: dict[str, TensorStatistics] = {}
        self.checks: list[Check] = []
        self.weighted_count = 0
        self.floor_bytes = 0
        self._store = store
        self._parameter_names = parameter_names
        self._check = check
        self._step = step
        self._hooks: list[Any] = []
        self._exact: set[int] = set()
        self._saved_bytes: dict[int, int] = {}

    def watch(self, node: Any, operator: str, module: str, readers: Readers) -> None:
        """Note a new node, take its saved tensors' moments while they are there, hook its backward."""
        lossy = [(name, handle, rule) for (name, handle), rule in readers if rule.reads is Reads.VALUES]
        watched = _Watched(
            number=node_number(node),
            operator=operator,
            module=module,
            targets=[_target(next_node) for next_node, _ in node.next_functions],
            lossy=lossy,
            moments={name: _moments(handle.tensor) for name, handle, _ in lossy if handle.tensor is not None},
        )
        self._saved_bytes[watched.number] = sum(
            handle.nbytes for (_, handle), rule in readers if handle.tensor is not None and rule.reads
        )
        if operator in _WEIGHTED:
            self._note_weight(watched, node)
        if any(rule.role is Role.BATCH_NORM_INPUT for _, _, rule in lossy):
            watched.invstd, watched.scale = node._saved_result2, node._saved_weight
        if any(rule.role not in _CLOSED_FORM for _, _, rule in lossy):
            self._before(node, lambda gradients: self._probe(watched, node, gradients))
        self._hooks.append(node.register_hook(lambda after, before: self._after(watched, after, before)))

    def note_packed(self, nodes: list[Node]) -> None:
        """After an operator's tensors are packed: what its backward will need beside all packed ones."""
        packed = sum(row.packed_bytes for row in self._store.rows)
        for node in nodes:
            working = _working_set(node, self._saved_bytes.pop(node_number(node), 0))
            self.floor_bytes = max(self.floor_bytes, packed + working)

    def exact_copy(self, handle: Handle) -> torch.Tensor | None:
        """The handle's tensor, to be kept beside its packed form, if its layer is checked this step."""
        if id(handle) not in self._exact or handle.tensor is None:
            return None
        return handle.tensor.detach()

    def result(self, mean_abs_momentum: dict[str, float]) -> StepStatistics:
        """Everything that backward has shown so far."""
        return StepStatistics(
            nodes=tuple(self.nodes),
            tensors=tuple(self.tensors.values()),
            mean_abs_momentum=mean_abs_momentum,
        )

    def close(self) -> None:
        """Take every hook off the graph; safe to call twice."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def _note_weight(self, watched: _Watched, node: Any) -> None:
        attribute, edge = _WEIGHTED[watched.operator]
        watched.fan = _fan(node, watched.operator)
        watched.parameter = self._parameter_name(node.next_functions[edge][0])
        handle = next((handle for name, handle, _ in watched.lossy if name == attribute), None)
        if handle is None or handle.tensor is None:
            return
        if self._check(self.weighted_count):
            self._exact.add(id(handle))
            self._before(node, lambda gradients: self._compare(watched, node, handle, gradients))
        self.weighted_count += 1

    def _parameter_name(self, node: Any) -> str:
        """The parameter behind an edge, seen through one transpose or cast."""
        for _ in range(3):
            if node is None:
                return ""
            if is_leaf_node(node):
                return self._parameter_names.get(id(node.variable), "")
            node = node.next_functions[0][0] if node.next_functions else None
        return ""

    def _before(self, node: Node, action: Callable[[Gradients], None]) -> None:
        def hook(gradients: Gradients) -> None:
            with torch.no_grad():
                action(gradients)

        self._hooks.append(node.register_prehook(hook))

    def _compare(self, watched: _Watched, node: Any, handle: Handle, gradients: Gradients) -> None:
        """Measure one layer's weight gradient error and set it beside the law's."""
        edge = _WEIGHTED[watched.operator][1]
        exact, handle.exact = handle.exact, None
        if exact is None or handle.entry is None or handle.form != "values":
            return
        lossy_gradient = _apply(node, gradients)[edge]
        handle.override = exact
        try:
            exact_gradient = _apply(node, gradients)[edge]
        finally:
            handle.override = None
        if lossy_gradient is None or exact_gradient is None:
            return
        attribute = _WEIGHTED[watched.operator][0]
        bound = handle.entry.row.bound
        expected = bound**2 * law.linear(watched.moments[attribute][0], watched.fan, _energy(gradients[0]))
        energy = _energy(exact_gradient)
        if energy > 0.0:
            measured = _energy(lossy_gradient - exact_gradient) / energy
            self.checks.append(
                Check(
                    key=handle.entry.row.key,
                    step=self._step,
                    measured=measured,
                    predicted=expected / energy,
                )
            )

    def _probe(self, watched: _Watched, node: Any, gradients: Gradients) -> None:
        """Perturb one saved tensor at a time by its own bound and see what reaches each edge."""
        base = _apply(node, gradients)
        for _, handle, rule in watched.lossy:
            if rule.role in _CLOSED_FORM or handle.entry is None or handle.entry.row.bound == 0.0:
                continue
            decoded = self._store.unpack(handle)
            noise = torch.empty_like(decoded).uniform_(-1.0, 1.0).mul_(handle.entry.row.bound)
            handle.override = noise.add_(decoded)
            del decoded
            try:
                perturbed = _apply(node, gradients)
            finally:
                handle.override = None
            for edge, (one, other) in enumerate(zip(base, perturbed)):
                if one is not None and other is not None:
                    energy = _energy(other - one) / handle.entry.row.bound**2
                    watched.injections.append(
                        Injection(key=handle.entry.row.key, edge=edge, energy=energy)
                    )

    def _after(self, watched: _Watched, grad_inputs: Gradients, grad_outputs: Gradients) -> None:
        with torch.no_grad():
            out_energy = sum(_energy(gradient) for gradient in grad_outputs)
            edges = tuple(
                _edge(watched, number, gradient, out_energy) for number, gradient in enumerate(grad_inputs)
            )
            for name, handle, rule in watched.lossy:
                if handle.entry is not None and name in watched.moments:
                    self._note_tensor(watched, name, handle, rule, grad_outputs)
                    watched.injections.extend(
                        Injection(key=handle.entry.row.key, edge=edge, energy=energy)
                        for edge, energy in _closed_form(watched, name, handle, rule, grad_inputs, grad_outputs)
                    )
        self.nodes.append(
            NodeStatistics(
                number=watched.number,
                operator=watched.operator,
                module=watched.module,
                grad_energy=out_energy,
                edges=edges,
                injections=tuple(watched.injections),
            )
        )
        watched.lossy.clear()

    def _note_tensor(
        self, watched: _Watched, name: str, handle: Handle, rule: Rule, grad_outputs: Gradients
    ) -> None:
        if handle.entry is None or handle.entry.row.key in self.tensors:
            return
        nonzero, mean_square = watched.moments[name]
        gradient = grad_outputs[0]
        known = rule.role is Role.CONV_INPUT and gradient is not None
        self.tensors[handle.entry.row.key] = TensorStatistics(
            key=handle.entry.row.key,
            role=rule.role,
            numel=handle.entry.numel,
            nonzero=nonzero,
            rms=(mean_square / nonzero) ** 0.5 if nonzero > 0.0 else 0.0,
            mean_abs_loss=_mean_abs(gradient) if known and gradient is not None else 0.0,
            batch=gradient.shape[0] if known and gradient is not None else 0,
            positions=gradient[0, 0].numel() if known and gradient is not None else 0,
            parameter=watched.parameter,
        )


def _closed_form(
    watched: _Watched, name: str, handle: Handle, rule: Rule, grad_inputs: Gradients, grad_outputs: Gradients
) -> list[tuple[int, float]]:
    """(edge, squared error for a unit bound) of one saved tensor under the error law."""
    gradient = grad_outputs[0]
    if gradient is None or rule.role not in _CLOSED_FORM:
        return []
    nonzero = watched.moments[name][0]
    if watched.operator in _WEIGHTED and name == _WEIGHTED[watched.operator][0]:
        return [(_WEIGHTED[watched.operator][1], law.linear(nonzero, watched.fan, _energy(gradient)))]
    if rule.role is Role.BATCH_NORM_INPUT:
        return _batch_norm(watched, grad_inputs, gradient)
    if rule.role is Role.PRODUCT:
        return [(_OPERAND_EDGE[name], law.linear(nonzero, 1.0, _energy(gradient)))]
    inner = handle.geometry[0][-1 if name == "self" else -2]
    return [(_OPERAND_EDGE[name], law.linear(nonzero, inner, _energy(gradient)))]


def _batch_norm(watched: _Watched, grad_inputs: Gradients, gradient: torch.Tensor) -> list[tuple[int, float]]:
    if watched.invstd is None or watched.invstd.numel() == 0:  # evaluation mode: linear in the gradient
        return []
    dims = [dim for dim in range(gradient.dim()) if dim != 1]
    delta = torch.linalg.vector_norm(gradient, dim=dims, dtype=torch.float32).square()
    count = gradient.numel() // gradient.shape[1]
    dgamma = grad_inputs[1] if len(grad_inputs) > 1 and grad_inputs[1] is not None else delta.mul(count).sqrt()
    invstd = watched.invstd.float()
    gamma = torch.ones_like(invstd) if watched.scale is None else watched.scale.float()
    to_input = gamma.square() * invstd.pow(4) * (dgamma.float().square() + delta) / count
    to_scale = invstd.square() * delta
    return [(0, law.UNIFORM * float(to_input.sum())), (1, law.UNIFORM * float(to_scale.sum()))]


def _edge(watched: _Watched, number: int, gradient: torch.Tensor | None, out_energy: float) -> Edge:
    target, leaf = watched.targets[number] if number < len(watched.targets) else (None, False)
    energy = _energy(gradient)
    if watched.operator in _WEIGHTED and number == _WEIGHTED[watched.operator][1]:
        attribute = _WEIGHTED[watched.operator][0]
        mean_square = watched.moments.get(attribute, (0.0, 0.0))[1]
        return Edge(target=target, parameter=leaf, energy=energy, gain=watched.fan * mean_square)
    return Edge(target=target, parameter=leaf, energy=energy, gain=1.0 if leaf else None)


def _fan(node: Any, operator: str) -> float:
    """Products that one weight gradient sums, per output element: the law's C_in * k^2."""
    if operator != "ConvolutionBackward":
        attribute = _WEIGHTED[operator][0]
        return float(getattr(node, f"_saved_{attribute}").shape[-1])
    weight = node._saved_weight
    kernel, stride = weight.shape[2:], node._saved_stride
    if node._saved_transposed:
        area = 1.0
        for taps, step in zip(kernel, stride):
            area *= taps / step
        return float(weight.shape[0]) / node._saved_groups * area
    size_in = node._saved_input.shape[2:]
    size_out = node._input_metadata[0].shape[2:]
    fan = float(weight.shape[1])
    for dim, taps in enumerate(kernel):
        fan *= taps * law.valid_fraction(
            size_in[dim],
            size_out[dim],
            taps,
            stride[dim],
            node._saved_padding[dim],
            node._saved_dilation[dim],
        )
    return fan


def _working_set(node: Any, saved_bytes: int) -> int:
    """Bytes of a node's incoming and outgoing gradients and of what it unpacks."""
    incoming = sum(_metadata_bytes(metadata) for metadata in node._input_metadata)
    outgoing = sum(
        _metadata_bytes(next_node._input_metadata[number])
        for next_node, number in node.next_functions
        if next_node is not None and not is_leaf_node(next_node)
    )
    if saved_bytes == 0:  # views and sums hand on what they got
        return max(incoming, outgoing)
    return incoming + outgoing + saved_bytes


def _metadata_bytes(metadata: Any) -> int:
    return int(torch.Size(metadata.shape).numel()) * int(metadata.dtype.itemsize)


def _target(node: Node | None) -> tuple[int | None, bool]:
    if node is None:
        return None, False
    return (None, True) if is_leaf_node(node) else (node_number(node), False)


def _apply(node: Any, gradients: Gradients) -> Gradients:
    result = node(*gradients)
    return result if isinstance(result, tuple) else (result,)


def _moments(tensor: torch.Tensor) -> tuple[float, float]:
    count = max(tensor.numel(), 1)
    return int(torch.count_nonzero(tensor)) / count, _energy(tensor) / count


def _energy(tensor: torch.Tensor | None) -> float:
    if tensor is None or not tensor.is_floating_point():
        return 0.0
    return float(torch.linalg.vector_norm(tensor, dtype=_accumulator(tensor))) ** 2


def _mean_abs(tensor: torch.Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor, ord=1, dtype=_accumulator(tensor))) / max(tensor.numel(), 1)


def _accumulator(tensor: torch.Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32

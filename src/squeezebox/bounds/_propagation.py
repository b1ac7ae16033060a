"""Noise through the backward graph: what an error injected at one node costs in all gradients."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from squeezebox.schema import Edge, NodeStatistics, Role, TensorStatistics

_FIRST_CORRECTION = {
    Role.BATCH_NORM_INPUT: 30.0,
    Role.NORM_INPUT: 4.0,
    Role.ACTIVATION: 4.0,
    Role.PRODUCT: 4.0,
    Role.ATTENTION: 4.0,
}


def propagate(nodes: Sequence[NodeStatistics], *, layer: bool | None = None) -> dict[str, float]:
    """Relative gradient noise of every tensor for a unit bound, were its error white.

    White noise in a node's output gradient is carried to each of its inputs with the gain the signal
    itself showed, and ends in the weights of every layer it passes, where it adds up incoherently:
    ``E||err dW||^2 = C_in*k^2 * mean(x^2) * ||e||^2`` (docs/theory.md, upstream noise). Energies of
    independent errors add.

    Args:
        nodes: one due step's nodes; an autograd node's number is above those it leads to.
        layer: only what stays in a layer's weight gradient (True), or is handed on (False).

    Returns:
        key -> squared error of all parameter gradients, per squared bound, over the squared norm of all
        parameter gradients. Empty if no gradient reached a parameter.
    """
    total = gradient_energy(nodes)
    if total <= 0.0:
        return {}
    reach = _reach(nodes)
    costs: dict[str, float] = defaultdict(float)
    for node in nodes:
        for injection in node.injections:
            if layer is not None and injection.layer is not layer:
                continue
            edge = node.edges[injection.edge]
            costs[injection.key] += injection.energy * _arrival(edge, reach) / total
    return dict(costs)


def corrected(
    costs: Mapping[str, float],
    tensors: Sequence[TensorStatistics],
    corrections: Mapping[str, float],
    *,
    layer: bool = False,
) -> dict[str, float]:
    """Propagated noise times what checks showed beyond it.

    A tensor that was not checked yet takes the correction of the nearest checked one of its role, in
    forward order (however a restart has sorted the table). Where noise is handed on (not ``layer``), that
    may differ much from place to place, so what was not checked is never taken for less than white. Before
    any check a cautious figure holds: errors of normalisations leave something along x_hat that the layers
    before sum coherently (docs/theory.md).
    """
    roles = {tensor.key: tensor.role for tensor in tensors}
    order = {key: number for number, key in enumerate(costs)}
    result: dict[str, float] = {}
    for key, cost in costs.items():
        role = roles.get(key, Role.OTHER)
        checked = [other for other in order if other in corrections and roles.get(other) is role]
        nearest = min(checked, key=lambda other: abs(order[other] - order[key]), default=None)
        if nearest is None:
            factor = 1.0 if layer else _FIRST_CORRECTION.get(role, 1.0)
        else:
            factor = corrections[nearest] if layer or nearest == key else max(corrections[nearest], 1.0)
        result[key] = cost * factor
    return result


def gradient_energy(nodes: Iterable[NodeStatistics]) -> float:
    """Squared L2 norm of all parameter gradients (each use of a shared parameter by itself)."""
    return sum(edge.energy for node in nodes for edge in node.edges if edge.parameter)


def _reach(nodes: Iterable[NodeStatistics]) -> dict[int, float]:
    """Node number -> squared error in all parameters per unit of squared noise in its output gradient."""
    reach: dict[int, float] = {}
    # A node's number is above those it leads to, so ``reach`` knows these already.
    for node in sorted(nodes, key=lambda node: node.number):
        total = 0.0
        for edge in node.edges:
            if edge.gain is not None:
                total += edge.gain
            elif node.grad_energy > 0.0:
                total += edge.energy / node.grad_energy * _arrival(edge, reach)
        reach[node.number] = total
    return reach


def _arrival(edge: Edge, reach: Mapping[int, float]) -> float:
    """What noise already on this edge's gradient costs: itself at a parameter, else what follows."""
    if edge.parameter or edge.gain is not None:
        return 1.0
    return 0.0 if edge.target is None else reach.get(edge.target, 0.0)

"""The error law (docs/theory.md): what errors cost in the gradient, and how tensors share one budget."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from squeezebox.schema import Edge, NodeStatistics, Role, TensorStatistics

UNIFORM = 1.0 / 3.0
"""Variance of an error spread evenly over [-bound, bound], for a unit bound."""


def linear(nonzero: float, fan: float, grad_energy: float) -> float:
    """Squared weight-gradient error of an operator linear in its saved input, for a unit bound.

    ``E||err dW||^2 = (1/3) * R * C_in*k^2 * ||delta||^2``: every weight sums over batch and positions
    an independent error times the output gradient. The same sum, with other fans, serves products.

    Args:
        nonzero: fraction R of the input that is not exactly zero; zeros carry no error.
        fan: weights per output channel, C_in * k^2 / groups (less what padding cuts off).
        grad_energy: squared L2 norm of the output gradient, ||delta||^2.
    """
    return UNIFORM * nonzero * fan * grad_energy


def valid_fraction(size_in: int, size_out: int, taps: int, stride: int, padding: int, dilation: int) -> float:
    """Share of (output position, tap) pairs of one axis that read the input rather than padding."""
    if size_out <= 0 or taps <= 0:
        return 0.0
    valid = 0
    for tap in range(taps):
        offset = tap * dilation - padding
        first = max(0, -(offset // stride))
        last = min(size_out - 1, (size_in - 1 - offset) // stride)
        valid += max(0, last - first + 1)
    return valid / (size_out * taps)


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
                total += edge.gain * _arrival(edge, reach)
            elif node.grad_energy > 0.0:
                total += edge.energy / node.grad_energy * _arrival(edge, reach)
        reach[node.number] = total
    return reach


def _arrival(edge: Edge, reach: Mapping[int, float]) -> float:
    """What noise already on this edge's gradient costs: itself at a parameter, else what follows."""
    if edge.parameter:
        return 1.0
    unseen = 0.0 if edge.gain is None else 1.0  # a weight from before the step
    return unseen if edge.target is None else reach.get(edge.target, unseen)


_ROUNDS = 8


def allocate(
    noise: float,
    tensors: Sequence[TensorStatistics],
    sensitivities: Mapping[str, float],
    *,
    highest_share: float,
) -> dict[str, float]:
    """Bounds that minimise the entropy-coded bits at a given relative gradient noise.

    Minimise ``sum_l n_l * rate_l(bound_l)`` subject to ``sum_l c_l * bound_l^2 <= noise``. Where
    ``rate = const - log2(bound)`` on the non-zero elements, the optimum gives each tensor a share of
    the noise in proportion to its non-zero count; where the bound nears the tensor's rms the rate flattens
    (:func:`rate_slope`) and so does its share. Bounds stop at ``highest_share`` times the rms,
    where hardly a bit is left to save; what they leave over goes to the others.

    Args:
        noise: allowed relative squared gradient error, the sum over all tensors.
        tensors: size, non-zero fraction and rms of each tensor.
        sensitivities: c_l, relative squared gradient error for a unit bound.
        highest_share: cap on bound / rms.

    Returns:
        key -> absolute bound; tensors that cannot be weighed (no rms) are left out.
    """
    known = [tensor for tensor in tensors if tensor.rms > 0.0]
    caps = {tensor.key: highest_share * tensor.rms for tensor in known}
    bounds = {tensor.key: 0.1 * caps[tensor.key] for tensor in known}
    for _ in range(_ROUNDS):
        weights = {
            tensor.key: tensor.numel * tensor.nonzero * rate_slope(bounds[tensor.key] / tensor.rms)
            for tensor in known
        }
        bounds = _fill(noise, weights, sensitivities, caps)
    return bounds


def rate_slope(share: float) -> float:
    """Bits saved per non-zero element and doubling of the bound, at bound = ``share`` * rms.

    One bit while the step is fine; a fit to the entropy of a quantised half-normal beyond.
    """
    return 1.0 / (1.0 + share**2)


def _fill(
    noise: float,
    weights: Mapping[str, float],
    sensitivities: Mapping[str, float],
    caps: Mapping[str, float],
) -> dict[str, float]:
    """Shares in proportion to the weights; the capped ones' surplus goes to the rest."""
    # in order, so that sums are the same to the bit
    free = [key for key in weights if sensitivities.get(key, 0.0) > 0.0]
    bounds = {key: caps[key] for key in weights}
    left = noise
    while free:
        total = sum(weights[key] for key in free)
        if not total:  # all zeros: no bit is to be saved, and what is not zero later costs noise
            bounds.update(dict.fromkeys(free, 0.0))
            break
        wanted = {key: math.sqrt(left * weights[key] / total / sensitivities[key]) for key in free}
        capped = {key for key in free if wanted[key] >= caps[key]}
        if not capped:
            bounds.update(wanted)
            break
        left -= sum(sensitivities[key] * caps[key] ** 2 for key in free if key in capped)
        free = [key for key in free if key not in capped]
    return bounds

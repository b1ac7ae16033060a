"""Sharing one noise budget among tensors so that the packed bits are fewest."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from squeezebox.schema import TensorStatistics

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
        wanted = {key: math.sqrt(left * weights[key] / total / sensitivities[key]) for key in free}
        capped = {key for key in free if wanted[key] >= caps[key]}
        if not capped:
            bounds.update(wanted)
            break
        left -= sum(sensitivities[key] * caps[key] ** 2 for key in free if key in capped)
        free = [key for key in free if key not in capped]
    return bounds

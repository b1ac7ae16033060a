"""The error law: what an elementwise error in a saved tensor does to a gradient (docs/theory.md)."""

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

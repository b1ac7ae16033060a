"""How much error each saved tensor may carry: the error law, its propagation, and bound controllers.

In: statistics of a due step (plain numbers). Out: one absolute error bound a tensor, and new state.
May touch: schema only; no torch, no tensors.
"""

from squeezebox.bounds._controllers import (
    Comet,
    Controller,
    ControllerState,
    Fixed,
    NoiseBudget,
    Planned,
    WarmUp,
    calibrated,
    predicted_noise,
    refresh_due,
)
from squeezebox.bounds.law import allocate, corrected, gradient_energy, propagate, rate_slope

__all__ = [
    "Comet",
    "Controller",
    "ControllerState",
    "Fixed",
    "NoiseBudget",
    "Planned",
    "WarmUp",
    "allocate",
    "calibrated",
    "corrected",
    "gradient_energy",
    "predicted_noise",
    "propagate",
    "rate_slope",
    "refresh_due",
]

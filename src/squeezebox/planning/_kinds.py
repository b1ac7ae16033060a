"""Arguments of another kind are refused before anything runs."""

from __future__ import annotations

import math
from numbers import Integral, Real

import torch

from squeezebox.schema import OptionError
from squeezebox.steps import check_optimizer


def check_kinds(model: object, noise: object = None, optimizer: object = None) -> None:
    """OptionError where the model is no module, the noise no number, or the optimizer none."""
    if not isinstance(model, torch.nn.Module):
        raise OptionError(f"model {model!r} is no torch.nn.Module; make one, and pass that.")
    check_noise(noise)
    check_optimizer(optimizer)


def check_noise(noise: object) -> None:
    """OptionError where it is given and no number."""
    if noise is not None and (isinstance(noise, bool) or not isinstance(noise, Real)):
        raise OptionError(f"noise {noise!r} is no number; give one such as 1e-3.")


def check_count(name: str, count: object) -> None:
    """OptionError where it is no whole number from 1 on."""
    if isinstance(count, bool) or not isinstance(count, Integral) or count < 1:
        raise OptionError(f"{name} {count!r} is no whole number from 1 on; give one.")


def check_time_limit(time_limit: object, budget: object) -> None:
    """OptionError where it is out of range, or goes with a budget."""
    if time_limit is None:
        return
    if budget is not None:
        raise OptionError("a plan for a budget takes the least time already; give budget or time_limit.")
    if isinstance(time_limit, bool) or not isinstance(time_limit, Real):
        raise OptionError(f"time_limit {time_limit!r} is no number; give one such as 1.3.")
    if not 1.0 <= float(time_limit) < math.inf:
        raise OptionError(
            f"time_limit {time_limit:g} is below 1 or not finite; it is a multiple of the plain step's time, "
            "such as 1.3."
        )

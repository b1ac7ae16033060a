"""A session begins."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch

from squeezebox.bounds import Controller
from squeezebox.capture import check_supported
from squeezebox.codecs import Codec
from squeezebox.memory import HEADROOM
from squeezebox.reports import StepPlan
from squeezebox.schema import AttachError, OptionError
from squeezebox.session._models import device_of
from squeezebox.session._policy import BoundPolicy
from squeezebox.session._replanning import Replanning
from squeezebox.session._session import Session, attached


def begin(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None,
    controller: Controller | None,
    *,
    plan: StepPlan | None = None,
    replanning: Replanning | None = None,
    checks_per_refresh: int = 1,
    overlapping: bool = False,
    arena: bool = False,
    places: Mapping[str, int] = MappingProxyType({}),
    codec: Codec | None = None,
) -> Session:
    """A session for a model that has none and can have one; without controller and plan nothing is lost.

    ``overlapping``: every forward is a step of its own, whatever still waits for its backward; no peak is
    measured, which would be of several at once. ``places``: what an arena is laid out for, in bytes by key.
    """
    if model in attached:
        raise AttachError(
            f"{type(model).__name__} is attached already. Call detach() on its session first, or go on "
            "with that one."
        )
    check_supported(model)
    if not (optimizer is None or isinstance(optimizer, torch.optim.Optimizer)):
        raise OptionError(
            f"optimizer is {optimizer!r}, not a torch.optim.Optimizer. Give the one that steps the model's "
            "parameters, such as torch.optim.SGD(model.parameters(), lr=0.1), or leave it out."
        )
    policy = BoundPolicy(controller, device_of(model).type == "cpu", codec)
    session = Session(model, optimizer, policy, checks_per_refresh, plan, replanning, overlapping, arena)
    if session._store.reserve is not None and places:
        session._store.reserve.plan(places, HEADROOM)
    attached.add(model)
    return session

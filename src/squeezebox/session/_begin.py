"""Steps of a model begin to be recorded."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch

from squeezebox import codecs
from squeezebox.bounds import Controller
from squeezebox.capture import check_supported
from squeezebox.memory import HEADROOM
from squeezebox.reports import StepPlan
from squeezebox.schema import AttachError, OptionError
from squeezebox.session._engine import Engine, attached
from squeezebox.session._policy import BoundPolicy
from squeezebox.session._replanning import Replanning
from squeezebox.steps import device_of


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
    codec: codecs.Codec | None = None,
    family: str = "entropy",
    checks: bool = False,
    waits: bool = True,
) -> Engine:
    """For a model that has none and can have one; without controller and plan nothing is lost.

    ``overlapping``: every forward is a step of its own, whatever still waits for its backward; no peak is
    measured, which would be of several at once. ``places``: what an arena is laid out for, in bytes by key.
    ``checks``: look for saved tensors that are overwritten. ``waits``: steps wait until kernels are compiled,
    where they are not; else their tensors are held exactly until then.
    """
    if model in attached:
        raise AttachError(
            f"{type(model).__name__} is attached already. Call detach() on its session first, or go on "
            "with that one."
        )
    _check_alone(model)
    check_supported(model)
    if not (optimizer is None or isinstance(optimizer, torch.optim.Optimizer)):
        raise OptionError(
            f"optimizer is {optimizer!r}, not a torch.optim.Optimizer. Give the one that steps the model's "
            "parameters, such as torch.optim.SGD(model.parameters(), lr=0.1), or leave it out."
        )
    policy = BoundPolicy(controller, device_of(model).type == "cpu", codec, family)
    engine = Engine(model, optimizer, policy, checks_per_refresh, plan, replanning, overlapping, arena)
    if engine.store.reserve is not None and places:
        engine.store.reserve.plan(places, HEADROOM)
    engine.recorder.hooks.checks = checks
    if not waits and policy.on_host:
        engine.store.ready = codecs.ready
    return engine


def _check_alone(model: torch.nn.Module) -> None:
    """Two sessions never see one forward: the inner one would capture nothing."""
    parts = set(model.modules())
    for other in attached:
        if other in parts or model in set(other.modules()):
            inner, outer = (other, model) if other in parts else (model, other)
            raise AttachError(
                f"{type(inner).__name__} is part of {type(outer).__name__}, and "
                f"{'it' if inner is other else 'that'} is attached already: of two sessions, one would "
                "capture nothing. Detach that one first, or go on with it."
            )

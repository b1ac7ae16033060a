"""What attach() returns, and how its steps begin to be recorded."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch

from squeezebox import bounds, codecs
from squeezebox.bounds import Controller, NoiseBudget
from squeezebox.capture import check_supported
from squeezebox.memory import HEADROOM, Elsewhere
from squeezebox.reports import Report, StepPlan, Timeline
from squeezebox.rewriting import Rewritten
from squeezebox.schema import AttachError, UnsupportedModelError
from squeezebox.session._engine import Engine, attached
from squeezebox.session._policy import BoundPolicy, Replanning
from squeezebox.session._records import STATE_VERSION, read_state
from squeezebox.session._timeline import take_timeline
from squeezebox.steps import check_optimizer, device_of

if TYPE_CHECKING:
    from squeezebox.session._balanced import Balanced


def begin(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None,
    controller: Controller | None,
    *,
    plan: StepPlan | None = None,
    place: Elsewhere | None = None,
    balanced: Balanced | None = None,
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
    measured, which would be of several at once. ``place``: where the plan's tensors are moved to, instead of
    where it says. ``balanced``: the plans that take turns, of which ``plan`` is in force. ``places``: what an
    arena is laid out for, in bytes by key. ``checks``: look for saved tensors that are overwritten.
    ``waits``: steps wait until kernels are compiled, where they are not; else their tensors are held exactly
    until then.
    """
    check_alone(model)
    check_supported(model)
    if (device := device_of(model)).type not in ("cpu", "cuda"):
        raise UnsupportedModelError(
            f"sessions are for the CPU and for CUDA, and the model is on {device}; move it with "
            "model.to('cpu')."
        )
    if controller is not None and any(hasattr(each, "addend_of_ranks") for each in model.modules()):
        raise UnsupportedModelError(
            "blocks of the model are split over ranks, which add up gradients, and the noise of such a sum "
            "has no law here. Attach with exact=True."
        )
    check_optimizer(optimizer)
    policy = BoundPolicy(controller, device.type == "cpu", codec, family)
    engine = Engine(
        model,
        optimizer,
        policy,
        checks_per_refresh,
        plan,
        place,
        balanced,
        replanning,
        overlapping,
        arena,
    )
    if engine.store.reserve is not None and places:
        engine.store.reserve.plan(places, HEADROOM)
    engine.recorder.hooks.checks = checks
    if not waits and policy.on_host:
        engine.store.ready = codecs.ready
    return engine


def check_alone(model: torch.nn.Module) -> None:
    """AttachError where a session sees its forward: of two, the inner one would capture nothing."""
    if model in attached:
        raise AttachError(
            f"{type(model).__name__} is attached already. Call detach() on its session first, or go on "
            "with that one."
        )
    parts = set(model.modules())
    for other in attached:
        if other in parts or model in set(other.modules()):
            inner, outer = (other, model) if other in parts else (model, other)
            raise AttachError(
                f"{type(inner).__name__} is part of {type(outer).__name__}, and "
                f"{'it' if inner is other else 'that'} is attached already: of two sessions, one would "
                "capture nothing. Detach that one first, or go on with it."
            )


class Session:
    """A model under Squeezebox; made by :func:`attach`. ``engine`` is for those who measure its steps.

    ``rewritten`` has the table of rewrites, after ``attach(rewrite=True)``.
    """

    def __init__(self, engine: Engine, rewritten: Rewritten | None = None) -> None:
        self.engine, self.rewritten = engine, rewritten

    @contextlib.contextmanager
    def step(self, batch: Any = ()) -> Iterator[None]:
        """Around forward and loss: also covers what a loss outside the model saves.

        Args:
            batch: tensors that the loop holds until backward, which are then held as they are. The inputs of
                the model's own calls are known; give those of calls of its parts.

        Raises:
            AttachError: the session is detached.
        """
        with self.engine.framed(batch):
            yield

    def report(self) -> Report:
        """The last step's memory, noise and tensors.

        Raises:
            AttachError: no training step was seen yet.
        """
        self.engine.close_step()
        if self.engine.records.latest is None:
            raise AttachError(
                "there is nothing to report: no forward pass with gradients was captured since attach(). "
                + "".join(f"{note[:1].upper()}{note[1:]}. " for note in self.engine.notes)
                + "Train one step first (model.train(), loss.backward())."
            )
        return Report(self.engine.records.latest())

    def measure_noise(self, closure: Callable[[], object]) -> float:
        """Measure the relative gradient noise directly: the same step twice, exact and squeezed.

        Args:
            closure: runs forward, loss and backward on one batch, without the optimizer's step.

        Returns:
            Squared error of all parameter gradients over their squared norm. The gradients of model and
            optimizer, buffers and random states are as before; those of other tensors, such as an input's,
            grow by two backward passes. The figure is also the report's ``noise``.

        Raises:
            AttachError: detached, or the closure left no gradients, or such as are not finite.
        """
        noise = self.engine.noise_of(closure)
        if not math.isfinite(noise):
            raise AttachError(
                "measure_noise() saw no gradient, or one that is not finite: the closure must run forward, "
                "the loss and loss.backward() on a model whose parameters require gradients."
            )
        self.engine.records.noise = noise
        return noise

    def calibrate(self, closure: Callable[[], object]) -> float:
        """Measure the noise as :meth:`measure_noise` does, and correct the bounds by it from now on.

        The error law and its checks of single tensors predict a whole step's noise to within a factor of two
        or so, and from batch to batch it differs as much. So bounds go half the way (in its logarithm), but
        all of it at once where noise is more than twice what was predicted. Do it from time to time.

        Returns:
            The noise before the correction.

        Raises:
            AttachError: detached, no gradients, or the bounds do not follow from ``noise=``.
        """
        policy = self.engine.policy
        if not isinstance(policy.controller, NoiseBudget):
            raise AttachError(
                "calibrate() corrects the bounds that follow from attach(noise=...); this session's are "
                "given by a plan, a bound or another controller. measure_noise() measures without correcting."
            )
        noise = self.measure_noise(closure)
        predicted = self.engine.records.predicted_noise(self.engine.plan)
        ratio = noise / predicted if predicted else 0.0
        if 0.0 < ratio < math.inf:
            policy.state = bounds.calibrated(policy.state, ratio, policy.controller.noise)
        return noise

    def timeline(self, closure: Callable[[], object]) -> Timeline:
        """Run one step under a profiler, and say where its time and memory go, module by module.

        The closure runs twice, first without the profiler for the step's own seconds: steps like any other
        for model and optimizer, but the session gathers no statistics in them, and does not count them. Take
        it after some steps, when bounds and optimizer state are what they will be.

        Args:
            closure: runs forward, loss and backward on one batch, and the optimizer's step.

        Raises:
            AttachError: detached, or the closure ran no backward.
            OptionError: another profiler is active.
        """
        self.engine.require_attached()
        self.engine.close_step()
        self.engine.abandon()
        return Timeline(take_timeline(self.engine, closure))

    def detach(self) -> None:
        """Leave the model as it was, and close what the session opened. Safe to call twice.

        A backward that still waits gets its tensors; the file that holds them is closed after it. It is
        refused by torch where the plan holds weights as bfloat16 and a rest: call it before.
        """
        self.engine.detach()
        if self.rewritten is not None:
            self.rewritten.undo()

    def state_dict(self) -> dict[str, object]:
        """Bounds, sensitivities and counters as plain values; resuming from them is exact."""
        engine = self.engine
        engine.close_step()
        if not (engine.recorder.active or engine.store.in_use):
            engine.abandon()  # nothing was saved in it: it counts once a forward comes
        counts = engine.refreshes.counts
        return {
            "version": STATE_VERSION,
            "step": engine.step,
            "counts": [counts[True], counts[False]],
            "controller": engine.policy.state.to_dict(),
            "regions": engine.recorder.regions.latest,
            "first": engine.refreshes.first,
            "late_values": {key: role.value for key, role in engine.store.late_values.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where :meth:`state_dict` was taken.

        Raises:
            FormatError: the state is damaged or of a newer version.
        """
        read, engine = read_state(state), self.engine
        engine.close_step()  # of before, and no part of what is loaded
        engine.abandon()
        engine.policy.state, engine.step, engine.store.late_values = (
            read.controller,
            read.step,
            read.late_values,
        )
        engine.refreshes.counts, engine.refreshes.first = read.counts, read.first
        engine.began_at = read.step + 1
        engine.recorder.regions.known = read.regions

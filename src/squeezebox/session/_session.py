"""A model under Squeezebox, step by step.

Reading order: ``Session._start`` and ``Session._finish`` frame every forward pass; ``Session._close_step``
is where a due step's statistics become new bounds.
"""

from __future__ import annotations

import contextlib
import functools
import math
import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch

from squeezebox import bounds as bounds_room
from squeezebox.bounds import NoiseBudget, Planned
from squeezebox.capture import (
    Collector,
    Installation,
    Recorder,
    Row,
    Slicer,
    Store,
    foreign_hooks,
    in_backward,
    is_innermost,
)
from squeezebox.profiling import PeakMeter, live_bytes
from squeezebox.reports import Report, StepPlan, Timeline
from squeezebox.schema import ArenaRecord, AttachError, BoundRecord, Check, Region, Role, StepRecord
from squeezebox.session._growth import Growth
from squeezebox.session._models import (
    device_of,
    gradient_noise,
    held_by,
    mean_momentum,
    names_of,
    nbytes_of,
    persistent,
    restored,
    tensors_in,
)
from squeezebox.session._places import places_of
from squeezebox.session._policy import BoundPolicy, admit, refuse_unsound
from squeezebox.session._records import Totals, record_of
from squeezebox.session._replanning import Replanning, shapes_of
from squeezebox.session._state import STATE_VERSION, read_state
from squeezebox.session._timeline import Subject, bounds_of, take_timeline

_UNKNOWN_COUNT = 64  # lossy tensors of a model, before the first step has counted them
_HISTORY = 128  # refreshes whose bounds are remembered: those of 11,000 steps
_GOLDEN = (math.sqrt(5.0) - 1.0) / 2.0  # multiples of it spread evenly over the unit interval

attached: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()


class Session:
    """A model under Squeezebox; made by :func:`attach`."""

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer | None,
        policy: BoundPolicy,
        checks_per_refresh: int = 1,
        plan: StepPlan | None = None,
        replanning: Replanning | None = None,
        overlapping: bool = False,
        arena: bool = False,
    ) -> None:
        self._model = model
        self._overlapping = overlapping
        self._optimizer = optimizer
        self._policy = policy
        self._store = Store(policy)
        if not policy.on_host:
            self._store.use_device(device_of(model))
        if arena:
            self._store.use_arena()
        self._recorder = Recorder(self._store)
        self._notes: dict[str, None] = {}
        self._growth = Growth(notes=self._notes)
        self._replanning = replanning
        self._plan: StepPlan | None = None
        if plan is not None:
            self._use(plan)
        self._meter = PeakMeter(device_of(model))
        self._depth, self._step = 0, -1
        self._checks_per_refresh = checks_per_refresh
        self._counts = {True: _UNKNOWN_COUNT, False: _UNKNOWN_COUNT}
        self._collector: Collector | None = None
        self._checks: list[Check] = []
        self._history: deque[BoundRecord] = deque(maxlen=_HISTORY)
        self._shown: list[Callable[[Iterable[torch.Tensor]], None]] = []  # get every forward's inputs
        self._freeze: Callable[[], StepRecord] | None = None  # the last closed step, when somebody asks
        self._peaks: tuple[int, int, int | None] | None = None
        self._refresh_peak: int | None = None
        self._floor: int | None = None
        self._noise: float | None = None
        self._baseline = 0
        self._open = self._replaying = False
        framed = Installation(model, self._recorder, self._start, self._finish)
        self._installation: Installation | None = framed

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Around forward and loss: also covers what a loss outside the model saves.

        Raises:
            AttachError: the session is detached.
        """
        self._require_attached()
        failed = True
        try:
            self._start(())
            yield
            failed = False
        finally:
            self._finish(failed)

    def report(self) -> Report:
        """The last step's memory, noise and tensors.

        Raises:
            AttachError: no training step was seen yet.
        """
        self._close_step()
        if self._freeze is None:
            raise AttachError(
                "there is nothing to report: no forward pass with gradients was seen since attach(). "
                "Train one step first (model.train(), loss.backward())."
            )
        return Report(self._freeze())

    def measure_noise(self, closure: Callable[[], object]) -> float:
        """Measure the relative gradient noise directly: the same step twice, exact and squeezed.

        Args:
            closure: runs forward, loss and backward on one batch, without the optimizer's step.

        Returns:
            Squared error of all parameter gradients over their squared norm. Gradients, buffers and
            random states are as before; the figure is also the report's ``noise``.

        Raises:
            AttachError: detached, or the closure left no gradients, or such as are not finite.
        """
        noise = self._noise_of(closure)
        if not math.isfinite(noise):
            raise AttachError(
                "measure_noise() saw no gradient, or one that is not finite: the closure must run forward, "
                "the loss and loss.backward() on a model whose parameters require gradients."
            )
        self._noise = noise
        return noise

    def calibrate(self, closure: Callable[[], object]) -> float:
        """Measure the noise as :meth:`measure_noise` does, and correct the bounds by it from now on.

        The error law and its checks of single tensors foretell a whole step's noise to within a factor of two
        or so, and from batch to batch it differs as much. So bounds go half the way (in its logarithm), but
        all of it at once where noise is more than twice what was predicted. Do it from time to time.

        Returns:
            The noise before the correction.

        Raises:
            AttachError: detached, no gradients, or the bounds do not follow from ``noise=``.
        """
        if not isinstance(self._policy.controller, NoiseBudget):
            raise AttachError(
                "calibrate() corrects the bounds that follow from attach(noise=...); this session's are "
                "given by a plan, a bound or another controller. measure_noise() measures without correcting."
            )
        noise = self.measure_noise(closure)
        lossy = {row.key: row.bound for row in self._store.rows if row.bound > 0.0}
        predicted = self._predicted_noise(lossy)
        if noise and predicted:
            self._policy.state = bounds_room.calibrated(self._policy.state, noise / predicted)
        return noise

    def _noise_of(self, closure: Callable[[], object]) -> float:
        """As :meth:`measure_noise`; NaN where there is no gradient."""
        self._require_attached()
        self._close_step()
        with restored(self._model):
            self._slice(None)
            try:
                exact = self._replay(closure, bypass=True)
            finally:
                self._slice(self._plan.region if self._plan else None)
        with restored(self._model):
            return gradient_noise(exact, self._replay(closure, bypass=False))

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
        self._require_attached()
        self._close_step()
        self._abandon()
        subject = Subject(self._model, self._optimizer, self._store, self._plan, self._history, self._shown)
        return Timeline(take_timeline(subject, closure, self._uncounted_step, self._record_now))

    def detach(self) -> None:
        """Take every hook off the model and end a running measurement. Safe to call twice."""
        if self._installation is None:
            return
        self._close_step()
        self._abandon()
        self._installation.remove()
        self._installation = None
        self._store.reserve = None
        self._store.clear()
        attached.discard(self._model)

    def state_dict(self) -> dict[str, object]:
        """Bounds, sensitivities and counters as plain values; resuming from them is exact."""
        self._close_step()
        if not (self._recorder.active or self._store.in_use):
            self._abandon()  # nothing was saved in it: it counts once a forward comes
        return {
            "version": STATE_VERSION,
            "step": self._step,
            "counts": [self._counts[True], self._counts[False]],
            "controller": self._policy.state.to_dict(),
            "late_values": {key: role.value for key, role in self._store.late_values.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where :meth:`state_dict` was taken.

        Raises:
            FormatError: the state is damaged or of a newer version.
        """
        read = read_state(state)
        self._policy.state, self._step, self._store.late_values = read.controller, read.step, read.late_values
        self._counts = read.counts

    def _start(self, inputs: Any) -> None:
        """A forward pass begins (the model's own, or step() around it)."""
        if self._replanning is not None and inputs and self._is_outermost():
            self._fit_plan(self._replanning, inputs)
        self._depth += 1
        if self._recorder.active:
            self._recorder.own(tensors_in(inputs))
        if self._depth > 1 or not torch.is_grad_enabled() or in_backward():
            return
        if foreign_hooks():
            self._notes["other saved-tensor hooks were active around a forward: it was left alone"] = None
            return
        if self._overlapping or self._recorder.backward_seen or not self._open or not self._store.in_use:
            self._open_step()
        self._enter(inputs)

    def _enter(self, inputs: Any) -> None:
        own = [*held_by(self._model), *tensors_in(inputs)]
        for show in self._shown:
            show(tensors_in(inputs))
        self._recorder.own(own)
        if self._meter.running:
            self._baseline = max(self._baseline, nbytes_of(own + self._persistent()))
        self._recorder.__enter__()

    def _is_outermost(self) -> bool:
        """Whether the forward that begins is the model's own, of a step that is recorded."""
        if self._replaying or not torch.is_grad_enabled() or in_backward():
            return False
        return self._depth == 0 or (self._depth == 1 and self._recorder.active)

    def _use(self, plan: StepPlan) -> None:
        """Hold tensors as the plan says from now on."""
        self._plan, self._policy.controller = plan, Planned(bounds=plan.bounds)
        self._store.keep, self._store.offload = plan.kept, plan.offloaded
        self._store.recompute, self._store.signed = plan.recomputed, plan.signed
        self._store.lineage = self._recorder.lineage() if plan.recomputed else None
        self._store.late_values = {key: Role(role) for key, role in plan.late_values.items()}
        self._store.room = plan.lasting_bytes
        self._store.plan_arena(*places_of(plan))
        planned = {tensor.key: tensor.saved_bytes for tensor in plan.tensors}
        planned |= dict.fromkeys(plan.region.keys if plan.region else (), sys.maxsize)  # see Slicer
        self._slice(plan.region)
        notes = None if self._replanning is None else self._notes
        self._store.admit = functools.partial(admit, plan.model, planned, notes)

    def _fit_plan(self, known: Replanning, inputs: Any) -> None:
        """Before a forward: use the plan that covers its inputs, or make one."""
        shapes = shapes_of(inputs)
        plan = known.covering(shapes)
        if plan is None and known.planner is not None:
            why = known.failed.get(shapes) or self._why_no_plan(inputs)
            if not why:
                with self._aside():
                    plan, why = known.make(shapes, inputs[0])
            if why:
                self._notes[f"some inputs have no plan of their own: {why}"] = None
        if plan is not None and plan is not self._plan:
            self._use(plan)

    def _why_no_plan(self, inputs: Any) -> str:
        if inputs[1]:
            return "they have keyword arguments"
        if self._open and self._store.in_use and not self._recorder.backward_seen:
            return "an earlier forward was waiting for its backward"
        if self._recorder.active and not is_innermost(self._recorder):
            return "other function modes or saved-tensor hooks were active"
        return ""

    @contextlib.contextmanager
    def _aside(self) -> Iterator[None]:
        """The model as if it had no session, and everything back in place afterwards."""
        active = self._recorder.active
        if active:
            self._recorder.__exit__(None, None, None)
        self._close_step()
        self._meter.abandon()
        if self._installation is not None:
            self._installation.remove()
        attached.discard(self._model)
        try:
            yield
        finally:
            attached.add(self._model)
            self._installation = Installation(self._model, self._recorder, self._start, self._finish)
            if active:
                self._enter(())

    def _finish(self, failed: bool) -> None:
        """A forward pass ended, or raised."""
        self._depth = max(0, self._depth - 1)
        if self._depth == 0 and self._recorder.active:
            self._recorder.path.clear()
            error = RuntimeError if failed else None
            self._recorder.__exit__(error, None, None)
            if self._recorder.slicer is not None and not failed:
                self._notes[self._recorder.slicer.note] = None

    def _abandon(self) -> None:
        """Give up a step whose backward was never run, as if it had not begun."""
        self._meter.abandon()
        if self._open and not self._replaying:
            self._open, self._step = False, self._step - 1
        if self._collector is not None:
            self._collector.close()
            self._collector = self._recorder.collector = None

    def _open_step(self) -> None:
        if self._plan is not None:
            refuse_unsound(self._plan, self._model)
        self._close_step()
        self._abandon()
        self._recorder.start_step()
        self._open = True
        self._baseline = 0
        if not self._replaying:
            self._step += 1
            self._growth.observe(live_bytes(device_of(self._model)))
        measured = self._replaying or self._due(self._step) or self._due(self._step - 1)
        guessed = self._step <= 1 and self._due(0)  # the first step's bounds
        self._store.start_places(measured=measured, guessed=guessed)
        if self._replaying:
            return
        if self._policy.controller is not None and self._policy.controller.due(self._step):
            self._collector = self._recorder.collector = Collector(
                self._store, names_of(self._model), self._is_checked, self._step
            )
        is_plain = self._step == 0 or (self._due(self._step - 1) and self._collector is None)
        if is_plain and not self._overlapping:
            self._meter.start(self._persistent())

    def _close_step(self) -> None:
        """After a backward: read the meter, turn due statistics into new bounds."""
        if not self._open or not self._recorder.backward_seen:
            return
        self._open = self._recorder.backward_seen = False
        if self._store.blocks is not None:
            self._store.blocks.end_step()
        if self._replaying:
            return
        if self._meter.running:
            peak = self._meter.stop(self._persistent())
            if self._collector is None:
                self._peaks = (self._baseline + peak.total_bytes, peak.activation_bytes, peak.split_bytes)
            else:
                self._refresh_peak = self._baseline + peak.total_bytes
        collector, self._collector, self._recorder.collector = self._collector, None, None
        if collector is not None:
            collector.close()
        if collector is not None and self._policy.controller is not None and collector.usable:
            statistics = collector.result(mean_momentum(self._model, self._optimizer))
            self._checks.extend(statistics.checks)
            self._floor, self._counts = collector.floor_bytes, collector.counts
            self._policy.state = self._policy.controller.update(self._policy.state, statistics)
            self._history.append(bounds_of(self._step, self._store.rows))
        self._freeze = self._record_now()

    def _record_now(self) -> Callable[[], StepRecord]:
        """Makes the record of the step that has just been closed."""
        small, borrowed = sum(self._store.small.values()), sum(self._store.borrowed.values())
        arena = self._store.reserve.record if self._store.reserve is not None else None
        return functools.partial(self._frozen, self._step, self._store.rows, small, borrowed, arena)

    def _frozen(
        self, step: int, rows: list[Row], small: int, borrowed: int, arena: ArenaRecord | None
    ) -> StepRecord:
        """A closed step as the report has it; waits for a device."""
        use = self._store.blocks.settle() if self._store.blocks is not None else None
        lossy = {row.key: row.bound for row in rows if row.bound > 0.0}
        totals = Totals(
            step=step,
            small_bytes=small,
            borrowed_bytes=borrowed,
            peaks=self._peaks or (self._refresh_peak, None, None),
            refresh_peak_bytes=self._refresh_peak,
            floor_bytes=self._floor,
            noise=self._measured_noise(),
            predicted_noise=self._predicted_noise(lossy),
            arena=arena,
        )
        notes = (*self._notes, *(self._store.blocks.notes if self._store.blocks is not None else ()))
        return record_of(
            rows, use, self._policy.state.sensitivities, totals, self._plan, tuple(self._checks), notes
        )

    def _predicted_noise(self, lossy: dict[str, float]) -> float | None:
        """What the plan, or the error law, expects of these bounds; nothing lossy is no noise."""
        if not lossy:
            return 0.0
        if self._plan is not None:
            return self._plan.predicted_noise
        return bounds_room.predicted_noise(self._policy.state, lossy)

    def _measured_noise(self) -> float | None:
        """What measure_noise() found; nothing lossy is no noise."""
        return 0.0 if self._policy.controller is None else self._noise

    def _replay(self, closure: Callable[[], object], *, bypass: bool) -> list[torch.Tensor]:
        """Gradients of one run of the closure, outside the count of steps."""
        parameters = [parameter for parameter in self._model.parameters() if parameter.requires_grad]
        for parameter in parameters:
            parameter.grad = None
        with self._uncounted(bypass=bypass):
            closure()
        return [torch.zeros_like(each) if each.grad is None else each.grad for each in parameters]

    @contextlib.contextmanager
    def _uncounted(self, *, bypass: bool = False) -> Iterator[None]:
        self._replaying, self._recorder.bypass, self._open = True, bypass, False
        try:
            yield
        finally:
            self._replaying = self._recorder.bypass = self._open = self._recorder.backward_seen = False

    @contextlib.contextmanager
    def _uncounted_step(self) -> Iterator[None]:
        with self._uncounted():
            yield
            if not self._recorder.backward_seen:
                raise AttachError(
                    "timeline() saw no backward: its closure must run forward, the loss and loss.backward()."
                )
            self._close_step()

    def _slice(self, region: Region | None) -> None:
        self._recorder.slicer = None if region is None else Slicer(region, self._recorder)

    def _due(self, step: int) -> bool:
        return step >= 0 and self._policy.controller is not None and self._policy.controller.due(step)

    def _is_checked(self, weighted: bool, number: int) -> bool:
        """Whether the lossy tensor of this running number is checked now; turns cover all evenly."""
        count = max(self._counts[weighted], 1)
        first = int(self._policy.state.updates * _GOLDEN % 1.0 * count)
        return (number - first) % count < self._checks_per_refresh

    def _persistent(self) -> list[torch.Tensor]:
        return persistent(self._model, self._optimizer)

    def _require_attached(self) -> None:
        if self._installation is None:
            raise AttachError("this session is detached; call squeezebox.attach(model, ...) again.")

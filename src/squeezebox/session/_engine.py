"""A model's training steps as they run under Squeezebox.

Reading order: ``Engine.start`` and ``Engine.finish`` frame every forward pass; ``Engine.close_step`` is where
a due step's statistics become new bounds.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.hooks import RemovableHandle

from squeezebox.bounds import Planned
from squeezebox.capture import Installation, Recorder, Slicer, Store
from squeezebox.memory import Elsewhere, Peak, PeakMeter, Weights, freed_returned, is_scarce, live_bytes
from squeezebox.optim import Updates
from squeezebox.reports import StepPlan
from squeezebox.schema import Action, AttachError, Region, Role
from squeezebox.session._offload import make_room, updates_of, weights_of
from squeezebox.session._passes import Passes
from squeezebox.session._policy import BoundPolicy, Replanning, admit, refuse_unsound, shapes_of
from squeezebox.session._records import Growth, Records, Refreshes, note_excess
from squeezebox.steps import (
    device_of,
    gradient_noise,
    held_by,
    mean_momentum,
    nbytes_of,
    persistent,
    restored,
    tensors_in,
    viewed_bytes,
)

if TYPE_CHECKING:
    from squeezebox.session._balanced import Balanced

_SCARCE = "little memory is free, so freed blocks go back to the system at once, which takes time"
attached: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()


class Engine:
    """What a session works with, and so does every measurement of steps.

    Attributes:
        model: whose forwards are recorded.
        optimizer: read only.
        policy: which codec and bound a tensor gets.
        store: the tensors that the running step holds.
        recorder: what sees them being saved.
        refreshes: the steps that gather statistics.
        updates: those of the optimizer, where the plan makes them one by one.
        weights: frozen ones that the plan has in a file or packed, if any.
        records: what is known of the closed steps.
        plan: in force, if any.
        notes: for the report, in order.
        step: the number of the last step, from 0; -1 before it.
        began_at: the number of the session's first step: after what was loaded.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer | None,
        policy: BoundPolicy,
        checks_per_refresh: int = 1,
        plan: StepPlan | None = None,
        place: Elsewhere | None = None,
        balanced: Balanced | None = None,
        replanning: Replanning | None = None,
        overlapping: bool = False,
        arena: bool = False,
    ) -> None:
        self.model, self.optimizer, self.policy = model, optimizer, policy
        self.store = Store(policy)
        self.store.spill.folder = place
        if not policy.on_host:
            self.store.use_device(device_of(model))
        if arena:
            self.store.use_arena()
        self.recorder = Recorder(self.store, model)
        self.recorder.hooks.overlapping = overlapping
        self.notes: dict[str, None] = {}
        self.refreshes = Refreshes(policy, checks_per_refresh)
        self.records = Records(store=self.store, policy=policy, notes=self.notes)
        self.plan: StepPlan | None = None
        self.step, self.began_at = -1, 0
        self._overlapping, self._replanning = overlapping, replanning
        self._balanced = balanced
        self.measures_peaks, self.checks_budget = not overlapping, True
        self._passes = Passes(self.recorder, self.notes)
        self._growth = Growth(notes=self.notes)
        self.updates: Updates | None = None
        self.weights: Weights | None = None
        self._returning = contextlib.ExitStack()  # of what is elsewhere under a plan
        if plan is not None:
            with self._returning:  # should something fail
                self._use(plan)
                self.update_by(updates_of(plan, model, optimizer))
                self.weights = weights_of(plan, model)
                if self.weights is not None:
                    self._returning.callback(self.weights.close)
                    self.store.loans = self.weights.loans
                if is_scarce(plan.predicted_peak_bytes, device_of(model)):
                    self._returning.enter_context(freed_returned(small=True))
                    self.notes[_SCARCE] = None
                self._returning = self._returning.pop_all()
        elif policy.controller is not None:
            self.store.spares = self.recorder.regions.spares
        self._meter = PeakMeter(device_of(model))
        self._peak: Peak | None = None  # of the running step, once that is measured
        self._lasting = functools.partial(persistent, model, optimizer)
        self._baseline_bytes = self._gradient_bytes = 0  # before the step
        self._stepped_at = sys.maxsize  # after which of the steps the optimizer made its state
        self._largest_bytes = -1  # of inputs of a step that was measured
        self._open = self._replaying = False
        self.installation: Installation | None = Installation(model, self.start, self.finish)
        attached.add(model)

        def stepped(*_: object) -> None:
            """The step is over, and others may want torch's only profiler."""
            if self.step < self._stepped_at:  # steps so far had less
                self._stepped_at, self._largest_bytes = self.step, -1
            if self.recorder.hooks.backward_seen:
                self._peak = self._meter.end(self._lasting) or self._peak

        self._step_hook = _hooked(optimizer, stepped)

    def update_by(self, updates: Updates | None) -> None:
        """Have the optimizer's updates made so; None leaves them to it."""
        self.updates = updates
        if updates is not None:
            self._returning.callback(updates.close)
            self.records.update_noise = updates.noise

    def require_attached(self) -> None:
        """AttachError after :meth:`detach`."""
        if self.installation is None:
            raise AttachError("this session is detached; call squeezebox.attach(model, ...) again.")

    def detach(self) -> None:
        """See :meth:`Session.detach`."""
        if self.installation is None:
            return
        if self.updates is not None:
            self.updates.weights.require_exchangeable()
        self.close_step()
        self.abandon()
        self.installation.remove()
        self.installation = None
        if self._step_hook is not None:
            self._step_hook.remove()
        attached.discard(self.model)
        self.store.close()
        self._returning.close()

    @contextlib.contextmanager
    def framed(self, batch: Any = ()) -> Iterator[None]:
        """Around forward and loss; see :meth:`Session.step`."""
        self.require_attached()
        failed = True
        try:
            self.start(())
            if self.recorder.active:
                self._measure(viewed_bytes(tensors_in(batch)))
                self._meter.given(self.recorder.own(tensors_in(batch)))
            yield
            failed = False
        finally:
            self.finish(failed)

    def start(self, inputs: Any) -> None:
        """A forward pass begins: the model's own; or, without inputs, :meth:`framed`."""
        if self.updates is not None:
            self.updates.check_forward()
        self._passes.begin(of_step=not inputs)
        outermost = bool(inputs) and self._passes.outermost
        if self._replanning is not None and outermost and not self._replaying:
            self._fit_plan(self._replanning, inputs)
        if self.recorder.active:  # under step(), after the baseline
            if outermost:
                self._measure(viewed_bytes(tensors_in(inputs)))
            self._meter.given(self.recorder.own(tensors_in(inputs)))
        if not self._passes.is_left_alone():
            begun = self._open and not self.recorder.hooks.backward_seen
            if self._overlapping or not begun or not self.store.in_use:
                self._open_step(viewed_bytes(tensors_in(inputs)))
            self._enter(inputs)
        self._passes.count += outermost

    def finish(self, failed: bool) -> None:
        """A forward pass ended, or raised."""
        if self._passes.end() and self.recorder.active:
            error = RuntimeError if failed else None
            self.recorder.__exit__(error, None, None)
            if self.recorder.slicer is not None and not failed:
                self.notes[self.recorder.slicer.note] = None
            if failed and self._passes.count <= 1 and not self.recorder.hooks.backward_seen:
                self.abandon()  # what it leaves may live on with its error, and has no backward
            elif failed:
                self._meter.abandon()  # nobody else could measure until the next step
            elif self._passes.was_hidden():
                self.abandon()

    def close_step(self) -> None:
        """After a backward: read the meter, turn due statistics into new bounds."""
        if not self._open or not self.recorder.hooks.backward_seen:
            return
        self._open = self.recorder.hooks.backward_seen = False
        if self.store.blocks is not None:
            self.store.blocks.end_step()
        if self._replaying:
            return
        collector = self.refreshes.end(self.recorder)
        peak, self._peak = self._meter.end(self._lasting) or self._peak, None
        if peak is not None:
            lasting = persistent(self.model, self.optimizer)
            usual = collector is None and not self.store.unready
            self.records.note_peak(self.step, peak, self._baseline_bytes, usual=usual)
            if self.plan is not None and usual and self.checks_budget:
                reached = self._baseline_bytes + peak.total_bytes
                state_bytes = nbytes_of(lasting) - nbytes_of(persistent(self.model, None))
                note_excess(self.plan, reached, self._gradient_bytes, state_bytes, self.notes)
        if collector is not None and collector.usable:
            statistics = collector.result(mean_momentum(self.model, self.optimizer))
            self.refreshes.counts = collector.counts
            self.policy.learn(statistics, self.notes)
            self.records.note_statistics(self.step, collector, statistics.checks)
        self.records.latest = self.records.now(self.step, self.plan)

    def abandon(self) -> None:
        """Give up a step whose backward was never run, as if it had not begun."""
        self._meter.abandon()
        self._peak = None
        if self._open and not self._replaying:
            self._open, self.step = False, self.step - 1
        self.refreshes.end(self.recorder)

    def replay(self, closure: Callable[[], object], *, bypass: bool) -> list[torch.Tensor]:
        """Gradients of one run of the closure, outside the count of steps; ``bypass`` keeps all."""
        parameters = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        paused = contextlib.nullcontext() if self.updates is None else self.updates.paused()
        for parameter in parameters:
            parameter.grad = None
        with paused, self._uncounted(bypass=bypass):
            closure()
        return [torch.zeros_like(each) if each.grad is None else each.grad for each in parameters]

    @contextlib.contextmanager
    def uncounted_step(self) -> Iterator[None]:
        """Around a step that gathers no statistics, and has no number."""
        self.store.ready = None  # as in noise_of
        with self._uncounted():
            yield
            if not self.recorder.hooks.backward_seen:
                raise AttachError(
                    "timeline() saw no backward: its closure must run forward, the loss and loss.backward()."
                )
            self.close_step()

    def noise_of(self, closure: Callable[[], object]) -> float:
        """Relative gradient noise of a step that is run twice, exact and squeezed; NaN without gradients."""
        self.require_attached()
        self.close_step()
        self.store.ready = None  # a measured step is packed, and waits for its kernels
        groups = [] if self.optimizer is None else self.optimizer.param_groups
        leaves = [parameter for group in groups for parameter in group["params"]]
        with restored(self.model, leaves=leaves):
            self.slice(None)
            try:
                exact = self.replay(closure, bypass=True)
            finally:
                self.slice(self.plan.region if self.plan else None)
        with restored(self.model, leaves=leaves):
            return gradient_noise(exact, self.replay(closure, bypass=False))

    def slice(self, region: Region | None) -> None:
        """Work these first layers in slices from now on."""
        self.recorder.slicer = None if region is None else Slicer(region, self.recorder)

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """The model as if it had no session, and everything back in place afterwards."""
        active = self.recorder.active
        if active:
            self.recorder.__exit__(None, None, None)
        self.close_step()
        self._meter.abandon()
        if self.installation is not None:
            self.installation.remove()
        attached.discard(self.model)
        try:
            with contextlib.nullcontext() if self.updates is None else self.updates.paused():
                yield
        finally:
            attached.add(self.model)
            self.installation = Installation(self.model, self.start, self.finish)
            if active:
                self._enter(())

    def _enter(self, inputs: Any) -> None:
        own = [*held_by(self.model)]
        for each in self.store.onlookers:
            each.given(tensors_in(inputs))
        self.recorder.own([*own, *tensors_in(inputs)])
        if self._meter.running:
            held_bytes = nbytes_of(own + persistent(self.model, self.optimizer))
            held_bytes += viewed_bytes(tensors_in(inputs))
            self._baseline_bytes = max(self._baseline_bytes, held_bytes)
        self.recorder.__enter__()

    def _use(self, plan: StepPlan) -> None:
        """Hold tensors as the plan says from now on."""
        self.plan, self.policy.controller = plan, Planned(bounds=plan.bounds)
        self.store.planned = self.policy.planned = plan.options.get
        again = plan.keys(Action.RECOMPUTE, Action.REGENERATE)
        self.store.lineage = self.recorder.lineage() if again else None
        self.store.late_values = {key: Role(role) for key, role in plan.late_values.items()}
        self.store.room = plan.lasting_bytes
        make_room(self.store, plan, self.notes)
        planned = {tensor.key: tensor.saved_bytes for tensor in plan.tensors}
        planned |= dict.fromkeys(plan.region.keys if plan.region else (), sys.maxsize)  # see Slicer
        self.slice(plan.region)
        replans = self._replanning is not None
        why_other = self._passes.why_other
        self.store.admit = functools.partial(admit, plan.model, planned, self.notes, replans, why_other)

    def _fit_plan(self, known: Replanning, inputs: Any) -> None:
        """Before a forward: use the plan that covers its inputs, or make one."""
        shapes = shapes_of(inputs)
        plan = known.covering(shapes)
        if plan is None and known.planner is not None:
            why = known.failed.get(shapes) or self._passes.why_no_plan(inputs, is_open=self._open)
            if not why:
                with self.aside():
                    plan, why = known.make(shapes, inputs[1] or inputs[0])
            if why:
                self.notes[f"some inputs have no plan of their own: {why}"] = None
        if plan is not None and plan is not self.plan:
            self._use(plan)

    def _open_step(self, input_bytes: int) -> None:
        if self.plan is not None:
            refuse_unsound(self.plan, self.model)
        came_to_backward = self._open and self.recorder.hooks.backward_seen
        self.close_step()
        self.abandon()
        if self._balanced is not None and not self._replaying and not self.store.in_use:
            chosen = self._balanced.begin(self.step + 1, self.notes, counts=came_to_backward)
            if chosen is not self.plan:
                self._use(chosen)
        waited = self.store.unready
        self.recorder.start_step()
        self._open = True
        self._baseline_bytes = self._passes.count = 0
        if not self._replaying:
            self.step += 1
            # Tensors held exactly until kernels are compiled are no growth, nor are the kernels.
            self._growth.observe(None if waited else live_bytes(device_of(self.model)))
            self.refreshes.postpone(self.store, self.model, self.step, waited=waited)
        due = self.refreshes.due
        measured = self._replaying or due(self.step) or due(self.step - 1)
        guessed = self.step <= 1 and due(0)  # the first step's bounds
        self.store.start_places(measured=measured, guessed=guessed)
        if self._replaying:
            return
        self.refreshes.begin(self.recorder, self.model, self.step)
        refreshed = due(self.step - 1) and not due(self.step)
        has_state = self.plan is not None or self.optimizer is not None  # made by the first step
        first = self.step in (self.began_at, self.refreshes.first)
        second = self.step == self.began_at + 1 and has_state
        has_more = 0 < self.step - self._stepped_at <= 2  # where gradients add up, the second has these too
        self._measure(input_bytes, wanted=first or second or refreshed or has_more)

    def _measure(self, input_bytes: int, *, wanted: bool = False) -> None:
        """Measure the peak from here on, if that is wanted or inputs are larger than in any measured step.

        What is saved already would be missing.
        """
        larger, running = input_bytes > self._largest_bytes, self._meter.running
        is_late = self._replaying or (bool(self.store.rows) and not running)
        if is_late or not (wanted or larger) or not self.measures_peaks:
            return
        self._largest_bytes = max(self._largest_bytes, input_bytes)
        if not running:
            lasting = persistent(self.model, self.optimizer)
            self._baseline_bytes = nbytes_of([*held_by(self.model), *lasting])
            self._gradient_bytes = nbytes_of(persistent(self.model, None))
            self._meter.start(lasting)

    @contextlib.contextmanager
    def _uncounted(self, *, bypass: bool = False) -> Iterator[None]:
        self._replaying, self.recorder.hooks.bypass, self._open = True, bypass, False
        try:
            yield
        finally:
            self._replaying = self._open = False
            self.recorder.hooks.bypass = self.recorder.hooks.backward_seen = False


def _hooked(optimizer: torch.optim.Optimizer | None, stepped: Callable[..., None]) -> RemovableHandle | None:
    """Have this called after each step; None for one that only wraps another optimizer, without hooks."""
    try:
        return None if optimizer is None else optimizer.register_step_post_hook(stepped)
    except AttributeError:
        return None

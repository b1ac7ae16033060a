"""Measure what a training step could hold instead of what it saves."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Container, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch

from squeezebox.bounds import NoiseBudget
from squeezebox.capture import Onlooker, Row, Stopwatch, Tracer
from squeezebox.memory import freed_returned, usual_folder, within_room
from squeezebox.planning._frozen import CastWeights, watching
from squeezebox.planning._state_costs import found_sliced, marked
from squeezebox.profiling import (
    Gain,
    GainProfiler,
    PeakMeter,
    StepProfiler,
    load_profile,
    now,
    own_casts,
    profile_key,
    state_bytes,
    store_profile,
    transient_bytes,
)
from squeezebox.reports import explain_floor, require_writable
from squeezebox.schema import (
    Action,
    BudgetError,
    MemoryParts,
    Option,
    OutputError,
    Profile,
    Region,
    Role,
    StepProfile,
    __version__,
)
from squeezebox.session import Engine, begin
from squeezebox.steps import (
    TrainingStep,
    apart,
    check_loss,
    device_of,
    explained,
    held_by,
    nbytes_of,
    persistent,
    tensors_in,
    ungraded,
    viewed_bytes,
)

STATISTICS_STEPS = 2  # of a plan, before it is profiled;


_TIMED_STEPS = 3  # for each figure, at most: as many as
_TIMED_SECONDS = 0.3  # hold, and one of a longer step


@within_room("the steps that measure what a plan could hold")
def profile_step(
    step: TrainingStep,
    budget_bytes: float | None = None,
    whole: StepProfile | None = None,
    region: Region | None = None,
    *,
    metered: bool = False,
) -> StepProfile:
    """A profile of the model as it is; BudgetError if it holds more than ``budget_bytes`` in any case.

    ``metered``: its ``peak_bytes`` are those of the steps that gather statistics too, which hold most.
    With the ``region`` worked in slices, one step shows where tensors live; what could be held instead, and
    all seconds, are the ``whole`` step's.
    The loss is seen too, so that a plan knows what it saves under ``Session.step``; but where that is not
    used it holds its tensors itself, so these are kept either way.
    """
    controller = NoiseBudget(noise=step.noise) if step.noise else None
    with step.restored():
        engine = begin(step.model, step.optimizer, controller)
        if step.folder is not None and step.folder.keeps_state:  # or else a disk takes what is tried
            engine.store.spill.folder = step.folder
        if whole is not None:
            engine.store.late_values = {key: Role(role) for key, role in whole.late_values.items()}
        try:
            if whole is not None and region is not None:
                return _Profiling(step, engine).sliced(whole, region)
            return _Profiling(step, engine, metered).run(budget_bytes)
        finally:
            engine.detach()


def run_step(
    step: TrainingStep,
    around: AbstractContextManager[None],
    returned: Callable[[Any], None] = lambda output: None,
) -> None:
    """Forward and loss in a step of a session, and backward; nobody holds the output through that."""
    inputs, target = map(apart, step.sample)
    own = dataclasses.replace(step, sample=(inputs, target))

    def forward(*inputs: Any, **named: Any) -> Any:
        output = step.model(*inputs, **named)
        returned(output)
        return output

    with own_casts(), around, explained(*step.sample):
        loss = own.loss(forward)
    check_loss(loss)
    with ungraded(loss, step.model), torch.autocast(loss.device.type, enabled=False):
        loss.backward()


class _Profiling:
    """The steps of one profile."""

    def __init__(self, step: TrainingStep, engine: Engine, metered: bool = False) -> None:
        self._training, self._engine, self._is_metered = step, engine, metered
        self._profiler: StepProfiler | None = None
        self._peak_bytes = 0
        self._statistics_steps = STATISTICS_STEPS if step.noise else 1
        self._timed_steps = _TIMED_STEPS
        self._sliced: list[str] = []  # weights whose gradient can be made some rows at a time
        self._casts = CastWeights(step)
        self._plain_peak: int | None = None
        self._output_bytes = 0
        self._gains: dict[str, Gain] = {}
        self._blocks: dict[str, Row] = {}  # of a squeezed step, those packed into a device's arena
        self._done = self._total = 0
        engine.refreshes.sums_errors = engine.measures_peaks = False  # the plan's will be measured

    def run(self, budget_bytes: float | None) -> StepProfile:
        """See :func:`profile_step`."""
        with contextlib.closing(self._casts):
            return self._run(budget_bytes)

    def _run(self, budget_bytes: float | None) -> StepProfile:
        step, engine, store = self._training, self._engine, self._engine.store
        learned = self._learn(budget_bytes)
        store.arena.clear()
        self._casts.close()
        if self._casts.names:
            self._plain_peak = self._bare_peak()
        seconds, clock_seconds = self._seconds()
        file_seconds = self._file_seconds(seconds)
        self._casts.split()
        holding, following = self._overheads()
        step.model.zero_grad(set_to_none=True)
        store.arena.clear()
        store.lineage = engine.recorder.lineage()
        device, tracer = device_of(step.model), Tracer()
        profiler = StepProfiler(device, self._gains, step.folder)
        profile, saved = self._listened(profiler, tracer, learned, self._timed_steps - 1, seconds)
        exact = not step.noise  # to the bit, which slices are not
        return StepProfile(
            profile=profile,
            saved_bytes=saved,
            plain_seconds=seconds,
            clock_seconds=clock_seconds,
            holding_seconds=holding + self._casts.seconds,
            following_seconds=following,
            file_seconds=file_seconds,
            late_values={key: role.value for key, role in store.late_values.items()},
            peak_bytes=self._peak_bytes,
            small_bytes=dict(store.small_keys),
            plain_peak_bytes=self._plain_peak,
            output_bytes=self._output_bytes,
            regions=() if exact else tuple(tracer.regions()),
        )

    def sliced(self, whole: StepProfile, region: Region) -> StepProfile:
        """See :func:`profile_step`."""
        store, self._total = self._engine.store, 1
        self._engine.slice(region)
        self._sliced = [*whole.profile.sliced]
        store.lineage = self._engine.recorder.lineage()
        known = {tensor.key: tensor.options for tensor in whole.profile.tensors}
        profiler = StepProfiler(device_of(self._training.model), known=known)
        profile, saved = self._listened(profiler, Tracer(), _sensitivities(whole.profile), 0)
        return dataclasses.replace(
            whole,
            profile=profile,
            saved_bytes=saved,
            peak_bytes=max(self._peak_bytes, whole.peak_bytes),
            small_bytes=dict(store.small_keys),
            region=region,
            regions=(),
        )

    def _listened(
        self,
        profiler: StepProfiler,
        tracer: Tracer,
        learned: Mapping[str, float],
        timed: int,
        seconds: float = 0.0,
    ) -> tuple[Profile, dict[str, int]]:
        """What the profiler makes of one step, after some that are plain; and bytes by tensor."""
        step, engine, store = self._training, self._engine, self._engine.store
        parts = self._parts()
        blocks = self._blocks.values()
        self._profiler = profiler
        try:
            with store.shown_to(_onlooker_of(profiler)):
                for _ in range(timed):
                    self._plain("a plain step, operator by operator")
                step.model.zero_grad(set_to_none=True)
                if store.blocks is not None and blocks:
                    store.blocks.prepare(sum(row.packed["blocks"] for row in blocks))
                profiler.start(max((row.saved_bytes for row in blocks), default=0))
                with (
                    marked(step.model, profiler, self._sliced),
                    watching(step, profiler, store) as fixed,
                    store.shown_to(tracer.onlooker),
                ):
                    engine.replay(self._step, bypass=False)
                gradients = persistent(engine.model, None)
                saved = {row.key: row.saved_bytes for row in store.rows}
                final = nbytes_of(gradients) + transient_bytes(gradients, step.optimizer)
                profile = profiler.stop(sum(parts.values()), learned, final, gradients, seconds)
                reads = {name: at for name, at in profile.weights_at.items() if name not in fixed}
                profile = dataclasses.replace(profile, weights_at=reads, sliced=tuple(self._sliced))
                profile = dataclasses.replace(profile, split=self._casts.names)
                self._tell("every way to hold every tensor")
        finally:
            store.lineage = None
            profiler.close()
        self._peak_bytes = max(self._peak_bytes, profiler.peak_bytes)
        return _keeping_the_loss(dataclasses.replace(profile, **parts), saved), saved

    def _learn(self, budget_bytes: float | None) -> Mapping[str, float]:
        """Sensitivities, from a few steps with the session's controller."""
        engine, model = self._engine, self._training.model
        begun = now(device_of(model))
        slicing = self._training.slices_gradients  # or else a layer's input is there until its gradient is
        slices = found_sliced(model, self._sliced) if slicing else contextlib.nullcontext()
        with slices, self._casts.looking():
            self._bypassed()
        seconds = now(device_of(model)) - begun
        self._timed_steps = max(1, min(_TIMED_STEPS, int(_TIMED_SECONDS / max(seconds, 1e-9))))
        self._total = self._statistics_steps + 4 * self._timed_steps + 3
        self._tell("a plain step")
        if budget_bytes is not None:
            _require_room(int(budget_bytes), self._parts(), nbytes_of(persistent(engine.model, None)))
        model.zero_grad(set_to_none=True)
        self._casts.split()
        for number in range(self._statistics_steps):
            self._statistics(first=number == 0, last=number == self._statistics_steps - 1)
        engine.close_step()
        return engine.policy.state.sensitivities

    def _seconds(self) -> tuple[float, float]:
        """Of a plain step, and what the faster half of several takes longer."""
        times = sorted(self._timed(self._bare) for _ in range(1 + self._timed_steps))
        return times[0], times[len(times) // 2] - times[0]

    def _file_seconds(self, plain: float) -> float:
        """By which a plain step takes longer while the process has a file."""
        folder = self._training.folder or usual_folder()
        if device_of(self._training.model).type != "cpu" or not folder.frees_memory:
            return 0.0
        with freed_returned():
            return max(0.0, self._seconds()[0] - plain)

    def _bare_peak(self) -> int | None:
        """Of a plain step, which the profile does not tell where weights are halved; None without a meter."""
        model, optimizer = self._training.model, self._training.optimizer
        meter = PeakMeter(device_of(model))
        held: int = sum(self._parts().values())
        model.zero_grad(set_to_none=True)
        if not meter.start():
            return None
        try:
            self._bare()
        finally:
            peak = meter.stop(()).total_bytes
        gradients = persistent(model, None)
        after: int = nbytes_of(gradients) + transient_bytes(gradients, optimizer)
        return held + max(peak, after)

    def _timed(self, step: Callable[[], object]) -> float:
        device = device_of(self._training.model)
        begun = now(device)
        step()
        seconds = now(device) - begun
        self._tell("a plain step, timed")
        return seconds

    def _overheads(self) -> tuple[float, float]:
        """Seconds a step of holding every tensor as it is, and of following how it was made."""
        engine, store = self._engine, self._engine.store
        unplanned = store.planned
        store.planned, store.lineage = _kept, engine.recorder.lineage()
        watches = [Stopwatch() for _ in range(self._timed_steps)]
        try:
            for watch in watches:
                with store.shown_to(watch.onlooker):
                    engine.replay(self._step, bypass=False)
                self._tell("a step that keeps everything")
        finally:
            store.planned, store.lineage = unplanned, None
        return min(watch.holding for watch in watches), min(watch.following for watch in watches)

    def _statistics(self, *, first: bool, last: bool) -> None:
        """A step with the controller.

        ``first``: whose bounds are cautious, so that it holds most. ``last``: also for what errors would be
        in tensors that are made from others.
        """
        engine, store = self._engine, self._engine.store
        self._training.model.zero_grad(set_to_none=True)
        found = GainProfiler()
        looking: AbstractContextManager[None] = contextlib.nullcontext()
        if last and self._training.noise:
            store.lineage = engine.recorder.lineage()
            looking = store.shown_to(Onlooker(measures=True, saving=found.saving, offered=found.offered))
        try:
            with looking:
                self._metered(self._step) if first and self._is_metered else self._step()
        finally:
            store.lineage = None
        self._gains = found.gains
        self._blocks = {row.key: row for row in store.rows if "blocks" in row.packed}
        self._tell("statistics")

    def _metered(self, step: Callable[[], object]) -> None:
        """Run a step that holds more than a plain one, and note how much."""
        meter = PeakMeter(device_of(self._training.model))
        metered = meter.start()
        try:
            step()
        finally:
            if metered:
                held = sum(self._parts().values()) + meter.stop(()).total_bytes
                self._peak_bytes = max(self._peak_bytes, held)

    def _step(self) -> None:
        run_step(self._training, self._engine.framed(), self._returned)

    def _returned(self, output: Any) -> None:
        """The model's forward is over."""
        self._output_bytes = nbytes_of(tensors_in(output))
        if self._profiler is not None:
            self._profiler.loss()

    def _plain(self, what: str) -> None:
        self._bypassed()
        self._tell(what)

    def _bypassed(self) -> None:
        """A step that keeps everything, while the session looks on."""
        self._engine.replay(self._step, bypass=True)

    def _bare(self) -> None:
        """A step without the session."""
        installation = self._engine.installation
        assert installation is not None
        self._training.model.zero_grad(set_to_none=True)
        with installation.paused():
            run_step(self._training, contextlib.nullcontext())

    def _tell(self, what: str) -> None:
        self._done += 1
        if self._training.on_progress is not None:
            self._training.on_progress(self._done, self._total, what)

    def _parts(self) -> dict[str, Any]:
        """Bytes that are there in any case."""
        model = self._training.model
        rests = self._casts.rest_bytes  # which go with the state
        own = nbytes_of([*model.parameters(), *model.buffers()])
        return {
            "parameter_bytes": own - rests + _bytes_of_loss(self._training),
            "input_bytes": viewed_bytes(tensors_in(list(self._training.sample))),
            "state_bytes": state_bytes(model, self._training.optimizer) + rests,
        }


def _bytes_of_loss(step: TrainingStep) -> int:
    """Of the loss's modules: what they have that the model has not, and its gradients."""
    known = {id(each) for each in held_by(step.model)}
    found = {id(each): each for module in step.loss_modules() for each in held_by(module)}
    own = [each for key, each in found.items() if key not in known]
    return nbytes_of(own) + sum(each.nbytes for each in own if each.requires_grad)


def _onlooker_of(profiler: StepProfiler) -> Onlooker:
    return Onlooker(
        measures=True,
        calling=profiler.calling,
        called=profiler.called,
        saving=profiler.saving,
        offered=profiler.offered,
        saved=profiler.saved,
        using=profiler.using,
        used=profiler.used,
        released=profiler.released,
    )


_KEPT = Option(action=Action.KEEP, held_bytes=0)


def _kept(key: str) -> Option:
    return _KEPT


def cached(folder: Path, key: str, make: Callable[[], StepProfile]) -> StepProfile:
    """The profile of that key in the folder; made and put there if it is missing or damaged."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(f"cannot make the cache {folder}: {error}. Choose another one, or none.") from error
    require_writable(folder / key)
    seen = load_profile(folder, key)
    if seen is None:
        seen = make()
        store_profile(folder, key, seen)
    return seen


def key_of(step: TrainingStep, load: str | None) -> str:
    """What a profile depends on, as a file's name."""
    weights = [each for module in step.loss_modules() for each in held_by(module)]
    held = state_bytes(step.model, step.optimizer)
    folder = step.folder or usual_folder()
    settings = (__version__, step.noise, _options_of(step), held, str(folder), step.moves_weights, load)
    of_weights = (step.splits_weights, step.slices_gradients)
    casts = [(torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda")]
    rest = (*settings, *of_weights, casts, step.sample)
    return profile_key(step.model, [*tensors_in(step.sample), *weights], step.loss_fn, *rest)


def _options_of(step: TrainingStep) -> tuple[object, ...]:
    """The optimizer's class, and of each group all options but its rate, and the places of its parameters."""
    if step.optimizer is None:
        return ()
    places = {id(each): place for place, each in enumerate(step.model.parameters())}
    return type(step.optimizer), *(
        {
            **{key: value for key, value in group.items() if key not in ("lr", "initial_lr")},
            "params": [places.get(id(each)) for each in group["params"]],
        }
        for group in step.optimizer.param_groups
    )


def without(seen: StepProfile, actions: Container[Action]) -> StepProfile:
    """The step if nothing may be done to a tensor that these name."""
    tensors = tuple(
        dataclasses.replace(tensor, options=tuple(o for o in tensor.options if o.action not in actions))
        for tensor in seen.profile.tensors
    )
    return dataclasses.replace(seen, profile=dataclasses.replace(seen.profile, tensors=tensors))


def _sensitivities(profile: Profile) -> dict[str, float]:
    """Key -> relative gradient noise for a unit bound, as the options that serve no other have it."""
    return {
        tensor.key: option.noise / option.bound**2
        for tensor in profile.tensors
        for option in tensor.options
        if option.bound > 0.0 and not option.approximates
    }


def _require_room(budget_bytes: int, parts: Mapping[str, int], gradient_bytes: int) -> None:
    """Refuse a budget below what no plan can change."""
    least = MemoryParts(**parts, gradient_bytes=gradient_bytes)
    if budget_bytes < least.total_bytes:
        raise BudgetError(explain_floor(budget_bytes, least))


def _keeping_the_loss(profile: Profile, saved: Mapping[str, int]) -> Profile:
    """The profile with no choice for what the loss saves."""
    keys = {each.key for each in profile.moments if each.phase == "loss" and each.event == "save"}
    tensors = tuple(
        dataclasses.replace(tensor, options=(keeping(saved[tensor.key]),)) if tensor.key in keys else tensor
        for tensor in profile.tensors
    )
    return dataclasses.replace(profile, tensors=tensors)


def keeping(nbytes: int) -> Option:
    """Held as it is."""
    return Option(action=Action.KEEP, codec="keep", held_bytes=nbytes)

"""The one place that knows all rooms: attach to a model, train, report, detach.

Reading order: :func:`attach` makes a :class:`Session`; ``Session._start`` and ``Session._finish`` frame
every forward pass; ``Session._close_step`` is where a due step's statistics become new bounds.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import math
import os
import re
import sys
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from squeezebox import __version__, planner
from squeezebox import bounds as bounds_room
from squeezebox.bounds import Comet, Controller, ControllerState, NoiseBudget, Planned
from squeezebox.capture import (
    BITS,
    BitRule,
    Choice,
    Collector,
    CompiledStep,
    HalfSteps,
    Installation,
    Observer,
    Recorder,
    Rule,
    Slicer,
    Store,
    Tracer,
    check_supported,
    compiled_part,
    foreign_hooks,
    in_backward,
    is_innermost,
    is_plain,
    leaves,
)
from squeezebox.profiling import (
    PeakMeter,
    StepProfiler,
    load_profile,
    profile_key,
    simulate,
    state_bytes,
    store_profile,
    transient_bytes,
)
from squeezebox.reports import (
    Estimate,
    MaxBatch,
    PlannedTensor,
    Report,
    StepPlan,
    explain,
    explain_floor,
    require_writable,
)
from squeezebox.schema import (
    Action,
    AttachError,
    Budget,
    BudgetError,
    Check,
    FormatError,
    Option,
    OptionError,
    OutputError,
    Plan,
    PlanError,
    Profile,
    Region,
    Role,
    SqueezeboxError,
    StepProfile,
    StepRecord,
    TensorProfile,
    UnsupportedModelError,
)

LossFunction = Callable[[Any, Any], torch.Tensor]
Progress = Callable[[int, int, str], None]  # units done, of how many, and what the last one was
STATE_VERSION = 1
_STATISTICS_STEPS = 4  # of a plan, before it is profiled
_TIMED_STEPS = 3
_SPARSE_ROLES = frozenset({Role.RELU_OUTPUT, Role.POOL_INPUT})
_UNKNOWN_COUNT = 64  # lossy tensors of a model, before the first step has counted them
_PAYS = 0.98  # of the peak: what slices must bring it under to be worth their time
_LAW_BITS = (8, 4)  # with fewer, errors are no longer small, as the law takes them to be
_GOLDEN = (math.sqrt(5.0) - 1.0) / 2.0  # multiples of it spread evenly over the unit interval
_attached: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()


def attach(
    model: torch.nn.Module,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    noise: float | None = None,
    controller: Controller | None = None,
    exact: bool = False,
    budget: int | str | None = None,
    sample: tuple[Any, Any] | None = None,
    loss_fn: LossFunction | None = None,
    plan: StepPlan | None = None,
    on_mismatch: str = "refuse",
    checks_per_refresh: int = 1,
) -> Session:
    """Hold what training ``model`` saves between forward and backward in fewer bytes.

    The training loop stays as it is. Every tensor that autograd saves in ``model``'s forward is packed
    when it is saved and unpacked when backward asks for it: losslessly where backward reads only a sign,
    a mask or an index, within an elementwise error bound where it reads values.

    Args:
        model: any module, on one device. DistributedDataParallel and FSDP2 modules too.
        optimizer: read for its momentum (COMET) and its state's size; never changed.
        noise: allowed relative gradient noise, the squared error of all parameter gradients over their
            squared norm (default 1e-3).
        controller: any bound controller instead of ``noise``, such as ``squeezebox.bounds.Comet()``.
        exact: only lossless savings; losses and gradients equal plain PyTorch's to the bit.
        budget: bytes that the step's peak stays under, in the least time: see :func:`plan`.
        sample: see :func:`plan`.
        loss_fn: see :func:`plan`.
        plan: such a plan made before; goes without noise, controller, exact and budget.
        on_mismatch: what a forward does whose inputs are larger than the plan's, or not of its kind. "refuse"
            raises PlanError at the first tensor that the plan does not know. "replan" makes a plan for these
            inputs before it runs them, within the same bytes and noise, with the sample's target cut or
            repeated to their sizes; plans are kept, and a forward takes the first that covers it. Where none
            can be made (no sample and loss_fn, keyword arguments, an earlier forward waiting for its
            backward, a loss that the target does not fit), tensors that the plan does not know are held
            exactly, and the report's notes say so.
        checks_per_refresh: how many weighted layers, and how many other tensors, are compared with their
            exact values at each refresh; each holds its exact tensor and a second gradient for that step.

    Returns:
        The session: ``report()``, ``step()``, ``measure_noise()``, ``state_dict()``, ``detach()``.

    Raises:
        OptionError: noise not positive and finite, more than one of noise, controller and exact, or
            COMET's controller without an optimizer.
        AttachError: the model has a session already.
        BudgetError: no plan fits the budget; later too, from the model's forward, with "replan".
        UnsupportedModelError: the model spans two devices or is compiled.
    """
    if on_mismatch not in ("refuse", "replan"):
        raise OptionError(f"on_mismatch {on_mismatch!r} is neither 'refuse' nor 'replan'.")
    replan = on_mismatch == "replan"
    if replan and plan is None and budget is None:
        raise OptionError("on_mismatch='replan' is for a plan or a budget; give one of them.")
    if budget is None and not replan and (sample is not None or loss_fn is not None):
        raise OptionError("sample and loss_fn are for a budget; give budget too, or call squeezebox.plan().")
    if budget is not None:
        if plan is not None or controller is not None:
            raise OptionError("budget makes a plan of its own; give it without plan and controller.")
        plan = make_plan(
            model,
            sample=sample,
            loss_fn=loss_fn,
            optimizer=optimizer,
            budget=budget,
            noise=noise,
            exact=exact,
        )
        noise, exact = None, False
    if plan is not None:
        if noise is not None or controller is not None or exact:
            raise OptionError("plan says what is lost already; give it without noise, controller and exact.")
        controller = Planned(bounds=plan.bounds)
    chosen = _controller(noise, controller, exact, optimizer is not None)
    if model in _attached:
        raise AttachError(
            f"{type(model).__name__} is attached already. Call detach() on its session first, or go on "
            "with that one."
        )
    check_supported(model)
    replanning = _Replanning.of(model, plan, sample, loss_fn, optimizer) if plan and replan else None
    session = Session(model, optimizer, chosen, checks_per_refresh, plan, replanning)
    _attached.add(model)
    return session


def make_plan(
    model: torch.nn.Module,
    *,
    sample: tuple[Any, Any] | None,
    loss_fn: LossFunction | None,
    optimizer: torch.optim.Optimizer | None = None,
    budget: int | str | None = None,
    noise: float | None = None,
    exact: bool = False,
    offload: bool = True,
    time_limit: float | None = None,
    cache: str | os.PathLike[str] | None = None,
    on_progress: Progress | None = None,
) -> StepPlan:
    """Choose for every saved tensor how to hold it, so that the step's peak stays under ``budget``.

    Runs a few steps on ``sample`` (parameters, gradients, buffers and random states are as before):
    statistics, then one in which every way to hold every tensor is timed and weighed. Then the least time
    within the bytes at every position of forward and backward and within the noise is looked for. Where
    nothing fits, or the least peak is asked for, the first layers are tried in slices of the batch.

    Args:
        model: any module that :func:`attach` takes.
        sample: inputs (a tensor, or a tuple of them) and target, as a training step gets them.
        loss_fn: ``loss_fn(output, target)`` is what backward starts from.
        optimizer: its state counts towards the peak, also where it is not there yet.
        budget: bytes, or "2GiB", or a share of the plain step's peak, "50%"; None: as little as possible.
        noise: allowed relative gradient noise (default 1e-3).
        exact: nothing is lost.
        offload: whether tensors may be moved to a file in the temporary directory. Where the system holds
            that in memory, or caches it, the bytes leave the process and not the machine.
        time_limit: of a step, as a multiple of the plain step's time, such as 1.3; instead of a budget: as
            little memory as fits the time.
        cache: a folder in which profiles are kept and found again; it may be deleted at any time. One is used
            again for the same model, weights, sample, loss, noise, optimizer, versions and machine; a change
            in what the loss or a module's forward calls is not noticed.
        on_progress: called with (done, total, what was done) while the sample's steps run.

    Returns:
        The plan: print it, ``save()`` it, pass it to :func:`attach`. Sizes are bytes, times seconds a step.

    Raises:
        BudgetError: no plan fits; says how much the smallest needs, what holds it, and what would fit.
            Or none takes so little time.
        OptionError: an argument is missing or out of range, or a profiler is running.
        OutputError: the cache's folder cannot be written.
    """
    sample, loss_fn = _check_sample(sample, loss_fn)
    allowed = _plannable(model, noise, exact)
    _check_time_limit(time_limit, budget)
    factor, share = (0.0, False) if budget is None else _size_named(budget)
    budget_bytes = factor if factor and not share else None
    profiled = functools.partial(
        _profiled, model, sample, loss_fn, optimizer, allowed, budget_bytes, on_progress
    )
    if cache is None:
        seen = profiled()
    else:
        key = _profile_key(model, sample, loss_fn, optimizer, allowed)
        seen = _cached(Path(cache), key, profiled)
    seen = seen if offload else _staying(seen)
    limit = None if budget is None else int(factor * _plain_peak(seen) if share else factor)
    seconds = math.inf if time_limit is None else (time_limit - 1.0) * seen.plain_seconds

    def sliced(region: Region) -> StepProfile:
        trial = _profiled(model, sample, loss_fn, optimizer, allowed, None, on_progress, seen, region)
        return trial if offload else _staying(trial)

    return _planned(model, seen, limit, allowed, _batch(sample), seconds, sliced)


def max_batch(
    model: torch.nn.Module,
    *,
    sample: tuple[Any, Any],
    loss_fn: LossFunction,
    budget: int | str,
    optimizer: torch.optim.Optimizer | None = None,
    noise: float | None = None,
    exact: bool = False,
    on_progress: Progress | None = None,
) -> MaxBatch:
    """The largest batch whose plan fits ``budget``, from at most three profiles.

    Profiles the sample's batch and twice or half of it, foretells others on the line through both, and
    profiles the answer. Should that one not fit, the answer is the largest below it that fits on the line.
    Other batches repeat or cut the sample along the first dimension of all its tensors that have its batch's
    size there (targets also a multiple of it).

    Args:
        model: see :func:`make_plan`; so are the other arguments.
        sample: of any batch; one near the answer is quickest.
        loss_fn: see :func:`make_plan`.
        budget: bytes, "2GiB", or a share of the plain step's peak at the sample's batch, "50%".
        optimizer: see :func:`make_plan`.
        noise: see :func:`make_plan`.
        exact: see :func:`make_plan`.
        on_progress: see :func:`make_plan`; every profile begins anew.

    Returns:
        The batch, its plan, and the batch that plain training would hold.

    Raises:
        BudgetError: not even a batch of 1 fits.
        OptionError: as :func:`make_plan`, or the sample has no batch.
    """
    _check_sample(sample, loss_fn)
    allowed = _plannable(model, noise, exact)
    batch, (factor, share) = _batch(sample), _size_named(budget)
    if batch < 1:
        raise OptionError(
            f"the sample has {_described(sample[0])} as inputs, which is no batch to make larger."
        )

    def profiled(size: int) -> StepProfile:
        sized = _resized(sample, batch, size)
        return _profiled(model, sized, loss_fn, optimizer, allowed, None, on_progress)

    known = {batch: profiled(batch)}
    limit = int(factor * _plain_peak(known[batch]) if share else factor)

    def fits(size: int) -> bool:
        return _fits(planner.at_batch(known, size).profile, Budget(peak_bytes=limit, noise=allowed))

    other = 2 * batch if fits(batch) or batch <= 2 else batch // 2  # batch normalisation refuses a single one
    known[other] = profiled(other)
    answer = planner.largest_batch(fits, batch)
    if answer and answer not in known:
        known[answer] = profiled(answer)
        if not fits(answer):
            most = answer
            answer = planner.largest_batch(lambda size: size < most and fits(size))
    answer = max(answer, 1)
    plan = _planned(model, planner.at_batch(known, answer), limit, allowed, answer)
    return MaxBatch(
        batch=answer,
        plan=plan,
        predicted_peak_bytes=plan.predicted_peak_bytes,
        plain_batch=planner.largest_batch(lambda size: _plain_peak(planner.at_batch(known, size)) <= limit),
        measured=answer in known,
    )


def estimate(
    model: torch.nn.Module | Callable[[], torch.nn.Module],
    *,
    input_shape: Sequence[int] = (3, 224, 224),
    batch: int = 32,
    optimizer: str = "sgd-momentum",
    dtype: torch.dtype | str | None = None,
    input_dtype: torch.dtype | str | None = None,
) -> Estimate:
    """Say what a plain training step would hold, without training and without using the memory.

    Forward, the sum of all outputs as the loss, and backward run on fake tensors; the optimizer's share
    is added. Nothing is computed, so models whose control flow reads values cannot be estimated.

    Args:
        model: a module (left alone), or a function or class that makes one.
        input_shape: one sample's shape, without the batch.
        batch: samples a step.
        optimizer: "sgd", "sgd-momentum", "adam" or "adamw".
        dtype: of the model and a floating-point input, such as "bfloat16" (default: as the model is).
        input_dtype: of the input, such as "int64" for tokens (default: ``dtype``).

    Raises:
        OptionError: an argument is out of range, or the model does not take such an input.
    """
    observers: list[Observer] = []

    @contextlib.contextmanager
    def watch(fake: torch.nn.Module, inputs: torch.Tensor) -> Iterator[None]:
        observers.append(Observer(fake, [inputs]))
        with observers[-1]:
            yield

    figures = simulate(
        model,
        input_shape=input_shape,
        batch=batch,
        optimizer=optimizer,
        dtype=_dtype_named(dtype),
        input_dtype=_dtype_named(input_dtype),
        watch=watch,
    )
    saved = observers[-1].saved_bytes()
    return Estimate(
        input_shape=tuple(input_shape),
        batch=batch,
        optimizer=optimizer,
        saved_bytes=sum(saved.values()),
        saved=saved,
        **dataclasses.asdict(figures),
    )


def compile_model(
    model: torch.nn.Module,
    *,
    plan: StepPlan | None = None,
    noise: float | None = None,
    bits: int | None = None,
    sample: tuple[Any, Any] | None = None,
    loss_fn: LossFunction | None = None,
    fullgraph: bool = False,
    options: Mapping[str, Any] | None = None,
) -> CompiledStep:
    """Compile ``model`` as torch.compile does, with the activations that it saves in fewer bits.

    Large saved values are held in 8, 4 or 2 bits an element and masks in one. Each row of elements (a channel
    of a sample, a token) has its own step, measured when it is packed, and every element comes back within
    half a step of its row: at most the row's range / (2^bits - 2) / 2 off, plus the rounding of its dtype.
    Zeros stay zero and signs stay; masks and indices are those that forward computed. Cheap operators are
    computed again in backward rather than saved. Of a row with NaN or infinity nothing finite comes back.

    Args:
        model: an eager module, on one device, not attached. It is left as it is.
        plan: from :func:`plan`. What it keeps is kept; what it packs gets the fewest bits that stay within
            the bound, in the mean square over the first batch, or is kept where 8 do not; what it would move
            to a file or make again gets 8 bits, or is kept where the plan loses nothing.
        noise: allowed relative gradient noise: 8 or 4 bits, the fewest that stay within it by the error law
            after a few eager steps on ``sample``. A prediction: where backward computes several operators'
            inputs again from one tensor, its error counts in each, and there may be more noise.
        sample: goes with noise: inputs and target, as :func:`plan` takes them.
        loss_fn: goes with noise: see :func:`plan`.
        bits: 8, 4 or 2 for every value (default 8, without plan and noise).
        fullgraph: refuse models with graph breaks.
        options: of Inductor, as for torch.compile.

    Returns:
        Call it as the model. ``report()`` says what is saved. The model's own parameters are trained.

    Raises:
        OptionError: an argument is out of range or missing, or more than one of plan, noise and bits.
        AttachError: the model is attached; also when called while it is.
        PlanError: the plan was made for another model.
        UnsupportedModelError: the model spans two devices or is compiled already.
    """
    _check_compile_options(plan, noise, bits, sample, loss_fn)
    _refuse_compiled(model)
    check_supported(model)
    _refuse_attached(model)
    rule = BitRule(default=bits or 8)
    if noise is not None and sample is not None and loss_fn is not None:
        rule = _bits_within(model, sample, loss_fn, noise)
    if plan is not None:
        _check_places(model, plan)

    def choose(args: tuple[Any, ...], kwargs: dict[str, Any]) -> BitRule:
        return rule if plan is None else _planned_bits(plan, _half_steps(model, plan, args, kwargs))

    return CompiledStep(
        model, choose, functools.partial(_refuse_attached, model), fullgraph=fullgraph, options=options
    )


class Session:
    """A model under Squeezebox; made by :func:`attach`."""

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer | None,
        controller: Controller | None,
        checks_per_refresh: int = 1,
        plan: StepPlan | None = None,
        replanning: _Replanning | None = None,
    ) -> None:
        self._model = model
        self._optimizer = optimizer
        self._controller = controller
        self._state = ControllerState()
        self._store = Store(_BoundPolicy(self))
        self._recorder = Recorder(self._store)
        self._notes: dict[str, None] = {}
        self._replanning = replanning
        self._plan: StepPlan | None = None
        if plan is not None:
            self._use(plan)
        self._meter = PeakMeter(_device(model))
        self._depth = 0
        self._step = -1
        self._checks_per_refresh = checks_per_refresh
        self._counts = {True: _UNKNOWN_COUNT, False: _UNKNOWN_COUNT}
        self._collector: Collector | None = None
        self._checks: list[Check] = []
        self._record: StepRecord | None = None
        self._peaks: tuple[int, int] | None = None
        self._refresh_peak: int | None = None
        self._floor: int | None = None
        self._noise: float | None = None
        self._baseline = 0
        self._open = False
        self._replaying = False
        self._installation: Installation | None = Installation(
            model, self._recorder, self._start, self._finish
        )

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
        if self._record is None:
            raise AttachError(
                "there is nothing to report: no forward pass with gradients was seen since attach(). "
                "Train one step first (model.train(), loss.backward())."
            )
        return Report(self._record)

    def measure_noise(self, closure: Callable[[], object]) -> float:
        """Measure the relative gradient noise directly: the same step twice, exact and squeezed.

        Args:
            closure: runs forward, loss and backward on one batch, without the optimizer's step.

        Returns:
            Squared error of all parameter gradients over their squared norm. Gradients, buffers and
            random states are as before; the figure is also the report's ``noise``.

        Raises:
            AttachError: detached, or the closure left no gradients.
        """
        self._require_attached()
        self._close_step()
        with _restored(self._model):
            self._slice(None)
            try:
                exact = self._replay(closure, bypass=True)
            finally:
                self._slice(self._plan.region if self._plan else None)
        with _restored(self._model):
            lossy = self._replay(closure, bypass=False)
        energy = sum(_energy(gradient) for gradient in exact)
        if energy == 0.0:
            raise AttachError(
                "measure_noise() saw no gradient: the closure must run forward, the loss and "
                "loss.backward() on a model whose parameters require gradients."
            )
        self._noise = sum(_energy(a - b) for a, b in zip(exact, lossy, strict=True)) / energy
        if self._record is not None:
            self._record = dataclasses.replace(self._record, noise=self._noise)
        return self._noise

    def detach(self) -> None:
        """Take every hook off the model and end a running measurement. Safe to call twice."""
        if self._installation is None:
            return
        self._close_step()
        self._abandon()
        self._installation.remove()
        self._installation = None
        self._store.arena.clear()
        _attached.discard(self._model)

    def state_dict(self) -> dict[str, object]:
        """Bounds, sensitivities and counters as plain values; resuming from them is exact."""
        self._close_step()
        return {
            "version": STATE_VERSION,
            "step": self._step,
            "counts": [self._counts[True], self._counts[False]],
            "controller": self._state.to_dict(),
            "late_values": {key: role.value for key, role in self._store.late_values.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where :meth:`state_dict` was taken.

        Raises:
            FormatError: the state is damaged or of a newer version.
        """
        version = state.get("version")
        if version != STATE_VERSION:
            raise FormatError(
                f"session state has version {version}; this Squeezebox reads version {STATE_VERSION}. "
                "Upgrade squeezebox, or start the session anew."
            )
        try:
            step = int(state["step"])
            late = {str(key): Role(role) for key, role in state["late_values"].items()}
            weighted, others = (int(count) for count in state["counts"])
            controller = ControllerState.from_dict(dict(state["controller"]))
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise FormatError(
                f"session state has fields {sorted(state)}, of which one is missing or damaged ({error}). "
                "Pass the object that state_dict() gave, or start the session anew."
            ) from error
        self._state, self._step, self._store.late_values = controller, step, late
        self._counts = {True: weighted, False: others}

    def _start(self, inputs: Any) -> None:
        """A forward pass begins (the model's own, or step() around it)."""
        if self._replanning is not None and inputs and self._is_outermost():
            self._fit_plan(self._replanning, inputs)
        self._depth += 1
        if self._recorder.active:
            self._recorder.own(_tensors(inputs))
        if self._depth > 1 or not torch.is_grad_enabled() or in_backward():
            return
        if foreign_hooks():
            self._notes["other saved-tensor hooks were active around a forward: it was left alone"] = None
            return
        if self._recorder.backward_seen or not self._open or not self._store.in_use:
            self._open_step()
        self._enter(inputs)

    def _enter(self, inputs: Any) -> None:
        own = [*self._model.parameters(), *self._model.buffers(), *_tensors(inputs)]
        self._recorder.own(own)
        self._baseline = max(self._baseline, _nbytes(own + self._persistent()))
        self._recorder.__enter__()

    def _is_outermost(self) -> bool:
        """Whether the forward that begins is the model's own, of a step that is recorded."""
        if self._replaying or not torch.is_grad_enabled() or in_backward():
            return False
        return self._depth == 0 or (self._depth == 1 and self._recorder.active)

    def _use(self, plan: StepPlan) -> None:
        """Hold tensors as the plan says from now on."""
        self._plan, self._controller = plan, Planned(bounds=plan.bounds)
        self._store.keep, self._store.offload = plan.kept, plan.offloaded
        self._store.recompute = plan.recomputed
        self._store.lineage = self._recorder.lineage() if plan.recomputed else None
        self._store.late_values = {key: Role(role) for key, role in plan.late_values.items()}
        planned = {tensor.key: tensor.saved_bytes for tensor in plan.tensors}
        planned |= dict.fromkeys(plan.region.keys if plan.region else (), sys.maxsize)  # see Slicer
        self._slice(plan.region)
        notes = None if self._replanning is None else self._notes
        self._store.admit = functools.partial(_admit, plan.model, planned, notes)

    def _fit_plan(self, known: _Replanning, inputs: Any) -> None:
        """Before a forward: use the plan that covers its inputs, or make one."""
        shapes = _shapes(inputs)
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
        _attached.discard(self._model)
        try:
            yield
        finally:
            _attached.add(self._model)
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
        self._close_step()
        self._abandon()
        self._recorder.start_step()
        self._open = True
        self._baseline = 0
        if self._replaying:
            return
        self._step += 1
        if self._controller is not None and self._controller.due(self._step):
            self._collector = self._recorder.collector = Collector(
                self._store, _names(self._model), self._is_checked, self._step
            )
        if self._step == 0 or (self._due(self._step - 1) and self._collector is None):
            self._meter.start(self._persistent())

    def _close_step(self) -> None:
        """After a backward: read the meter, freeze the record, turn due statistics into new bounds."""
        if not self._open or not self._recorder.backward_seen:
            return
        self._open = self._recorder.backward_seen = False
        if self._replaying:
            return
        if self._meter.running:
            peak = self._meter.stop(self._persistent())
            if self._collector is None:
                self._peaks = (self._baseline + peak.total_bytes, peak.activation_bytes)
            else:
                self._refresh_peak = self._baseline + peak.total_bytes
        collector, self._collector, self._recorder.collector = self._collector, None, None
        if collector is not None:
            collector.close()
        if collector is not None and self._controller is not None and not collector.interrupted:
            statistics = collector.result(self._momentum())
            self._checks.extend(statistics.checks)
            self._floor, self._counts = collector.floor_bytes, collector.counts
            self._state = self._controller.update(self._state, statistics)
        self._record = self._freeze()

    def _freeze(self) -> StepRecord:
        rows = self._store.rows
        known = self._state.sensitivities
        tensors = tuple(
            row.freeze(known[row.key] * row.bound**2 if row.key in known else None) for row in rows
        )
        small = sum(self._store.small.values())
        lossy = {row.key: row.bound for row in rows if row.bound > 0.0}
        total, activations = self._peaks or (self._refresh_peak, None)
        return StepRecord(
            step=self._step,
            tensors=tensors,
            saved_bytes=small + sum(tensor.saved_bytes for tensor in tensors),
            packed_bytes=small + sum(tensor.packed_bytes for tensor in tensors),
            borrowed_bytes=sum(self._store.borrowed.values()),
            noise=self._measured_noise(),
            predicted_noise=self._predicted_noise(lossy),
            peak_bytes=total,
            activation_peak_bytes=activations,
            refresh_peak_bytes=self._refresh_peak,
            floor_bytes=self._floor,
            budget_bytes=self._plan.budget_bytes if self._plan else None,
            predicted_peak_bytes=self._plan.predicted_peak_bytes if self._plan else None,
            predicted_seconds=self._plan.predicted_seconds if self._plan else None,
            checks=tuple(self._checks),
            notes=tuple(self._notes),
        )

    def _predicted_noise(self, lossy: dict[str, float]) -> float | None:
        """What the plan, or the error law, expects of these bounds; nothing lossy is no noise."""
        if not lossy:
            return 0.0
        return self._plan.predicted_noise if self._plan else bounds_room.predicted_noise(self._state, lossy)

    def _measured_noise(self) -> float | None:
        """What measure_noise() found; nothing lossy is no noise."""
        return 0.0 if self._controller is None else self._noise

    def _replay(self, closure: Callable[[], object], *, bypass: bool) -> list[torch.Tensor]:
        """Gradients of one run of the closure, outside the count of steps."""
        parameters = [parameter for parameter in self._model.parameters() if parameter.requires_grad]
        for parameter in parameters:
            parameter.grad = None
        self._replaying, self._recorder.bypass, self._open = True, bypass, False
        try:
            closure()
        finally:
            self._replaying = self._recorder.bypass = self._open = self._recorder.backward_seen = False
        return [
            torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            for parameter in parameters
        ]

    def _slice(self, region: Region | None) -> None:
        """From the next forward on, work the region in slices."""
        self._recorder.slicer = None if region is None else Slicer(region, self._recorder)

    def _profile(
        self,
        inputs: Any,
        target: Any,
        loss_fn: LossFunction,
        budget_bytes: float | None,
        on_progress: Progress | None,
        whole: StepProfile | None,
        region: Region | None,
    ) -> StepProfile:
        """What a step could hold; with a region, one that works it in slices, given the ``whole`` step's.

        The loss is seen too, so that a plan knows what it saves under :meth:`step`; but where step() is not
        used it holds its tensors itself, so these are kept either way.
        """
        profiler: StepProfiler | None = None
        learning = 0 if whole is not None else _STATISTICS_STEPS if self._controller is not None else 1
        numbers = itertools.count(1)

        def done(what: str) -> None:
            if on_progress is not None:
                on_progress(next(numbers), learning + 2 + 2 * _TIMED_STEPS, what)

        def forward(given: Any) -> Any:
            output = self._model(*given if isinstance(given, tuple) else (given,))
            if profiler is not None:
                profiler.loss()
            return output

        def closure() -> None:
            given, wanted = _apart(inputs), _apart(target)
            with self.step(), _explained(inputs, target):
                loss = loss_fn(forward(given), wanted)  # nobody holds the output through backward
            _check_loss(loss)
            with _ungraded(loss, self._model):
                loss.backward()

        self._replay(closure, bypass=True)
        done("a plain step")
        parts: dict[str, Any] = {
            "parameter_bytes": _nbytes([*self._model.parameters(), *self._model.buffers()]),
            "input_bytes": _nbytes(_tensors([inputs, target])),
            "state_bytes": state_bytes(self._model, self._optimizer),
        }
        if budget_bytes is not None:
            _require_room(int(budget_bytes), parts, _nbytes(self._gradients()))
        for _ in range(learning):
            self._model.zero_grad(set_to_none=True)
            closure()
            done("statistics")
        self._close_step()
        sensitivities = self._state.sensitivities if whole is None else _sensitivities(whole.profile)
        self._slice(region)
        seconds = math.inf
        for _ in range(_TIMED_STEPS):
            seconds = min(seconds, _timed(lambda: self._replay(closure, bypass=True)))
            done("a plain step, timed")
        self._model.zero_grad(set_to_none=True)
        self._store.arena.clear()
        profiler = self._store.listener = StepProfiler()
        self._store.lineage = self._recorder.lineage()
        try:
            for _ in range(_TIMED_STEPS):
                self._replay(closure, bypass=True)
                done("a plain step, operator by operator")
            self._model.zero_grad(set_to_none=True)
            tracer = self._recorder.tracer = Tracer()
            profiler.start()
            self._replay(closure, bypass=False)
            gradients = self._gradients()
            saved = {row.key: row.saved_bytes for row in self._store.rows}
            final = _nbytes(gradients) + transient_bytes(gradients, self._optimizer)
            profile = profiler.stop(sum(parts.values()), sensitivities, final, gradients)
            done("every way to hold every tensor")
        finally:
            self._store.listener = self._store.lineage = self._recorder.tracer = None
            profiler.close()
        exact = self._controller is None  # to the bit, which slices are not
        return StepProfile(
            profile=_keeping_the_loss(dataclasses.replace(profile, **parts), saved),
            saved_bytes=saved,
            plain_seconds=seconds,
            late_values={key: role.value for key, role in self._store.late_values.items()},
            region=region,
            regions=() if exact or whole is not None else tuple(tracer.regions()),
        )

    def _gradients(self) -> list[torch.Tensor]:
        return [p.grad for p in self._model.parameters() if p.grad is not None]

    def _due(self, step: int) -> bool:
        return step >= 0 and self._controller is not None and self._controller.due(step)

    def _is_checked(self, weighted: bool, number: int) -> bool:
        """Whether the lossy tensor of this running number is checked now; turns cover all evenly."""
        count = max(self._counts[weighted], 1)
        first = int(self._state.updates * _GOLDEN % 1.0 * count)
        return (number - first) % count < self._checks_per_refresh

    def _persistent(self) -> list[torch.Tensor]:
        """Gradients and optimizer state as they are now."""
        gradients = self._gradients()
        state = self._optimizer.state.values() if self._optimizer is not None else []
        states = _tensors([list(values.values()) for values in state])
        return [_local(tensor) for tensor in (*gradients, *states)]

    def _momentum(self) -> dict[str, float]:
        """Mean |momentum| of every parameter; of its gradient where the optimizer keeps none."""
        found: dict[str, float] = {}
        for name, parameter in self._model.named_parameters():
            state = self._optimizer.state.get(parameter, {}) if self._optimizer is not None else {}
            momentum = state.get("momentum_buffer", state.get("exp_avg", parameter.grad))
            if isinstance(momentum, torch.Tensor):
                found[name] = float(momentum.abs().mean())
        return found

    def _require_attached(self) -> None:
        if self._installation is None:
            raise AttachError("this session is detached; call squeezebox.attach(model, ...) again.")


Shapes = tuple[tuple[torch.dtype, tuple[int, ...]], ...]


@dataclasses.dataclass(kw_only=True, slots=True)
class _Replanning:
    """The plans made so far, by the inputs that each was made for, and how to make another."""

    plans: dict[Shapes, StepPlan]
    failed: dict[Shapes, str] = dataclasses.field(default_factory=dict)
    sample: Shapes = ()
    target: Any = None
    planner: Callable[..., StepPlan] | None = None  # of a sample

    @staticmethod
    def of(
        model: torch.nn.Module,
        plan: StepPlan,
        sample: tuple[Any, Any] | None,
        loss_fn: LossFunction | None,
        optimizer: torch.optim.Optimizer | None,
    ) -> _Replanning:
        """Holds the sample's shapes and target, not its inputs; cannot plan without sample and loss."""
        if sample is None or loss_fn is None:
            return _Replanning(plans={})
        exact = plan.noise == 0.0
        make = functools.partial(
            make_plan,
            model,
            loss_fn=loss_fn,
            optimizer=optimizer,
            budget=plan.budget_bytes,
            noise=None if exact else plan.noise,
            exact=exact,
        )
        shapes = _shapes(sample[0])
        return _Replanning(plans={shapes: plan}, sample=shapes, target=sample[1], planner=make)

    def covering(self, shapes: Shapes) -> StepPlan | None:
        """The first plan made for inputs at least as large in every dimension."""
        return next((plan for planned, plan in self.plans.items() if _covers(planned, shapes)), None)

    def make(self, shapes: Shapes, arguments: tuple[Any, ...]) -> tuple[StepPlan | None, str]:
        """A plan for these arguments, or why there is none; BudgetError if none fits."""
        assert self.planner is not None
        target = _mapped(lambda tensor: _fitted(tensor, self.sample, shapes), self.target)
        try:
            plan = self.plans[shapes] = self.planner(sample=(arguments, target))
        except OptionError as error:
            self.failed[shapes] = str(error)
            return None, str(error)
        return plan, ""


def _shapes(inputs: Any) -> Shapes:
    return tuple((tensor.dtype, tuple(tensor.shape)) for tensor in _tensors(inputs))


def _covers(planned: Shapes, shapes: Shapes) -> bool:
    """Whether every tensor has its kind, and no dimension longer than planned."""
    return [(dtype, len(sizes)) for dtype, sizes in planned] == [
        (dtype, len(sizes)) for dtype, sizes in shapes
    ] and all(
        size <= most
        for (_, sizes), (_, largest) in zip(shapes, planned, strict=True)
        for size, most in zip(sizes, largest, strict=True)
    )


def _fitted(target: torch.Tensor, sample: Shapes, shapes: Shapes) -> torch.Tensor:
    """The target cut or repeated to other inputs' sizes: where it is as long as the sample's first input.

    A first dimension of as many rows as the input has in its first two (tokens in a row) follows both.
    """
    old, new = (next((sizes for _, sizes in each if sizes), ()) for each in (sample, shapes))
    pairs = dict(enumerate(zip(old, new, strict=False)))
    for dim, size in enumerate(target.shape):
        before, after = pairs.get(dim, (size, size))
        if dim == 0 and size == math.prod(old[:2]) != before:
            before, after = size, math.prod(new[:2])
        if size == before != after:
            target = target.index_select(dim, torch.arange(after) % size)
    return target


class _BoundPolicy:
    """Turns the controller's bounds into codecs."""

    def __init__(self, session: Session) -> None:
        self._session = weakref.proxy(session)

    def choose(self, key: str, rule: Rule, tensor: torch.Tensor) -> Choice:
        """Error-bounded codes for values; sign-preserving ones wherever an operator may read the sign."""
        controller, state = self._session._controller, self._session._state
        if controller is None:
            return Choice(codec="lossless" if rule.role in _SPARSE_ROLES else "keep")
        bound = controller.bound(state, key, rule.role, lambda: 1.0 if rule.scaled else _rms(tensor))
        if bound is None:
            return Choice(codec="keep")
        if not 0.0 < bound < math.inf:  # all zero, or NaN and infinities within
            return Choice(codec="lossless")
        return Choice(codec="entropy" if rule.dense else "entropy-sign", bound=bound, scaled=rule.scaled)


def _controller(
    noise: float | None, controller: Controller | None, exact: bool, has_optimizer: bool
) -> Controller | None:
    given = [name for name, value in (("noise", noise), ("controller", controller)) if value is not None]
    if exact:
        given.append("exact")
    if len(given) > 1:
        raise OptionError(f"{' and '.join(given)} exclude each other; give one of them.")
    if exact:
        return None
    if isinstance(controller, Comet) and not has_optimizer:
        raise OptionError(
            "COMET's rule accepts a share of the optimizer's momentum, and no optimizer was given; "
            "pass optimizer=, or noise= instead of the controller."
        )
    return controller if controller is not None else NoiseBudget(noise=1e-3 if noise is None else noise)


def _check_sample(sample: Any, loss_fn: LossFunction | None) -> tuple[tuple[Any, Any], LossFunction]:
    """Both as they are."""
    if not isinstance(sample, (tuple, list)) or len(sample) != 2 or loss_fn is None:
        raise OptionError("a plan needs sample=(inputs, target) and loss_fn=, to see what a step saves.")
    return (sample[0], sample[1]), loss_fn


def _plannable(model: torch.nn.Module, noise: float | None, exact: bool) -> float:
    """The noise allowed; OptionError where no plan can be made."""
    if exact and noise is not None:
        raise OptionError("noise and exact exclude each other; give one of them.")
    if noise is not None:
        NoiseBudget(noise=noise)  # refuses what is out of range
    if foreign_hooks():
        raise OptionError("a plan cannot be made inside other saved-tensor hooks; leave their context first.")
    if _device(model).type != "cpu":
        raise OptionError(f"plans are for the CPU as yet, and the model is on {_device(model)}; use noise=.")
    return 0.0 if exact else 1e-3 if noise is None else noise


def _check_time_limit(time_limit: float | None, budget: object) -> None:
    if time_limit is None:
        return
    if budget is not None:
        raise OptionError("a plan for a budget takes the least time already; give budget or time_limit.")
    if not 1.0 <= time_limit < math.inf:
        raise OptionError(
            f"time_limit {time_limit:g} is below 1 or not finite; it is a multiple of the plain step's time, "
            "such as 1.3."
        )


def _profiled(
    model: torch.nn.Module,
    sample: tuple[Any, Any],
    loss_fn: LossFunction,
    optimizer: torch.optim.Optimizer | None,
    noise: float,
    budget_bytes: float | None,
    on_progress: Progress | None,
    whole: StepProfile | None = None,
    region: Region | None = None,
) -> StepProfile:
    """A profile of the model as it is; BudgetError if it holds more than ``budget_bytes`` in any case.

    With the ``region`` worked in slices, what statistics say is taken from the ``whole`` step's profile.
    """
    with _restored(model, *[loss_fn] if isinstance(loss_fn, torch.nn.Module) else ()):
        session = attach(model, optimizer=optimizer, noise=noise or None, exact=noise == 0.0)
        if whole is not None:
            session._store.late_values = {key: Role(role) for key, role in whole.late_values.items()}
        try:
            return session._profile(*sample, loss_fn, budget_bytes, on_progress, whole, region)
        finally:
            session.detach()


def _staying(seen: StepProfile) -> StepProfile:
    """The step if nothing may be moved."""
    tensors = tuple(
        dataclasses.replace(
            tensor, options=tuple(o for o in tensor.options if o.action is not Action.OFFLOAD)
        )
        for tensor in seen.profile.tensors
    )
    return dataclasses.replace(seen, profile=dataclasses.replace(seen.profile, tensors=tensors))


def _sensitivities(profile: Profile) -> dict[str, float]:
    """Key -> relative gradient noise for a unit bound, as the options have it."""
    return {
        tensor.key: option.noise / option.bound**2
        for tensor in profile.tensors
        for option in tensor.options
        if option.bound > 0.0
    }


def _profile_key(
    model: torch.nn.Module,
    sample: tuple[Any, Any],
    loss_fn: LossFunction,
    optimizer: torch.optim.Optimizer | None,
    noise: float,
) -> str:
    """What a profile depends on, as a file's name."""
    weights = _tensors(list(loss_fn.parameters())) if isinstance(loss_fn, torch.nn.Module) else ()
    settings = (__version__, noise, type(optimizer).__name__, state_bytes(model, optimizer))
    return profile_key(model, [*_tensors(sample), *weights], loss_fn, *settings)


def _cached(folder: Path, key: str, make: Callable[[], StepProfile]) -> StepProfile:
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


def _plain_peak(seen: StepProfile) -> int:
    """The peak with every tensor kept."""
    return planner.peak(seen.profile, {key: _keeping(nbytes) for key, nbytes in seen.saved_bytes.items()})


def _planned(
    model: torch.nn.Module,
    seen: StepProfile,
    limit: int | None,
    noise: float,
    batch: int,
    seconds: float = math.inf,
    sliced: Callable[[Region], StepProfile] | None = None,
) -> StepPlan:
    """The fastest plan within ``limit`` bytes; without one, the smallest within ``seconds`` beyond plain."""
    used, chosen = _chosen(seen, limit, noise, batch, seconds, sliced)
    return StepPlan(
        model=type(model).__name__,
        budget_bytes=limit,
        noise=noise,
        plain_peak_bytes=_plain_peak(seen),
        plain_seconds=seen.plain_seconds,
        predicted_peak_bytes=chosen.predicted_peak_bytes,
        predicted_seconds=used.plain_seconds + chosen.predicted_seconds,
        predicted_noise=chosen.predicted_noise,
        late_values=seen.late_values,
        region=used.region,
        tensors=tuple(
            PlannedTensor(key=key, saved_bytes=used.saved_bytes[key], option=option)
            for key, option in chosen.choices.items()
        ),
    )


def _chosen(
    seen: StepProfile,
    limit: int | None,
    noise: float,
    batch: int,
    seconds: float,
    sliced: Callable[[Region], StepProfile] | None,
) -> tuple[StepProfile, Plan]:
    """The profile to go by and its plan, sliced if that is needed; BudgetError with what would fit."""
    budget = Budget(peak_bytes=limit or 0, noise=noise)
    if limit is not None:
        with contextlib.suppress(BudgetError):
            return seen, planner.solve(seen.profile, budget)
    best = seen, planner.smallest(seen.profile, noise, seconds)
    for trial in _trials(*best, sliced, noise, seconds) if sliced is not None else ():
        if limit is not None and best[1].predicted_peak_bytes <= limit:
            break
        if trial[1].predicted_peak_bytes < _PAYS * best[1].predicted_peak_bytes:
            best = trial
    if limit is None:
        return best
    if best[1].predicted_peak_bytes > limit:
        raise BudgetError(explain(planner.shortage(best[0].profile, budget, best[1], batch)))
    with contextlib.suppress(BudgetError):
        return best[0], planner.solve(best[0].profile, budget)
    return best


def _trials(
    seen: StepProfile, plan: Plan, sliced: Callable[[Region], StepProfile], noise: float, seconds: float
) -> Iterator[tuple[StepProfile, Plan]]:
    """Profiles and least plans with more and more layers in more and more slices, while the peak falls."""
    lowest, slices = plan.predicted_peak_bytes, 2
    for region in seen.regions:
        before = lowest
        while slices <= region.slices:
            trial = sliced(dataclasses.replace(region, slices=slices))
            try:
                left = seconds - (trial.plain_seconds - seen.plain_seconds)
                plan = planner.smallest(trial.profile, noise, left)
            except BudgetError:  # slices alone take too long
                break
            yield trial, plan
            if plan.predicted_peak_bytes > _PAYS * lowest:
                break
            lowest, slices = plan.predicted_peak_bytes, 2 * slices
        if lowest > _PAYS * before:
            return
        slices //= 2


def _fits(profile: Profile, budget: Budget) -> bool:
    try:
        planner.solve(profile, budget)
    except BudgetError:
        return False
    return True


def _require_room(budget_bytes: int, parts: Mapping[str, int], gradient_bytes: int) -> None:
    """Refuse a budget below what no plan can change."""
    if budget_bytes < sum(parts.values()) + gradient_bytes:
        names = {
            "parameters and buffers": parts["parameter_bytes"],
            "the sample": parts["input_bytes"],
            "gradients": gradient_bytes,
            "optimizer state": parts["state_bytes"],
        }
        raise BudgetError(explain_floor(budget_bytes, names))


def _keeping_the_loss(profile: Profile, saved: Mapping[str, int]) -> Profile:
    """The profile with no choice for what the loss saves."""
    keys = {each.key for each in profile.moments if each.phase == "loss" and each.event == "save"}
    tensors = tuple(
        dataclasses.replace(tensor, options=(_keeping(saved[tensor.key]),)) if tensor.key in keys else tensor
        for tensor in profile.tensors
    )
    return dataclasses.replace(profile, tensors=tensors)


def _keeping(nbytes: int) -> Option:
    return Option(action=Action.KEEP, codec="keep", held_bytes=nbytes)


def _batch(sample: tuple[Any, Any]) -> int:
    """First size of the first of the sample's inputs that has one; 0 if none has."""
    return next((tensor.shape[0] for tensor in _tensors(sample[0]) if tensor.dim()), 0)


def _resized(sample: tuple[Any, Any], batch: int, size: int) -> tuple[Any, Any]:
    """The sample with ``size`` instead of ``batch`` rows, cut off or repeated."""
    if size == batch:
        return sample

    def resized(tensor: torch.Tensor, multiple: bool) -> torch.Tensor:
        rows = tensor.shape[0] if tensor.dim() else 0
        if rows == 0 or rows % batch or (rows > batch and not multiple):
            return tensor
        needed = rows // batch * size
        with torch.no_grad():
            repeated = torch.cat([tensor] * math.ceil(needed / rows)) if needed > rows else tensor
            return repeated[:needed].clone().requires_grad_(tensor.requires_grad)

    inputs, target = sample
    return _mapped(lambda t: resized(t, False), inputs), _mapped(lambda t: resized(t, True), target)


def _mapped(change: Callable[[torch.Tensor], torch.Tensor], values: Any) -> Any:
    """The same tuples, lists and dictionaries with their tensors changed."""
    if isinstance(values, torch.Tensor):
        return change(values)
    if isinstance(values, Mapping):
        return {key: _mapped(change, value) for key, value in values.items()}
    if isinstance(values, (list, tuple)):
        changed = [_mapped(change, value) for value in values]
        return type(values)(*changed) if hasattr(values, "_fields") else type(values)(changed)
    return values


def _apart(values: Any) -> Any:
    """The same values cut off from whatever made them, so that backward ends there."""
    if not any(tensor.requires_grad for tensor in _tensors(values)):
        return values
    return _mapped(lambda tensor: tensor.detach().requires_grad_(tensor.requires_grad), values)


def _described(values: Any) -> str:
    """Shapes and dtypes of the tensors within."""
    found = [f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)}" for t in _tensors(values)]
    return ", ".join(found) or f"no tensor ({type(values).__name__})"


@contextlib.contextmanager
def _restored(model: torch.nn.Module, *others: torch.nn.Module) -> Iterator[None]:
    """Put gradients of the model, and buffers of all modules and random states back afterwards."""
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    buffers = [
        (module, name, buffer, buffer.clone())
        for each in (model, *others)
        for module in each.modules()
        for name, buffer in module.named_buffers(recurse=False)
    ]
    random = torch.get_rng_state()
    device = _device(model)
    on_device = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    try:
        yield
    finally:
        for parameter, gradient in gradients:
            parameter.grad = gradient
        with torch.no_grad():
            for module, name, buffer, value in buffers:
                buffer.copy_(value)
                module._buffers[name] = buffer  # the module may have put another one in its place
        torch.set_rng_state(random)
        if on_device is not None:
            torch.cuda.set_rng_state(on_device, device)


@contextlib.contextmanager
def _ungraded(loss: torch.Tensor, model: torch.nn.Module) -> Iterator[None]:
    """Leave the gradients of everything but the model as they were: of a loss's own parameters, say."""
    own = {id(parameter) for parameter in model.parameters()}
    before = [(leaf, leaf.grad) for leaf in leaves(loss) if id(leaf) not in own]
    for leaf, _ in before:
        leaf.grad = None
    try:
        yield
    finally:
        for leaf, gradient in before:
            leaf.grad = gradient


@contextlib.contextmanager
def _explained(inputs: Any, target: Any) -> Iterator[None]:
    """Errors of the model or the loss say what they were given."""
    try:
        yield
    except SqueezeboxError:
        raise
    except (RuntimeError, ValueError, TypeError, IndexError) as error:
        raise OptionError(
            f"the model or the loss fails on the sample with inputs {_described(inputs)} and target "
            f"{_described(target)}: {type(error).__name__}: {error}. Give sample=(inputs, target) as a "
            "training step gets them; several inputs are a tuple."
        ) from error


def _check_loss(loss: Any) -> None:
    """Refuse what backward cannot start from."""
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        what = (
            f"a tensor {_described(loss)}" if isinstance(loss, torch.Tensor) else f"a {type(loss).__name__}"
        )
        raise OptionError(f"loss_fn returned {what}; backward starts from one number, such as its mean.")
    if not loss.requires_grad:
        raise OptionError(
            "loss_fn returned a tensor that does not depend on any parameter by differentiable operations "
            "(detached, argmax, frozen parameters, or inside torch.no_grad()), so there is no backward."
        )


def _device(model: torch.nn.Module) -> torch.device:
    return next((parameter.device for parameter in model.parameters()), torch.device("cpu"))


def _check_compile_options(
    plan: StepPlan | None,
    noise: float | None,
    bits: int | None,
    sample: tuple[Any, Any] | None,
    loss_fn: LossFunction | None,
) -> None:
    given = [name for name, value in (("plan", plan), ("noise", noise), ("bits", bits)) if value is not None]
    if len(given) > 1:
        raise OptionError(f"{' and '.join(given)} exclude each other; give one of them.")
    if bits is not None and bits not in BITS:
        raise OptionError(f"bits is {bits!r}; values are packed in {', '.join(map(str, BITS))} bits.")
    if noise is not None and not 0.0 < noise < math.inf:
        raise OptionError(f"noise is {noise!r}; give a positive share of the gradient, such as 1e-2.")
    if len({noise is None, sample is None, loss_fn is None}) > 1:
        raise OptionError("noise, sample=(inputs, target) and loss_fn= go together; give all three or none.")


def _refuse_compiled(model: torch.nn.Module) -> None:
    part = compiled_part(model)
    if part is not None:
        raise UnsupportedModelError(
            f"module '{part}' is compiled by torch.compile already, and its graphs are made without packing. "
            "Pass the eager model to squeezebox.compile(), which compiles it as torch.compile does."
        )


def _refuse_attached(model: torch.nn.Module) -> None:
    if model in _attached:
        raise AttachError(
            f"{type(model).__name__} is attached: its hooks cannot be compiled. Call detach() on its session "
            "before compiling it, or before the compiled step is called."
        )


def _check_places(model: torch.nn.Module, plan: StepPlan) -> None:
    """Every module that the plan names is one of the model's."""
    modules = dict(model.named_modules())
    for tensor in plan.tensors:
        path = tensor.key.rpartition(":")[0]
        if path not in modules:
            raise PlanError(
                f"the plan, made for {plan.model}, has a tensor '{tensor.key}', and this "
                f"{type(model).__name__} has no module '{path}': it was made for another model. Make a new "
                "one with squeezebox.plan()."
            )


def _half_steps(
    model: torch.nn.Module, plan: StepPlan, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> HalfSteps:
    """What each number of bits would mean for each of the plan's tensors, from one eager forward."""
    with _restored(model), torch.enable_grad():
        session = attach(model, plan=plan)
        found = session._store.listener = HalfSteps()
        try:
            model(*args, **kwargs)
        finally:
            session._store.listener = None
            session.detach()
    return found


def _planned_bits(plan: StepPlan, half_steps: HalfSteps) -> BitRule:
    """The fewest bits within each bound; None where the tensor is kept."""
    chosen: dict[str, int | None] = {}
    for tensor in plan.tensors:
        option, known = tensor.option, half_steps.by_key.get(tensor.key, {})
        if option.action in (Action.OFFLOAD, Action.RECOMPUTE, Action.REGENERATE):
            chosen[tensor.key] = 8 if plan.noise > 0.0 else None
        elif option.bound > 0.0:
            chosen[tensor.key] = min((bits for bits in known if known[bits] <= option.bound), default=None)
        elif option.action is Action.KEEP or option.codec == "lossless":
            chosen[tensor.key] = None
    return BitRule(default=None, by_key=chosen)


def _bits_within(
    model: torch.nn.Module, sample: tuple[Any, Any], loss_fn: LossFunction, noise: float
) -> BitRule:
    """The choice of bits that holds least, at no more noise by the error law."""
    inputs, target = sample
    arguments = inputs if isinstance(inputs, tuple) else (inputs,)
    with _restored(model):
        session = attach(model, noise=noise)
        try:
            for _ in range(_STATISTICS_STEPS):
                model.zero_grad(set_to_none=True)
                loss_fn(model(*arguments), target).backward()
            session._close_step()
            found = session._store.listener = HalfSteps()
            loss_fn(model(*arguments), target)
            sensitivities = session._state.sensitivities
        finally:
            session._store.listener = None
            session.detach()
    tensors = tuple(
        TensorProfile(
            key=key,
            saved_at=0,
            first_use=1,
            last_use=1,
            options=_bit_options(found, key, sensitivities[key]),
        )
        for key in found.by_key
        if key in sensitivities
    )
    if not tensors:
        return BitRule(default=None)
    plan = planner.smallest(Profile(base_bytes=(0, 0), tensors=tensors), noise)
    by_key = {key: int(option.codec) if option.codec else None for key, option in plan.choices.items()}
    return BitRule(default=None, by_key=by_key)


def _bit_options(half_steps: HalfSteps, key: str, sensitivity: float) -> tuple[Option, ...]:
    numel = half_steps.numel[key]
    keep = Option(action=Action.KEEP, held_bytes=half_steps.saved_bytes[key])
    return keep, *(
        Option(
            action=Action.COMPRESS,
            codec=str(bits),
            held_bytes=numel * bits // 8,
            noise=sensitivity * half_step**2,
        )
        for bits, half_step in half_steps.by_key[key].items()
        if bits in _LAW_BITS
    )


def _names(model: torch.nn.Module) -> dict[int, str]:
    return {id(parameter): name for name, parameter in model.named_parameters()}


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    if isinstance(values, torch.Tensor):
        yield values
    elif isinstance(values, Mapping):
        yield from _tensors(list(values.values()))
    elif isinstance(values, (list, tuple)):
        for value in values:
            yield from _tensors(value)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a sharded tensor, or the tensor."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _nbytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the tensors' storages, each once."""
    storages = (tensor.untyped_storage() for tensor in tensors if is_plain(tensor.data))
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())


def _admit(
    model: str, planned: Mapping[str, int], notes: dict[str, None] | None, key: str, nbytes: int
) -> None:
    """Refuse, or note, a tensor that the plan does not know, or not of that size; a smaller one is fine."""
    known = planned.get(key)
    if known is not None and nbytes <= known:
        return
    if notes is not None:
        notes[f"'{key}' was larger than planned, or not planned and held exactly"] = None
    else:
        size = "no such tensor" if known is None else f"{known} bytes"
        raise PlanError(
            f"'{key}' saves {nbytes} bytes and the plan, made for {model}, knows {size}: it was made "
            "for another model, input shape or batch, or for one forward before each backward. Make a "
            "new one with squeezebox.plan()."
        )


_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def _size_named(budget: int | str) -> tuple[float, bool]:
    """(bytes, False) of a number or "2GiB"; (share, True) of "50%"."""
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*([A-Za-z]*|%)", str(budget).strip())
    unit = found[2].upper() if found else ""
    if not found or (unit and unit != "%" and unit not in _UNITS) or not float(found[1]) > 0:
        raise OptionError(f"budget {budget!r} is no size; give bytes, '2GiB', '800MB' or '50%'.")
    return float(found[1]) * (0.01 if unit == "%" else _UNITS[unit or "B"]), unit == "%"


def _timed(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def _dtype_named(dtype: torch.dtype | str | None) -> torch.dtype | None:
    if not isinstance(dtype, str):
        return dtype
    found = getattr(torch, dtype, None)
    if isinstance(found, torch.dtype):
        return found
    raise OptionError(f"'{dtype}' is no dtype of torch; name one such as float32, bfloat16 or int64.")


def _rms(tensor: torch.Tensor) -> float:
    """Root mean square of the non-zero elements."""
    count = int(torch.count_nonzero(tensor))
    return float(torch.linalg.vector_norm(tensor, dtype=torch.float32)) / math.sqrt(count) if count else 0.0


def _energy(tensor: torch.Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor, dtype=torch.float32)) ** 2

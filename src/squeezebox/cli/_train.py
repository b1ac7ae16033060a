"""``squeezebox pipeline plan`` and ``train``: a model planned for several ranks, and one rank of it."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import statistics
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from squeezebox import pipeline
from squeezebox.cli._checkpoints import Checkpoints
from squeezebox.cli._estimate import load_factory, load_loss, needed_arguments
from squeezebox.cli._plan import Step, load_model
from squeezebox.cli._show import progress
from squeezebox.cli._values import link_of, require_apart
from squeezebox.planning import attach_stages, peak_meter, plan_pipeline
from squeezebox.profiling import optimizer_named
from squeezebox.reports import human_bytes, load_pipeline_plan, parse_size, require_writable
from squeezebox.schema import Devices, OptionError, PipelinePlan
from squeezebox.steps import stand_in


@dataclass(frozen=True)
class PlanRequest:
    """What the command line names."""

    factory: str
    input: str | None
    input_dtype: str | None
    batch: int | None
    sample: str | None
    loss: str | None
    optimizer: str
    ranks: int | None
    memory: str | None
    devices: Path | None
    microbatches: str | None
    schedules: str
    policies: str
    noise: float
    depth: int | None
    threads: int
    bandwidth: str | None
    latency: float


def make(request: PlanRequest, out: Path) -> list[PipelinePlan]:
    """All plans that fit, the fastest first, which is also written to ``out``.

    Raises:
        OptionError: an argument is out of range or names nothing.
        BudgetError: no plan fits.
        OutputError: ``out`` cannot be written; found before anything is run.
    """
    step = Step(
        request.factory,
        request.input,
        request.batch,
        request.sample,
        request.loss,
        request.optimizer,
        input_dtype=request.input_dtype,
    )
    make_sample = step.maker()
    if request.threads < 1:
        raise OptionError(f"--threads {request.threads} is below 1; give at least 1.")
    if request.loss is not None and request.sample is None:
        raise OptionError("--loss needs targets: also give --sample module:callable, or leave it out.")
    if [request.ranks is None, request.memory is None] != [request.devices is not None] * 2:
        raise OptionError("give --ranks and --memory, or --devices for devices that are not alike.")
    if request.devices is not None and (request.bandwidth is not None or request.latency):
        raise OptionError("--devices has the links: leave out --bandwidth and --latency.")
    link = link_of(request.bandwidth, request.latency)
    require_apart({"--out": out}, {"--devices": request.devices})
    devices = None if request.devices is None else Devices.load(request.devices)
    require_writable(out)
    torch.set_num_threads(request.threads)
    with progress("measuring blocks") as on_progress:
        together = "compress" in request.policies  # which runs all of the model at once
        with contextlib.nullcontext() if together else pipeline.Construction() as construction:
            model = load_model(request.factory)
        plans = plan_pipeline(
            model,
            sample=make_sample(model),
            loss_fn=stand_in if request.loss is None else load_loss(request.loss),
            ranks=request.ranks,
            memory_bytes=None if request.memory is None else parse_size("--memory", request.memory),
            devices=devices,
            optimizer=optimizer_of(request.optimizer, model, None),
            microbatches=None if request.microbatches is None else _integers(request.microbatches),
            schedules=request.schedules.split(","),
            policies=request.policies.split(","),
            noise=request.noise,
            depths=None if request.depth is None else [request.depth],
            link=link,
            construction=construction,
            on_progress=on_progress,
        )
    plans = [dataclasses.replace(plan, model=request.factory, loss=request.loss or "") for plan in plans]
    plans[0].save(out)
    return plans


def optimizer_of(name: str, model: nn.Module, rate: float | None) -> torch.optim.Optimizer:
    """An optimizer of all of the model's parameters, with its usual learning rate or another.

    Raises:
        OptionError: there is none of that name, or the rate is not above 0.
    """
    optimizer = optimizer_named(name)(model.parameters())
    if rate is not None:
        if not rate > 0.0:
            raise OptionError(f"--lr {rate}: give a learning rate above 0.")
        for group in optimizer.param_groups:
            group["lr"] = rate
    return optimizer


def _integers(text: str) -> list[int]:
    try:
        return [int(each) for each in text.split(",")]
    except ValueError as error:
        raise OptionError(f"--microbatches {text}: write sizes such as 1,2,4.") from error


_MEASURED = 3  # batches in which memory is measured; the ones after it are timed


@dataclass(frozen=True)
class Request:
    """What the command line names."""

    plan: Path
    data: str
    loss: str | None
    optimizer: str
    rate: float | None
    steps: int | None
    clip: float | None
    correction: bool
    warmup: int
    vertical_sync: bool
    shard: bool | None
    weights: Path | None
    checkpoint: Path | None
    save_every: int
    resume: bool
    patience: float
    log_every: int
    as_json: bool = False


def run(request: Request) -> None:
    """Train, printing losses on the last rank, and on the first one what was measured against the plan.

    Raises:
        OptionError: an argument is out of range or names nothing.
        PipelineError: ranks do not agree, or one of them failed.
    """
    _check(request)
    with contextlib.redirect_stdout(sys.stderr if request.as_json else sys.stdout):
        plan = load_pipeline_plan(request.plan)
        loss = request.loss or plan.loss
        if not plan.model or not loss:
            raise OptionError(
                f"{request.plan} names no {'model' if not plan.model else 'loss'}; give --loss."
            )
        pipeline.join()
        with pipeline.Construction() as construction:
            model = load_model(plan.model)
        runner = pipeline.Runner(
            model,
            plan,
            optimizer=optimizer_of(request.optimizer, model, request.rate),
            loss_fn=load_loss(loss),
            clip=request.clip,
            correction=request.correction,
            warmup=request.warmup,
            vertical_sync=request.vertical_sync,
            shard=request.shard,
            patience=request.patience,
            construction=construction,
            weights=request.weights,
        )
        sessions = attach_stages(runner)
        batches = _batches(request, runner)
        checkpoints = Checkpoints(runner, request.checkpoint, request.save_every)
        first = checkpoints.begin(resume=request.resume)
        peak, seconds = _train(request, runner, batches, first, checkpoints)
        for session in sessions:
            session.detach()
    _print_report(plan, runner.gather([peak, seconds]), checkpoints, request.as_json)
    runner.close()


def _check(request: Request) -> None:
    if request.checkpoint is None and (request.resume or request.save_every):
        raise OptionError("--resume and --save-every need --checkpoint, the directory of the checkpoints.")
    if request.log_every < 1:
        raise OptionError(f"--log-every {request.log_every}: give 1 or more batches.")


def _batches(request: Request, runner: pipeline.Runner) -> Iterator[Any]:
    """This pipeline's share of each batch from the first one on; nothing is made before it is read."""
    made, replicas = load_factory(request.data, arguments=2), runner.plan.replicas

    def read() -> Iterator[Any]:
        if needed_arguments(made):
            yield from made(runner.replica, replicas)
            return
        for inputs, target in made():
            if (rows := _rows(inputs)) >= replicas:
                yield tuple(_share(each, runner.replica, replicas) for each in (inputs, target))
            elif runner.replica == 0:
                print(f"a batch of {rows} is left out, as there are {replicas} replicas", flush=True)

    return read()


def _rows(inputs: Any) -> int:
    """Samples of a tensor, or of the first one in a structure."""
    while isinstance(inputs, tuple | list | Mapping):
        inputs = next(iter(inputs.values() if isinstance(inputs, Mapping) else inputs))
    return len(inputs)


def _share(value: Any, replica: int, replicas: int) -> Any:
    """The rows of a whole batch that go through one pipeline: as many as through others, or one more."""
    if isinstance(value, tuple | list):
        return tuple(_share(each, replica, replicas) for each in value)
    if isinstance(value, Mapping):
        return {key: _share(each, replica, replicas) for key, each in value.items()}
    if value is None:
        return None
    least, more = divmod(len(value), replicas)
    first = replica * least + min(replica, more)
    return value[first : first + least + (replica < more)]


def _train(
    request: Request, runner: pipeline.Runner, batches: Iterator[Any], first: int, checkpoints: Checkpoints
) -> tuple[int, float | None]:
    """Peak bytes of the first few batches, and a later one's median seconds, if there is one."""
    meter, held, peak, times = peak_meter(runner.stages.values()), _held_bytes(runner), 0, list[float]()
    done = first
    whose = f", replica {runner.replica}" if runner.plan.replicas > 1 else ""

    def measured() -> int:
        runner.drain()
        return held + meter.stop(()).total_bytes

    for number, batch in enumerate(_up_to(request.steps, first, runner.read(batches, last=True)), first):
        if number == first:  # what making batches takes is not the pipeline's
            meter.start()
        begun, done = time.perf_counter(), number + 1
        loss = runner.step(*batch)
        if not meter.running:
            times.append(time.perf_counter() - begun)
        elif number == first + _MEASURED - 1:
            peak = measured()
        if loss is not None and number % request.log_every == 0:
            print(f"batch {number}{whose}: loss {loss.item():.6g}", flush=True)
        checkpoints.after(done)
    if meter.running:
        peak = measured()
    runner.drain()
    checkpoints.finish(done)
    if pipeline.is_first_process():
        _print_end(request.steps, first, done)
    return peak, statistics.median(times) if times else None


def _up_to(steps: int | None, first: int, batches: Iterator[Any]) -> Iterator[Any]:
    """Batches until ``steps`` are done, of which ``first`` were before; nothing behind them is read."""
    return itertools.islice(batches, None if steps is None else max(steps - first, 0))


def _print_end(steps: int | None, first: int, done: int) -> None:
    """Why there were fewer batches than a reader expects, if there were."""
    if done < (steps or 0):
        print(f"the data ended after {done} batches, of {steps}")
    elif done == first > 0:
        print(f"nothing was left to train on: {done} batches were done before")


def _held_bytes(runner: pipeline.Runner) -> int:
    """What is there before the first batch: weights, and after a resume the optimizer's state."""
    values = [value for state in runner.optimizer.state.values() for value in state.values()]
    return runner.weights_bytes + sum(getattr(value, "nbytes", 0) for value in values)


def _print_report(plan: PipelinePlan, measured: list[Any], checkpoints: Checkpoints, as_json: bool) -> None:
    """On the first rank: what was planned, what came, and where the weights are."""
    if not pipeline.is_first_process():
        return
    seconds = max((each[1] for each in measured if each[1] is not None), default=None)
    ranks = sorted(range(plan.ranks), key=(plan.processes or range(plan.ranks)).__getitem__)
    if as_json:
        peaks = [peak for peak, _ in measured]
        planned_peaks = [plan.rank_peak_bytes[ranks[number % plan.ranks]] for number in range(len(measured))]
        figures = {"seconds": seconds, "planned_seconds": plan.seconds}
        figures |= {"peak_bytes": peaks, "planned_peak_bytes": planned_peaks}
        saved = None if checkpoints.newest is None else str(checkpoints.newest)
        print(json.dumps({**figures, "checkpoint": saved}, indent=1))
        return
    told = f"not measured in fewer than {_MEASURED + 1} batches" if seconds is None else f"{seconds:.4g}"
    print(f"seconds a batch: {told}, planned {plan.seconds:.4g}")
    print(f"{'rank':>4} {'stages':<12} {'peak':>10} {'planned':>10}")
    for number, (peak, _) in enumerate(measured):
        rank = ranks[number % plan.ranks]
        planned = plan.rank_peak_bytes[rank]
        own = [stage for stage in range(len(plan.stages)) if rank in plan.ranks_of(stage)]
        stages = ", ".join(map(str, own))
        print(f"{number:>4} {stages:<12} {human_bytes(peak):>10} {human_bytes(planned):>10}")
    print(checkpoints.summary())

"""Peak and time of a training step under budgets, from the plain step's peak down to the least that fits.

Goes in: nothing; networks from benchmarks/tasks.py, briefly trained on photographs or text. Comes out:
benchmarks/reports/budget-<date>.json and .md. Networks of one day and commit share a report, so that they
can be run one after another.

A step is zero_grad, forward, loss, backward and the optimizer's step. Its peak is everything: parameters,
gradients, optimizer state, inputs, saved tensors, operators' own memory. Budgets are evenly spaced between
the plain peak and the least one found. All plans of a network are made from one profiled step.

Rivals are gradient checkpointing of each block and of the square root of all blocks together, and every
saved tensor moved to a file. Each is met by a plan whose budget is the rival's measured peak and a
thousandth. Ours, the rival and a plain step are timed in alternation; seconds are ratios within a round,
medians over the rounds.

A plan predicts forward and backward. The optimizer's share of the plain step, measured, is added to what it
predicts before it is compared with the step that was timed.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import hashlib
import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

import squeezebox
from benchmarks import _budget_tables, _deeper, _report, checkpointing, tasks
from benchmarks.tasks import SETUPS, Setup, Task
from squeezebox import planner
from squeezebox.planning import _plans, _slicing
from squeezebox.reports import StepPlan
from squeezebox.schema import Action, Budget, BudgetError, Option, OptionError, Profile, Region, StepProfile
from squeezebox.session import Session
from squeezebox.steps import TrainingStep

QUICK = {
    "networks": ["resnet18", "gpt"],
    "batch": 4,
    "size": 64,
    "train_steps": 5,
    "budgets": 3,
    "repeats": 1,
    "seconds": 0.0,
    "milp_seconds": 15.0,
    "name": "budget-quick",
}
PACKED_STEPS = 8  # in which the bounds settle,
CALIBRATIONS = 4  # then steps after which they are corrected by the whole noise,
NOISE_STEPS = 5  # and those of which the figures are medians,
CHECKS = 12  # with so many checks at each refresh
EXACT_SHARE = 0.8  # of the plain peak
MILP_SHARES = (0.75, 0.5, 0.25)  # of the way from the least budget to the plain peak
DEEP_TENSORS = 1000


def main() -> None:
    arguments = _arguments()
    networks: dict[str, Any] = dict(_report.today(arguments.name))
    for name in arguments.networks:
        torch.manual_seed(0)
        started = time.perf_counter()
        networks[name] = measure(name, _setup(name, arguments), arguments)
        networks[name]["settings"] = vars(arguments)
        networks[name]["seconds"] = time.perf_counter() - started
        paths = _report.write(arguments.name, networks, _budget_tables.render(networks))
        print(name, f"{networks[name]['seconds']:.0f} s", *paths, file=sys.stderr, flush=True)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("networks", nargs="*", default=list(SETUPS), metavar="network")
    parser.add_argument("--batch", type=int, help="default: the network's in benchmarks/tasks.py")
    parser.add_argument("--size", type=int, help="side of images, length of texts; default: as above")
    parser.add_argument("--train-steps", type=int, help="before all; default: as above")
    parser.add_argument("--noise", type=float, default=1e-2)
    parser.add_argument("--budgets", type=int, default=10, help="steps from the plain peak to the least")
    parser.add_argument("--repeats", type=int, default=5, help="rounds of a timing, at least")
    parser.add_argument("--seconds", type=float, default=5.0, help="and as many as plain steps take so long")
    parser.add_argument("--milp-seconds", type=float, default=60.0, help="for all its budgets together")
    parser.add_argument("--quick", action="store_true", help="two small networks, three budgets, once")
    parser.add_argument("--name", default="budget", help="of the report")
    if "--quick" in sys.argv[1:]:
        parser.set_defaults(**QUICK)
    arguments = parser.parse_args()
    unknown = sorted(set(arguments.networks) - set(SETUPS))
    if unknown:
        parser.error(f"no networks {', '.join(unknown)}; there are {', '.join(SETUPS)}")
    return arguments


def _setup(name: str, arguments: argparse.Namespace) -> Setup:
    setup = SETUPS[name]
    given = {key: getattr(arguments, key) for key in ("batch", "size", "train_steps")}
    given = {key: value for key, value in given.items() if value is not None}
    if arguments.quick:
        return setup.smaller(**given)
    return dataclasses.replace(setup, **given)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Bench:
    """The same network three times: left plain, under a plan, and under a rival."""

    plain: Task
    ours: Task
    theirs: Task
    update_share: float  # of a plain step's seconds, spent in the optimizer
    noise: float
    repeats: int

    def timed(self, *names: str) -> _report.Comparison:
        """Steps of these, in alternation."""
        return _report.interleaved({name: getattr(self, name).step for name in names}, self.repeats)


def measure(name: str, setup: Setup, arguments: argparse.Namespace) -> dict[str, Any]:
    """Everything of one network."""
    plain = tasks.build(name, setup)
    total, activations = plain.peak()
    fixed = plain.fixed_bytes()
    repeats = max(arguments.repeats, int(arguments.seconds / _report.timed(plain.step, 3).median))
    bench = Bench(
        plain=plain,
        ours=plain.copy(),
        theirs=plain.copy(),
        update_share=_update_share(plain, repeats),
        noise=arguments.noise,
        repeats=repeats,
    )
    with _shared_profiles() as profiles:
        least = planned(bench, None)
        low, high = least["predicted_peak_bytes"], max(total, least["plain_predicted_peak_bytes"])
        shares = [number / arguments.budgets for number in range(arguments.budgets, 0, -1)]
        rows = [met(bench, int(low + share * (high - low))) for share in shares]
        return {
            "batch": setup.batch,
            "size": setup.size,
            "plain": {"peak_bytes": total, "activation_peak_bytes": activations, "fixed_bytes": fixed},
            "profile_seconds": profiles[arguments.noise, None].seconds,
            "budgets": [*rows, least],
            "all_packed": all_packed(bench),
            "rivals": rivals(bench),
            "exact": exact(bench, int(EXACT_SHARE * total)),
            "planner": optimality(profiles[arguments.noise, None], high, bench.noise, arguments.milp_seconds),
            "deep": deep(profiles[arguments.noise, None].step.profile, bench.noise),
        }


def _update_share(task: Task, repeats: int) -> float:
    arms = {"step": task.step, "update": task.optimizer.step}
    return _report.interleaved(arms, repeats).ratios["update/step"].median


@contextlib.contextmanager
def _shared_profiles() -> Iterator[dict[tuple[float, Region | None], Profiled]]:
    """Plans made within it share profiled steps, by noise and layers in slices."""
    own, made = _plans.profile_step, {}

    def once(step: TrainingStep, *others: Any, region: Region | None = None, **named: Any) -> StepProfile:
        kind = (step.noise, region)
        if kind not in made:
            begun = time.perf_counter()
            seen = own(step, *others, region=region, **named)
            made[kind] = Profiled(seen, time.perf_counter() - begun)
        return made[kind].step

    _plans.profile_step = _slicing.profile_step = once
    try:
        yield made
    finally:
        _plans.profile_step = _slicing.profile_step = own


@dataclasses.dataclass(frozen=True, slots=True)
class Profiled:
    """A profiled step, and how long it took."""

    step: StepProfile
    seconds: float


def met(bench: Bench, budget: int, *others: str) -> dict[str, Any]:
    """One budget, or the least plan where it is refused."""
    try:
        return planned(bench, budget, *others) | {"refused": ""}
    except BudgetError as error:
        return planned(bench, None, *others) | {"budget_bytes": budget, "refused": str(error)}


def planned(bench: Bench, budget: int | None, *others: str) -> dict[str, Any]:
    """One budget: the plan, then its step, beside a plain one and maybe others."""
    begun = time.perf_counter()
    plan = _plan(bench.ours, budget, noise=bench.noise)
    planning = time.perf_counter() - begun
    with _attached(bench.ours, plan) as session:
        for _ in range(2):  # the session measures the first ones itself
            bench.ours.step()
            record = session.report().record
        peak, activations = bench.ours.peak()
        compared = bench.timed("ours", *others, "plain")
        ratios = {pair: dataclasses.asdict(spread) for pair, spread in compared.ratios.items()}
        extra = plan.predicted_seconds / plan.plain_seconds - 1.0
        return {
            "budget_bytes": plan.budget_bytes,
            "peak_bytes": peak,
            "activation_peak_bytes": activations,
            "predicted_peak_bytes": plan.predicted_peak_bytes,
            "plain_predicted_peak_bytes": plan.plain_peak_bytes,
            "saved_bytes": record.saved_bytes,
            "packed_bytes": record.packed_bytes,
            "by_action": _by_action(plan),
            "ratios": ratios,
            "predicted_over_plain": 1.0 + extra * (1.0 - bench.update_share),
            "noise": session.measure_noise(bench.ours.backward),
            "predicted_noise": plan.predicted_noise,
            "planning_seconds": planning,
        }


def all_packed(bench: Bench) -> dict[str, Any]:
    """Saved and packed bytes where nothing is kept or moved: the noise budget without a budget of bytes.

    Bounds settle, then are corrected by the noise of a few whole steps. Noise differs from step to step by a
    factor of two or so, so the figures are medians.
    """
    task, records = bench.ours, []
    options = {"optimizer": task.optimizer, "noise": bench.noise, "checks_per_refresh": CHECKS}
    session = squeezebox.attach(task.model, **options)
    try:
        for _ in range(PACKED_STEPS):
            task.step()
        for _ in range(CALIBRATIONS):
            task.step()
            session.calibrate(task.backward)
        for _ in range(NOISE_STEPS):
            task.step()
            session.measure_noise(task.backward)
            records.append(session.report().record)
    finally:
        session.detach()
    return {
        "saved_bytes": records[0].saved_bytes,
        "packed_bytes": statistics.median(record.packed_bytes for record in records),
        "noise": statistics.median(record.noise for record in records),
        "noises": [record.noise for record in records],
    }


def _plan(task: Task, budget: int | None, **kind: Any) -> StepPlan:
    return squeezebox.plan(
        task.model,
        sample=(task.inputs, task.target),
        loss_fn=task.loss_fn,
        optimizer=task.optimizer,
        budget=budget,
        **kind,
    )


@contextlib.contextmanager
def _attached(task: Task, plan: StepPlan) -> Iterator[Session]:
    session = squeezebox.attach(task.model, optimizer=task.optimizer, plan=plan)
    try:
        yield session
    finally:
        session.detach()


def _by_action(plan: StepPlan) -> dict[str, dict[str, int]]:
    """Action -> how many tensors, their bytes, and the bytes that the plan holds instead."""
    totals: dict[str, Counter[str]] = {}
    for tensor in plan.tensors:
        held = {"tensors": 1, "saved_bytes": tensor.saved_bytes, "held_bytes": tensor.option.held_bytes}
        totals.setdefault(tensor.option.action.value, Counter()).update(held)
    return {action: dict(total) for action, total in totals.items()}


def rivals(bench: Bench) -> dict[str, Any]:
    """Every other way to save memory, each met by a plan for the peak that it has."""
    task = bench.theirs
    together = checkpointing.groups(task.model)
    return {
        "checkpointing 1": _against(bench, checkpointing.checkpointed(task.model)),
        f"checkpointing {together}": _against(bench, checkpointing.checkpointed(task.model, together)),
        "offload all": _against(bench, _offloaded(task)),
    }


def _against(bench: Bench, rival: AbstractContextManager[object]) -> dict[str, Any]:
    """The rival's peak, and our plan for it."""
    with rival:
        bench.theirs.step()
        peak, activations = bench.theirs.peak()
        return {
            "peak_bytes": peak,
            "activation_peak_bytes": activations,
            "ours": met(bench, int(_budget_tables.PEAK_SLACK * peak), "theirs"),
        }


@contextlib.contextmanager
def _offloaded(task: Task) -> Iterator[None]:
    """Every saved tensor of which backward reads values, masks or indices is moved to a file, whole."""
    plan = _plan(task, None, exact=True)
    file = Option(action=Action.OFFLOAD, codec="file", held_bytes=0)
    moved = tuple(dataclasses.replace(tensor, option=file) for tensor in plan.tensors)
    with _attached(task, dataclasses.replace(plan, tensors=moved)) as session:
        for _ in range(2):
            task.step()
        session.report()  # ends the session's own measurement, of these steps
        yield


def exact(bench: Bench, budget: int) -> dict[str, Any]:
    """Whether a step under an exact plan is a plain one to the bit: loss, gradients and buffers.

    ``repeats`` says whether two plain steps are, without which the comparison would say nothing.
    """
    task = bench.ours
    try:
        plan = _plan(task, budget, exact=True)
    except BudgetError:
        plan = _plan(task, None, exact=True)
    first, again = _outcome(task), _outcome(task)
    with _attached(task, plan) as session:
        squeezed = [_outcome(task) for _ in range(2)]
        session.report()  # ends the session's own measurement
        peak, _ = task.peak()
    return {
        "budget_bytes": plan.budget_bytes,
        "peak_bytes": peak,
        "predicted_peak_bytes": plan.predicted_peak_bytes,
        "by_action": _by_action(plan),
        "repeats": first == again,
        "equal": all(outcome == first for outcome in squeezed),
        "unequal": sorted({key for outcome in squeezed for key in first if outcome[key] != first[key]}),
    }


def _outcome(task: Task) -> dict[str, str]:
    """Digests of loss, gradients and new buffers of one forward and backward, which leave no trace."""
    buffers = {name: buffer.clone() for name, buffer in task.model.named_buffers()}
    task.optimizer.zero_grad()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        loss = task.loss()
        loss.backward()
    found = {"loss": loss.detach()} | dict(task.model.named_buffers())
    found |= {f"{name} gradient": p.grad for name, p in task.model.named_parameters() if p.grad is not None}
    outcome = {name: _digest(tensor.detach()) for name, tensor in found.items()}
    for name, buffer in task.model.named_buffers():
        buffer.copy_(buffers[name])
    return outcome


def _digest(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().flatten().numpy()).hexdigest()


def optimality(profiled: Profiled, high: int, noise: float, milp_seconds: float) -> list[dict[str, Any]]:
    """The greedy plan's seconds over the optimum's, on the same profile."""
    low = planner.smallest(profiled.step.profile, noise).predicted_peak_bytes
    return [
        _optimality(profiled, Budget(peak_bytes=int(low + share * (high - low)), noise=noise), limit)
        for share, limit in ((share, milp_seconds / len(MILP_SHARES)) for share in MILP_SHARES)
    ]


def _optimality(profiled: Profiled, budget: Budget, limit: float) -> dict[str, Any]:
    begun = time.perf_counter()
    greedy = planner.solve(profiled.step.profile, budget)
    solved = time.perf_counter()
    try:
        best = planner.optimum(profiled.step.profile, budget, seconds=limit).predicted_seconds
    except OptionError:  # nothing found in time
        best = None
    taken = time.perf_counter() - solved
    return {
        "budget_bytes": budget.peak_bytes,
        "plain_seconds": profiled.step.plain_seconds,
        "greedy_extra_seconds": greedy.predicted_seconds,
        "milp_extra_seconds": best,
        "greedy_took_seconds": solved - begun,
        "milp_took_seconds": taken,
        "milp_finished": taken < limit,
    }


def deep(profile: Profile, noise: float) -> dict[str, Any]:
    """Seconds to plan a network of so many copies of this one that it saves a thousand tensors."""
    whole = _deeper.deeper(profile, DEEP_TENSORS)
    kept = {tensor.key: tensor.options[0] for tensor in whole.tensors}
    low, high = max(whole.base_bytes), planner.peak(whole, kept)
    return {
        "tensors": len(whole.tensors),
        "positions": len(whole.base_bytes),
        "options": max(len(tensor.options) for tensor in whole.tensors),
        "seconds": [_planning(whole, int(low + share * (high - low)), noise) for share in MILP_SHARES],
    }


def _planning(profile: Profile, budget: int, noise: float) -> float:
    begun = time.perf_counter()
    with contextlib.suppress(BudgetError):  # refusing takes as long
        planner.solve(profile, Budget(peak_bytes=budget, noise=noise))
    return time.perf_counter() - begun


if __name__ == "__main__":
    main()

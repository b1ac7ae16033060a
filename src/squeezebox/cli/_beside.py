"""``squeezebox plan --compiled``: the plan's step and the compiled one of the same bytes, timed in turn."""

from __future__ import annotations

import dataclasses
import shutil
import statistics
import time
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import squeezebox
from squeezebox.cli._plan import Step
from squeezebox.cli._show import progress
from squeezebox.reports import StepPlan, human_bytes
from squeezebox.schema import MemoryGrowthWarning, SqueezeboxError
from squeezebox.steps import TrainingStep

_SETTLING, _TIMED = 3, 7


@dataclass(frozen=True, kw_only=True)
class Beside:
    """Seconds of a step: plain, under the plan, and compiled; the last is None where that was refused."""

    budget_bytes: int
    plain_seconds: float
    plan_seconds: float
    compiled_seconds: float | None = None
    making_seconds: float = 0.0
    refused: str = ""

    def __str__(self) -> str:
        step = f"squeezebox.compile within {human_bytes(self.budget_bytes)}"
        if self.compiled_seconds is None:
            return f"{step} is refused: {self.refused}"
        share = self.compiled_seconds / self.plan_seconds
        return (
            f"{step} took {share:.2f} of this plan's time, measured in turn: {self.compiled_seconds:.3f} s, "
            f"the plan {self.plan_seconds:.3f} s, plain {self.plain_seconds:.3f} s a step; making it took "
            f"{self.making_seconds:.0f} s"
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return dataclasses.asdict(self)


def is_slower(plan: StepPlan) -> bool:
    """Whether the plan costs time, beyond what plain steps differ by."""
    return plan.predicted_seconds > plan.plain_seconds + plan.clock_seconds


def another_way(plan: StepPlan) -> str:
    """What to try where the plan costs time and there is a compiler for processors; "" elsewhere."""
    if not is_slower(plan) or not any(map(shutil.which, ("g++", "clang++"))):
        return ""
    return "\n\nsqueezebox.compile may be faster within the same bytes: --compiled times it"


def beside_compiled(
    plan: StepPlan, step: Step, *, update_noise: float | None, offload: bool | str | Path
) -> Beside:
    """Train three new models of the step's a few times: plainly, under the plan, and compiled.

    The compiled step may take the plan's peak. That of a plan without states counts the optimizer's, which
    the budget of a compiled step does not.
    """
    states = plan.optimizer is not None
    budget = plan.predicted_peak_bytes
    if not states and plan.peak is not None:
        budget -= plan.peak.parts.state_bytes
    with progress("compiling within the same budget"), warnings.catch_warnings(), ExitStack() as ended:
        warnings.simplefilter("ignore", MemoryGrowthWarning)  # what matters here is time
        plain, planned, compiled = (TrainingStep(**step.load()) for _ in range(3))
        session = squeezebox.attach(planned.model, optimizer=planned.optimizer, plan=plan)
        ended.callback(session.detach)
        runs = {"plain": _trained(plain, plain.model), "plan": _trained(planned, planned.model)}
        options: dict[str, Any] = {}
        if states:
            options = {"optimizer": compiled.optimizer, "states": True, "update_noise": update_noise}
            options["offload"] = offload
        begun = time.perf_counter()
        try:
            made = squeezebox.compile(
                compiled.model,
                budget=budget,
                noise=plan.noise or None,
                sample=compiled.sample,
                loss_fn=compiled.loss_fn,
                **options,
            )
        except (SqueezeboxError, torch._dynamo.exc.TorchDynamoException) as error:
            refused = str(error).strip().partition("\n")[0]
        else:
            ended.callback(made.close)
            refused, runs["compiled"] = "", _trained(compiled, made)
        making = time.perf_counter() - begun
        seconds = _in_turn(runs)
    return Beside(
        budget_bytes=budget,
        plain_seconds=seconds["plain"],
        plan_seconds=seconds["plan"],
        compiled_seconds=seconds.get("compiled"),
        making_seconds=making,
        refused=refused,
    )


def _trained(step: TrainingStep, call: Callable[..., Any]) -> Callable[[], None]:
    def run() -> None:
        assert step.optimizer is not None
        step.optimizer.zero_grad()
        step.loss(call).backward()
        step.optimizer.step()
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()

    return run


def _in_turn(runs: dict[str, Callable[[], None]]) -> dict[str, float]:
    """Median seconds of each."""
    found = dict[str, list[float]]()
    for number in range(_SETTLING + _TIMED):
        for name, run in runs.items():
            begun = time.perf_counter()
            run()
            if number >= _SETTLING:
                found.setdefault(name, []).append(time.perf_counter() - begun)
    return {name: statistics.median(seconds) for name, seconds in found.items()}

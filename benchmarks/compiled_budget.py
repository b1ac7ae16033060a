"""Compiled steps within budgets of bytes, next to torch's own ``activation_memory_budget``.

Goes in: nothing; small networks of benchmarks.tasks and batches of real data. Comes out:
benchmarks/reports/compiled_budget-<date>.json and .md, written anew after every network.

For every setting of ``activation_memory_budget`` the peak of a step is measured, and squeezebox.compile gets
that peak as its budget, and shares of the peak of torch.compile's own step besides; with noise 1e-2 half of
torch's least peak, and a share. A step is zero_grad, forward, loss and backward. Peaks are of parameters,
buffers, batch, gradients and all else that torch allocates; predicted is what the step said when it was made.
Steps of all arms are timed in turn; times and peaks are relative to torch.compile's own step, times as
medians. Images are in channels_last.
"""

from __future__ import annotations

import argparse
import copy
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._functorch import config as functorch_config
from torch._inductor.compile_fx import compile_fx

import squeezebox
from benchmarks import _report, tasks
from squeezebox.profiling import PeakMeter
from squeezebox.schema import BudgetError

# Networks small enough that all arms compile in minutes, and activations that weigh more than parameters.
SIZES: dict[str, dict[str, Any]] = {
    "gpt": {"batch": 8, "size": 128, "sizes": {"width": 128, "depth": 3, "heads": 4}},
    "vit": {"batch": 32, "size": 96, "train_size": 96, "sizes": {"width": 128, "depth": 3, "heads": 4}},
    "unet": {"batch": 4, "size": 96, "sizes": {"width": 16, "depth": 2}},
    "resnet18": {"batch": 32, "size": 96},
    "efficientnet_b0": {"batch": 16, "size": 64},
    "resnet50": {"batch": 16, "size": 96},
}
SETTINGS = (0.75, 0.5, 0.25, 0.0)
SHARES = (0.75, 0.6, 0.45)
NOISE = 1e-2
HEADS = "network", "arm", "budget MiB", "peak MiB", "share", "predicted", "time", "least to most", "made in s"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("networks", nargs="*", default=list(SIZES))
    parser.add_argument("--repeats", type=int, default=15)
    arguments = parser.parse_args()
    torch._dynamo.config.recompile_limit = 64  # every arm is the same code
    results: dict[str, Any] = dict(_report.today("compiled_budget"))
    for name in arguments.networks:
        setup = replace(tasks.SETUPS[name], train_steps=5, layout=layout_of(name), **SIZES[name])
        results[name] = measure(tasks.build(name, setup), arguments.repeats)
        paths = _report.write("compiled_budget", results, table(results))
        print(*paths, table(results), sep="\n", file=sys.stderr, flush=True)


def layout_of(name: str) -> torch.memory_format:
    """Of its batches."""
    return torch.contiguous_format if name == "gpt" else torch.channels_last


def measure(task: tasks.Task, repeats: int) -> dict[str, Any]:
    """Peaks and times of all arms, and what was refused."""
    torch._dynamo.reset()
    plain = Arm(task, inductor(1.0))
    arms, refused = {"torch.compile": plain}, dict[str, str]()
    for setting in SETTINGS:
        arms[f"activation_memory_budget {setting}"] = Arm(task, inductor(setting))
    peaks = {name: arm.peak_bytes for name, arm in arms.items() if arm is not plain}
    budgets = {f"as much as {name}": peak for name, peak in peaks.items() if peak < plain.peak_bytes}
    budgets |= {f"{share:.0%}": int(share * plain.peak_bytes) for share in SHARES}
    wanted = [(name, budget, None) for name, budget in budgets.items()]
    wanted += [(f"{name}, noise {NOISE}", budget, NOISE) for name, budget in [*budgets.items()][-1:]]
    wanted += [(f"half of torch's least, noise {NOISE}", min(peaks.values()) // 2, NOISE)]
    for name, budget, noise in wanted:
        try:
            arms[f"squeezebox, {name}"] = Arm(task, partial(within, task, budget, noise), budget)
        except BudgetError as error:
            refused[name] = str(error)
    timing = _report.interleaved({name: arm.run for name, arm in arms.items()}, repeats)
    return {
        "arms": {name: arm.figures(plain) for name, arm in arms.items()},
        "ratios": {name: _spread(timing.ratios.get(f"{name}/torch.compile")) for name in arms},
        "refused": refused,
    }


def _spread(found: _report.Spread | None) -> tuple[float, float, float]:
    return (1.0, 1.0, 1.0) if found is None else (found.median, found.minimum, found.maximum)


def inductor(setting: float) -> Callable[[torch.nn.Module], Any]:
    """torch.compile with this setting; a backend of its own keeps it from another arm's code."""

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        with functorch_config.patch(activation_memory_budget=setting, enable_autograd_cache=False):
            return compile_fx(graph, inputs)

    return partial(torch.compile, backend=backend, dynamic=False)


def within(task: tasks.Task, budget: int, noise: float | None, model: torch.nn.Module) -> Callable[..., Any]:
    """A step of squeezebox.compile."""
    sample = (task.inputs, task.target)
    return squeezebox.compile(model, budget=budget, noise=noise, sample=sample, loss_fn=task.loss_fn)


class Arm:
    """A copy of the network, compiled in one way."""

    def __init__(self, task: tasks.Task, compiled: Callable[[torch.nn.Module], Any], budget: int = 0) -> None:
        self._task, self._model = task, copy.deepcopy(task.model)
        begun = time.perf_counter()
        self._step, self.budget_bytes = compiled(self._model), budget
        self.run()
        self.making_seconds = time.perf_counter() - begun
        self._gradients = torch.cat([each.grad.flatten() for each in self._model.parameters()])
        self.peak_bytes = self._peak()

    def run(self) -> None:
        """One step."""
        self._model.zero_grad(set_to_none=True)
        self._task.loss_fn(self._step(self._task.inputs), self._task.target).backward()

    def figures(self, plain: Arm) -> dict[str, Any]:
        """What the report has."""
        difference = (self._gradients - plain._gradients).norm() / plain._gradients.norm()
        return {
            "budget_bytes": self.budget_bytes,
            "peak_bytes": self.peak_bytes,
            "predicted_bytes": getattr(self._step, "peak_bytes", None),
            "noise": getattr(self._step, "noise", None),
            "difference": float(difference),
            "making_seconds": self.making_seconds,
        }

    def _peak(self) -> int:
        self._model.zero_grad(set_to_none=True)
        meter = PeakMeter(torch.device("cpu"))
        if not meter.start():
            raise RuntimeError("The peak cannot be measured while another profiler runs; end that one first.")
        self.run()
        own: list[Tensor] = [*self._model.parameters(), *self._model.buffers()]
        own += [self._task.inputs, self._task.target]
        return meter.stop(()).total_bytes + sum(each.nbytes for each in own)


def table(results: dict[str, Any]) -> str:
    """The Markdown table of the report."""
    lines = [f"| {' | '.join(HEADS)} |", "|---" * len(HEADS) + "|"]
    for name, found in results.items():
        own = found["arms"]["torch.compile"]["peak_bytes"]
        lines += [_row(name, arm, row, found["ratios"][arm], own) for arm, row in found["arms"].items()]
    lines.append("")
    for name, found in results.items():
        lines += [f"- {name}, {budget}, refused: {words}" for budget, words in found["refused"].items()]
    return "\n".join(lines)


def _row(name: str, arm: str, row: dict[str, Any], ratio: tuple[float, float, float], own: int) -> str:
    budget = f"{row['budget_bytes'] / 2**20:.1f}" if row["budget_bytes"] else ""
    said = row["predicted_bytes"]
    predicted = f"{said / row['peak_bytes'] - 1:+.1%}" if said else ""
    median, least, most = ratio
    return (
        f"| {name} | {arm} | {budget} | {row['peak_bytes'] / 2**20:.1f} | {row['peak_bytes'] / own:.3f} "
        f"| {predicted} | {median:.2f} | {least:.2f}..{most:.2f} | {row['making_seconds']:.0f} |"
    )


if __name__ == "__main__":
    main()

"""A compiled step within a budget of bytes, and torch's own ``activation_memory_budget`` at the same peaks.

Goes in: nothing; networks of benchmarks.models and batches of real data. Comes out:
benchmarks/reports/compiled_budget-<date>.json and .md, written anew after every network.

For every setting of ``activation_memory_budget`` the peak of a step is measured, and squeezebox.compile gets
that peak as its budget. A step is zero_grad, forward, loss and backward. Peaks are of parameters, buffers,
batch, gradients and all else that torch allocates. Steps of all arms are timed in turn; times and peaks are
relative to torch.compile's own step, times as medians. Convolutional networks are in channels_last: in other
layouts Inductor holds a second copy of their weights, on a CPU.
"""

from __future__ import annotations

import argparse
import copy
import statistics
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

NETWORKS = ("gpt", "vit", "unet", "resnet18", "efficientnet_b0", "resnet50")
SETTINGS = (0.75, 0.5, 0.25, 0.0)
HEADS = "network", "arm", "peak MiB", "share", "time", "least to most", "gradients differ by", "planned in s"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("networks", nargs="*", default=list(NETWORKS))
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--name", default="compiled_budget", help="of the report")
    arguments = parser.parse_args()
    torch._dynamo.config.recompile_limit = 64  # every arm is the same code
    results: dict[str, Any] = {}
    for name in arguments.networks:
        setup = replace(tasks.SETUPS[name], train_steps=5)
        if name not in ("gpt", "vit"):
            setup = replace(setup, layout=torch.channels_last)
        results[name] = measure(tasks.build(name, setup), arguments.repeats)
        paths = _report.write(arguments.name, results, table(results))
        print(*paths, table(results), sep="\n", flush=True)


def measure(task: tasks.Task, repeats: int) -> dict[str, Any]:
    """Peaks, seconds and gradients of all arms."""
    plain = _Arm(task, _inductor(1.0))
    arms, pairs = [plain], list[dict[str, Any]]()
    for setting in SETTINGS:
        rival = _Arm(task, _inductor(setting))
        pairs.append({"setting": setting, "rival": rival})
        arms.append(rival)
    for pair in pairs:
        budget, begun = pair["rival"].peak_bytes, time.perf_counter()
        known = [other["ours"] for other in pairs if "ours" in other]
        fitting = [arm for arm in known if arm.peak_bytes <= budget and arm.budget <= budget * 1.001]
        if fitting:  # a budget that another one meets, to a thousandth
            pair["ours"] = fitting[0]
            continue
        try:
            pair["ours"] = _Arm(task, _Within(task, budget), budget)
        except BudgetError as error:
            pair["refused"] = str(error)
            continue
        pair["ours"].planning_seconds = time.perf_counter() - begun
        arms.append(pair["ours"])
    print("timing", flush=True)
    for _ in range(repeats):
        for arm in arms:
            arm.time()
    return {
        "plain": plain.figures(plain),
        "pairs": [
            {key: value.figures(plain) if isinstance(value, _Arm) else value for key, value in pair.items()}
            for pair in pairs
        ],
    }


def _inductor(setting: float) -> Callable[[torch.nn.Module], Any]:
    """torch.compile with this setting; a backend of its own keeps it from another arm's code."""

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        with functorch_config.patch(activation_memory_budget=setting, enable_autograd_cache=False):
            return compile_fx(graph, inputs)

    return partial(torch.compile, backend=backend)


class _Within:
    """squeezebox.compile with a budget, of one network."""

    def __init__(self, task: tasks.Task, budget: int) -> None:
        self._task, self._budget = task, budget

    def __call__(self, model: torch.nn.Module) -> Callable[..., Any]:
        sample = (self._task.inputs, self._task.target)
        return squeezebox.compile(model, budget=self._budget, sample=sample, loss_fn=self._task.loss_fn)


class _Arm:
    """A copy of the network, compiled in one way."""

    def __init__(self, task: tasks.Task, compiled: Callable[[torch.nn.Module], Any], budget: int = 0) -> None:
        self.budget, self.planning_seconds, self._seconds = budget, 0.0, list[float]()
        self._task, self._model = task, copy.deepcopy(task.model)
        self._step = compiled(self._model)
        self.run()
        self._gradients = torch.cat([each.grad.flatten() for each in self._model.parameters()])
        self.peak_bytes = self._peak()

    def run(self) -> None:
        """One step."""
        self._model.zero_grad(set_to_none=True)
        self._task.loss_fn(self._step(self._task.inputs), self._task.target).backward()

    def time(self) -> None:
        begun = time.perf_counter()
        self.run()
        self._seconds.append(time.perf_counter() - begun)

    def figures(self, plain: _Arm) -> dict[str, Any]:
        """What the report has."""
        ratios = sorted(own / other for own, other in zip(self._seconds, plain._seconds, strict=True))
        difference = (self._gradients - plain._gradients).norm() / plain._gradients.norm()
        return {
            "peak_bytes": self.peak_bytes,
            "seconds": statistics.median(self._seconds),
            "ratio": statistics.median(ratios),
            "spread": (ratios[0], ratios[-1]),
            "difference": float(difference),
            "planning_seconds": self.planning_seconds,
        }

    def _peak(self) -> int:
        held: list[Tensor] = [*self._model.parameters(), *self._model.buffers()]
        self._model.zero_grad(set_to_none=True)
        meter = PeakMeter(torch.device("cpu"))
        meter.start()
        self.run()
        own = [*held, self._task.inputs, self._task.target]
        return meter.stop(()).total_bytes + sum(each.nbytes for each in own)


def table(results: dict[str, Any]) -> str:
    lines = [
        f"| {' | '.join(HEADS)} |",
        "|---" * len(HEADS) + "|",
    ]
    for name, found in results.items():
        rows = [("torch.compile", found["plain"])]
        for pair in found["pairs"]:
            rows.append((f"activation_memory_budget {pair['setting']}", pair["rival"]))
            rows.append(("squeezebox.compile, as much", pair.get("ours")))
        for arm, figures in rows:
            if figures is None:
                lines.append(f"| {name} | {arm} | refused | | | | | |")
                continue
            share = figures["peak_bytes"] / found["plain"]["peak_bytes"]
            spread = " to ".join(f"{each:.2f}" for each in figures["spread"])
            planned = f"{figures['planning_seconds']:.0f}" if figures["planning_seconds"] else ""
            sizes = f"{figures['peak_bytes'] / 2**20:.1f} | {share:.3f} | {figures['ratio']:.2f} | {spread}"
            lines.append(f"| {name} | {arm} | {sizes} | {figures['difference']:.1e} | {planned} |")
    refused = [pair["refused"] for found in results.values() for pair in found["pairs"] if "refused" in pair]
    return "\n".join([*lines, "", *(f"Refused: {each}" for each in refused)])


if __name__ == "__main__":
    main()

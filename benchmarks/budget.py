"""Peak and time of a training step under budgets, from the plain step's peak down to the least that fits.

Goes in: nothing; networks from benchmarks/models.py, briefly trained on crops of photographs. Comes out:
benchmarks/reports/budget-<date>.json and .md.

A step is zero_grad, forward, loss, backward and the step of SGD with momentum. Its peak is everything:
parameters, gradients, optimizer state, inputs, saved tensors, operators' own memory. Budgets are evenly
spaced between the plain peak and the least one found. Every planned step is timed in turn with a plain
one; seconds are those ratios, medians over the repeats.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sys
import time
from collections import Counter
from typing import Any

import torch
from torch import Tensor, nn

import squeezebox
from benchmarks import _report, models, photos, training
from benchmarks.comet_table import CHANNELS_LAST, _checkpointed
from squeezebox.profiling import PeakMeter

NETWORKS = ("resnet18", "efficientnet_b0", "resnet50", "vgg16")
SIZE = 224
LEARNING_RATE = 1e-4  # small: the plan's bounds stay fit while it is measured


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("networks", nargs="*", default=list(NETWORKS))
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--size", type=int, default=SIZE)
    parser.add_argument("--noise", type=float, default=1e-2)
    parser.add_argument("--budgets", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--train-steps", type=int, default=40, help="of batch 16 at 112x112, before all")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    results: dict[str, Any] = {}
    for name in arguments.networks:
        results[name] = measure(name, arguments)
        paths = _report.write("budget", {"networks": results, "settings": vars(arguments)}, table(results))
        print(name, *paths, file=sys.stderr, flush=True)


class Task:
    """A network, its optimizer and one batch."""

    def __init__(self, model: nn.Module, images: Tensor, labels: Tensor) -> None:
        self.model, self.images, self.labels = model, images, labels
        self.optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=0.9)
        self.step()

    def backward(self) -> None:
        training.classification_loss(self.model(self.images), self.labels).backward()

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.backward()
        self.optimizer.step()

    def held(self) -> list[Tensor]:
        """Parameters, buffers, batch and optimizer state."""
        states = [value for state in self.optimizer.state.values() for value in state.values()]
        tensors = [t for t in states if isinstance(t, Tensor)]
        return [*self.model.parameters(), *self.model.buffers(), self.images, self.labels, *tensors]

    def peak(self) -> tuple[int, int]:
        """Peak of one step: all bytes, and those beyond parameters, gradients, state and batch."""
        self.optimizer.zero_grad()
        meter = PeakMeter(torch.device("cpu"))
        meter.start()
        self.step()
        peak = meter.stop([p.grad for p in self.model.parameters() if p.grad is not None])
        return sum(t.nbytes for t in self.held()) + peak.total_bytes, peak.activation_bytes

    def seconds(self) -> float:
        begun = time.perf_counter()
        self.step()
        return time.perf_counter() - begun


def tasks(name: str, arguments: argparse.Namespace) -> tuple[Task, Task]:
    """The same network twice: one stays plain."""
    layout = torch.channels_last if name in CHANNELS_LAST else torch.contiguous_format
    model = models.build(name, num_classes=photos.num_classes()).to(memory_format=layout).train()
    crops = photos.batches(16, 112, seed=0)
    training.train_briefly(model, crops, arguments.train_steps, training.LEARNING_RATES[name])
    images, labels = next(photos.batches(arguments.batch, arguments.size, seed=1))
    images = images.to(memory_format=layout)
    return Task(model, images, labels), Task(copy.deepcopy(model), images, labels)


def measure(name: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """The plain step, checkpointing, and every budget."""
    plain, task = tasks(name, arguments)
    total, activations = plain.peak()
    rows = [planned(plain, task, None, arguments)]
    low = rows[0]["predicted_peak_bytes"]
    for number in reversed(range(arguments.budgets)):
        share = (number + 1) / arguments.budgets
        rows.append(planned(plain, task, int(low + share * (total - low)), arguments))
    with _checkpointed(task.model):
        peak, activation_peak = task.peak()
        recomputed = {"peak_bytes": peak, "activation_peak_bytes": activation_peak}
        recomputed |= ratio(plain, task, arguments.repeats)
    return {
        "plain": {"peak_bytes": total, "activation_peak_bytes": activations},
        "checkpointing": recomputed,
        "budgets": rows[1:] + rows[:1],
    }


def planned(plain: Task, task: Task, budget: int | None, arguments: argparse.Namespace) -> dict[str, Any]:
    """One budget: the plan, then its step."""
    begun = time.perf_counter()
    plan = squeezebox.plan(
        task.model,
        sample=(task.images, task.labels),
        loss_fn=training.classification_loss,
        optimizer=task.optimizer,
        budget=budget,
        noise=arguments.noise,
    )
    planning = time.perf_counter() - begun
    session = squeezebox.attach(task.model, optimizer=task.optimizer, plan=plan)
    try:
        for _ in range(2):  # the session measures the first ones itself
            task.step()
            record = session.report().record
        peak, activations = task.peak()
        result = {
            "budget_bytes": plan.budget_bytes,
            "peak_bytes": peak,
            "activation_peak_bytes": activations,
            "predicted_peak_bytes": plan.predicted_peak_bytes,
            "saved_bytes": record.saved_bytes,
            "packed_bytes": record.packed_bytes,
            "predicted_ratio": plan.predicted_seconds / plan.plain_seconds,
            "noise": session.measure_noise(task.backward),
            "predicted_noise": plan.predicted_noise,
            "planning_seconds": planning,
            "actions": dict(Counter(tensor.option.action.value for tensor in plan.tensors)),
        }
        return result | ratio(plain, task, arguments.repeats)
    finally:
        session.detach()


def ratio(plain: Task, task: Task, repeats: int) -> dict[str, Any]:
    """Seconds of a step over those of a plain one right after it."""
    task.seconds()
    pairs = [(task.seconds(), plain.seconds()) for _ in range(repeats)]
    ratios = [own / other for own, other in pairs]
    return {"ratio": statistics.median(ratios), "ratios": ratios}


def table(results: dict[str, Any]) -> str:
    """The Markdown table of the report."""
    rows = [
        "| network | budget MiB | peak MiB | predicted | beyond parameters, x less | saved, x less "
        "| time / plain | predicted | noise | predicted | kept, packed, moved | planning s |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name, result in results.items():
        plain, other = result["plain"], result["checkpointing"]
        rows.append(f"| {name} plain | | {_mib(plain['peak_bytes'])} | | | | 1 | | | | | |")
        rows.extend(_row(name, plain, row) for row in result["budgets"])
        less = plain["activation_peak_bytes"] / other["activation_peak_bytes"]
        rows.append(
            f"| {name} checkpointing | | {_mib(other['peak_bytes'])} | | {less:.2f} | "
            f"| {other['ratio']:.2f} ({min(other['ratios']):.2f}..{max(other['ratios']):.2f}) | | | | | |"
        )
    return "\n".join(rows)


def _row(name: str, plain: dict[str, Any], row: dict[str, Any]) -> str:
    budget = "least" if row["budget_bytes"] is None else _mib(row["budget_bytes"])
    error = 100 * (row["peak_bytes"] / row["predicted_peak_bytes"] - 1)
    actions = ", ".join(str(row["actions"].get(name, 0)) for name in ("keep", "compress", "offload"))
    return (
        f"| {name} | {budget} | {_mib(row['peak_bytes'])} | {error:+.2f} % "
        f"| {plain['activation_peak_bytes'] / row['activation_peak_bytes']:.2f} "
        f"| {row['saved_bytes'] / max(row['packed_bytes'], 1):.1f} "
        f"| {row['ratio']:.2f} ({min(row['ratios']):.2f}..{max(row['ratios']):.2f}) "
        f"| {row['predicted_ratio']:.2f} | {row['noise']:.1e} | {row['predicted_noise']:.1e} "
        f"| {actions} | {row['planning_seconds']:.0f} |"
    )


def _mib(nbytes: int) -> str:
    return f"{nbytes / 2**20:.1f}"


if __name__ == "__main__":
    main()

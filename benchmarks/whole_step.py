"""Peak and time of whole training steps, with gradients and optimizer state under the budget too.

Goes in: nothing; networks of benchmarks/models.py with random weights, random batches. Comes out:
benchmarks/reports/whole_step-<date>.json and .md.

A step is zero_grad, forward, loss, backward, for one way clipping, and the optimizer's step. Its peak is
everything, measured in two ways: as the allocator counts it in the fourth step, and as the process holds it
(its highest resident set, in a process of its own that only trains, beyond what it had before it made the
network). Ways are timed in alternation with plain steps; ratios are within a round, medians over the
rounds. While a file is open the C library returns freed memory at once, to the plain step's cost as well,
so a ratio says less than a plain step in a process of its own would. After the timed steps weights and
optimizer state are compared with plain PyTorch's, bit by bit.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

import squeezebox
from benchmarks import _report, checkpointing, models
from squeezebox.profiling import PeakMeter
from squeezebox.reports import StepPlan
from squeezebox.schema import BudgetError
from squeezebox.session import Session
from squeezebox.steps import nbytes_of, persistent

_MIB = 1 << 20
CLIP = 1.0


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Setup:
    """A network, its batch and optimizer, and the budgets asked for, as shares of plain's peak."""

    make: Callable[[], nn.Module]
    inputs: Callable[[], torch.Tensor]
    classes: int
    optimizer: Callable[[Any], torch.optim.Optimizer]
    budgets: tuple[str, ...]


_ADAMW = functools.partial(torch.optim.AdamW, lr=1e-4)
_SGD = functools.partial(torch.optim.SGD, lr=1e-3, momentum=0.9)


def _images(count: int, side: int) -> torch.Tensor:
    return torch.randn(count, 3, side, side).contiguous(memory_format=torch.channels_last)


def _network(name: str, classes: int, **sizes: int) -> nn.Module:
    return models.build(name, num_classes=classes, **sizes).to(memory_format=torch.channels_last)


NETWORKS: Mapping[str, Setup] = {
    "gpt": Setup(
        make=functools.partial(
            models.build, "gpt", num_classes=8192, width=384, depth=10, heads=6, context=128
        ),
        inputs=lambda: torch.randint(8192, (2, 128)),
        classes=8192,
        optimizer=_ADAMW,
        budgets=("40%", "50%"),
    ),
    "vit": Setup(
        make=functools.partial(_network, "vit", 100, image=160, width=384, depth=6, heads=6),
        inputs=lambda: _images(8, 160),
        classes=100,
        optimizer=_ADAMW,
        budgets=("45%", "60%"),
    ),
    "resnet50": Setup(
        make=functools.partial(_network, "resnet50", 100),
        inputs=lambda: _images(8, 160),
        classes=100,
        optimizer=_SGD,
        budgets=("45%", "60%"),
    ),
    "vgg16": Setup(
        make=functools.partial(_network, "vgg16", 100),
        inputs=lambda: _images(4, 112),
        classes=100,
        optimizer=_SGD,
        budgets=("55%", "70%"),
    ),
}


class Training:
    """A network in training; made the same every time."""

    def __init__(self, name: str, *, clips: bool = False) -> None:
        setup = NETWORKS[name]
        torch.manual_seed(0)
        self.model, self.clips = setup.make().train(), clips
        self.optimizer = setup.optimizer(self.model.parameters())
        self.inputs = setup.inputs()
        shape = self.inputs.shape if self.inputs.dim() == 2 else self.inputs.shape[:1]
        self.target = torch.randint(setup.classes, shape)
        self.session: Session | None = None
        self.checkpoints = False

    def attach(self, plan: StepPlan) -> None:
        """Train under the plan from now on."""
        self.session = squeezebox.attach(self.model, optimizer=self.optimizer, plan=plan)

    def step(self) -> None:
        """From zero_grad to the optimizer's step, with the same random numbers for every way."""
        torch.manual_seed(1)
        self.optimizer.zero_grad()
        if self.checkpoints:
            with checkpointing.checkpointed(self.model):
                self._backward()
        else:
            self._backward()
        if self.clips:
            nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
        self.optimizer.step()

    def _backward(self) -> None:
        loss_fn(self.model(self.inputs), self.target).backward()

    def peak(self) -> int:
        """Bytes at the highest point of a step, as the allocator counts them."""
        self.optimizer.zero_grad()
        own = [*self.model.parameters(), *self.model.buffers(), self.inputs, self.target]
        held, meter = (
            nbytes_of([*own, *persistent(self.model, self.optimizer)]),
            PeakMeter(torch.device("cpu")),
        )
        if not meter.start():
            raise RuntimeError("another profiler runs; end that one first")
        self.step()
        return held + meter.stop(()).total_bytes

    def state(self) -> list[torch.Tensor]:
        """Weights and optimizer state."""
        parameters = list(self.model.parameters())
        states = [value for each in parameters for value in self.optimizer.state[each].values()]
        return [*parameters, *(each for each in states if isinstance(each, torch.Tensor))]


def loss_fn(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Of classes, for every image or every token."""
    return nn.functional.cross_entropy(output.flatten(0, -2), target.flatten())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("networks", nargs="*", default=list(NETWORKS), metavar="network")
    parser.add_argument("--repeats", type=int, default=9, help="rounds of a timing")
    parser.add_argument("--name", default="whole_step", help="of the report")
    parser.add_argument("--alone", nargs=2, metavar=("WAY", "PLAN"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.alone:
        print(held_by_process(arguments.networks[0], *arguments.alone))
        return
    networks: dict[str, Any] = dict(_report.today(arguments.name))
    for name in arguments.networks:
        networks[name] = measure(name, arguments.repeats)
        print(name, *_report.write(arguments.name, networks, render(networks)), file=sys.stderr, flush=True)


def measure(name: str, repeats: int) -> dict[str, Any]:
    """Every way of one network, those that clip beside a plain step that does."""
    budgets = NETWORKS[name].budgets
    rows = [_row(name, "plain", None, repeats), _row(name, "checkpointing", None, repeats)]
    for budget in (*budgets, None):
        rows.append(_row(name, f"states, {budget or 'least'}", {"budget": budget}, repeats))
    rows.append(_row(name, "states, least, no file", {"budget": None, "offload": False}, repeats))
    rows.append(_row(name, "without states, least", {"budget": None, "states": False}, repeats))
    rows.append(_row(name, f"clipped, states, {budgets[0]}", {"budget": budgets[0], "clip": CLIP}, repeats))
    return {"rows": rows}


def _row(name: str, way: str, options: dict[str, Any] | None, repeats: int) -> dict[str, Any]:
    clips = options is not None and "clip" in options
    plain, ours = Training(name, clips=clips), Training(name, clips=clips)
    ours.checkpoints = way == "checkpointing"
    plan = None
    if options is not None:
        try:
            plan = squeezebox.plan(
                ours.model,
                optimizer=ours.optimizer,
                sample=(ours.inputs, ours.target),
                loss_fn=loss_fn,
                exact=True,
                **{"states": True, **options},
            )
        except BudgetError as error:
            return {"way": way, "refused": str(error)}
        ours.attach(plan)
    for each in (plain, ours):
        for _ in range(3):  # a session measures the second one itself
            each.step()
    peaks = [each.peak() for each in (plain, ours)]
    times = _report.interleaved({"plain": plain.step, "ours": ours.step}, repeats)
    equal = all(map(torch.equal, plain.state(), ours.state()))
    row = {
        "way": way,
        "plain_peak_bytes": peaks[0],
        "peak_bytes": peaks[1],
        "predicted_peak_bytes": plan.predicted_peak_bytes if plan else None,
        "budget_bytes": plan.budget_bytes if plan else None,
        "plain_seconds": times.seconds["plain"].median,
        "time": dataclasses.asdict(times.ratios["ours/plain"]),
        "predicted_seconds": plan.predicted_seconds - plan.plain_seconds if plan else None,
        "equal": equal,
        "file_bytes": plan.optimizer.moved_bytes if plan and plan.optimizer else 0,
        "process_bytes": _alone(name, way, plan),
    }
    print(name, *row.values(), file=sys.stderr, flush=True)
    return row


def _alone(name: str, way: str, plan: StepPlan | None) -> int:
    """The process's own peak: see :func:`held_by_process`."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "plan.json"
        if plan is not None:
            plan.save(path)
        command = [sys.executable, "-m", "benchmarks.whole_step", name, "--alone", way, str(path)]
        found = subprocess.run(command, capture_output=True, text=True, check=True)
    return int(json.loads(found.stdout))


def held_by_process(name: str, way: str, path: str) -> int:
    """Highest resident bytes of a few steps, beyond those before there was a network."""
    _load_code(NETWORKS[name].optimizer)
    before = _resident("VmRSS")
    training = Training(name, clips=way.startswith("clipped"))
    training.checkpoints = way == "checkpointing"
    if Path(path).exists():
        training.attach(squeezebox.load_plan(path))
    for _ in range(4):
        training.step()
    return _resident("VmHWM") - before


def _load_code(optimizer: Callable[[Any], torch.optim.Optimizer]) -> None:
    """Train a tiny network, squeezed: what is loaded when it is used first is not the step's."""
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.GELU(), nn.Flatten(), nn.Linear(16, 4))
    made, sample = optimizer(model.parameters()), (torch.randn(2, 3, 4, 4), torch.tensor([0, 1]))
    plan = squeezebox.plan(
        model, optimizer=made, sample=sample, loss_fn=loss_fn, exact=True, states=True, offload=False
    )
    session = squeezebox.attach(model, optimizer=made, plan=plan)
    loss_fn(model(sample[0]), sample[1]).backward()
    made.step()
    session.detach()


def _resident(field: str) -> int:
    """Of this process, from the kernel; getrusage's figure begins with the parent's."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:"))


def render(networks: Mapping[str, Any]) -> str:
    """The table in Markdown."""
    lines = [
        "Peaks in MiB, and as shares of the plain step's (as the allocator counts; of the process); time as "
        "a multiple of the plain step's: median (least to most).",
        "",
        "| network | way | peak | predicted | share | process | share | in the file | time | to the bit |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name, network in networks.items():
        process = network["rows"][0]["process_bytes"]
        for row in network["rows"]:
            if "refused" in row:
                lines.append(f"| {name} | {row['way']} | refused: {row['refused'][:120]} ... |" + " |" * 7)
                continue
            predicted, time = row["predicted_peak_bytes"], row["time"]
            cells = [
                f"{row['peak_bytes'] / _MIB:.1f}",
                f"{predicted / _MIB:.1f}" if predicted else "",
                f"{row['peak_bytes'] / row['plain_peak_bytes']:.3f}",
                f"{row['process_bytes'] / _MIB:.1f}",
                f"{row['process_bytes'] / process:.3f}",
                f"{row['file_bytes'] / _MIB:.1f}",
                f"{time['median']:.2f} ({time['minimum']:.2f} to {time['maximum']:.2f})",
                "equal" if row["equal"] else "DIFFERS",
            ]
            lines.append(f"| {name} | {row['way']} | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()

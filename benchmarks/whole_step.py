"""Peak and time of whole training steps, with gradients and optimizer state under the budget too.

Goes in: nothing; networks of benchmarks/models.py with random weights, random batches. Comes out:
benchmarks/reports/whole_step-<date>.json and .md.

A step is zero_grad, forward, loss, backward, for one way clipping, and the optimizer's step. Every way trains
in a process of its own, and so does plain PyTorch next to it; they step in turn, and ratios are within a
round, medians over the rounds. Peaks are whole, measured in two ways: as the allocator counts them, and as
the process holds them (its highest resident set, beyond what it had before it made the network; where it
compiled, that is the compiler's). After the
timed steps a digest of weights and optimizer state says whether they are plain PyTorch's to the bit.

Compiled ways train a model that squeezebox.compile made within a budget; "compiled" is torch.compile itself.
Rivals are torch.utils.checkpoint on every block, torch's save_on_cpu, torch.compile with its memory budget at
0.5, torchao's 8-bit AdamW, and the latter with checkpoints, where torchao is installed.
Where LD_PRELOAD names another allocator than the C library's, all of them have it, plain PyTorch too.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import hashlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import nn

import squeezebox
from benchmarks import _report, checkpointing, models
from squeezebox.capture import CompiledStep
from squeezebox.profiling import PeakMeter
from squeezebox.reports import StepPlan
from squeezebox.schema import Action, BudgetError
from squeezebox.session import Session
from squeezebox.steps import nbytes_of, persistent

_MIB = 1 << 20
CLIP = 1.0
_TORCHS, _OURS = "compiled, memory budget 0.5", "compiled, states, "


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
        self.compiled: CompiledStep | None = None
        self.checkpoints = self.saves_on_cpu = False

    def attach(self, plan: StepPlan) -> None:
        """Train under the plan from now on."""
        self.session = squeezebox.attach(self.model, optimizer=self.optimizer, plan=plan)

    def compile_within(self, budget: str) -> None:
        """By squeezebox.compile, with states, from now on."""
        self.compiled = squeezebox.compile(
            self.model,
            optimizer=self.optimizer,
            budget=budget,
            states=True,
            sample=(self.inputs, self.target),
            loss_fn=loss_fn,
        )

    def planned(self) -> tuple[int | None, int]:
        """The peak that a compiled step foretells, and the bytes of state that it has in the file."""
        if self.compiled is None:
            return None, 0
        plan = self.compiled.report().optimizer
        return self.compiled.peak_bytes, plan.moved_bytes if plan else 0

    def use_torchao(self) -> None:
        """Its AdamW with state in 8 bits, of the same settings."""
        from torchao.optim import AdamW8bit

        self.optimizer = AdamW8bit(self.model.parameters(), lr=_ADAMW.keywords["lr"])

    def compile(self, memory_budget: float) -> None:
        """By torch.compile, with this share of its default memory for what autograd saves."""
        torch._functorch.config.activation_memory_budget = memory_budget  # type: ignore[attr-defined]
        self.model.compile()

    def step(self) -> None:
        """From zero_grad to the optimizer's step, with the same random numbers for every way."""
        torch.manual_seed(1)
        self.optimizer.zero_grad()
        with contextlib.ExitStack() as ways:
            if self.checkpoints:
                ways.enter_context(checkpointing.checkpointed(self.model))
            if self.saves_on_cpu:
                ways.enter_context(torch.autograd.graph.save_on_cpu())
            self._backward()
        if self.clips:
            nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
        self.optimizer.step()

    def _backward(self) -> None:
        loss_fn((self.compiled or self.model)(self.inputs), self.target).backward()

    def peak(self) -> int:
        """Bytes at the highest point of a step, as the allocator counts them."""
        self.optimizer.zero_grad()
        own = [*self.model.parameters(), *self.model.buffers(), self.inputs, self.target]
        states = [part for each in persistent(self.model, self.optimizer) for part in _inner(each)]
        held, meter = nbytes_of([*own, *states]), PeakMeter(torch.device("cpu"))
        if not meter.start():
            raise RuntimeError("another profiler runs; end that one first")
        self.step()
        return held + meter.stop(()).total_bytes

    def timed(self) -> float:
        """Seconds of a step."""
        started = time.perf_counter()
        self.step()
        return time.perf_counter() - started

    def digest(self) -> str:
        """Of weights and optimizer state."""
        found = hashlib.sha256()
        for each in self.model.parameters():
            found.update(each.detach().contiguous().numpy().tobytes())
            for value in self.optimizer.state[each].values():
                for part in _inner(value) if isinstance(value, torch.Tensor) else ():
                    found.update(part.clone().contiguous().numpy().tobytes())
        return found.hexdigest()


def loss_fn(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Of classes, for every image or every token."""
    return nn.functional.cross_entropy(output.flatten(0, -2), target.flatten())


def _inner(tensor: torch.Tensor) -> list[torch.Tensor]:
    """What torchao's packed tensors are made of; of others themselves."""
    if "torchao" not in type(tensor).__module__:
        return [tensor]
    names, _ = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
    return [getattr(tensor, name) for name in names]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("networks", nargs="*", default=list(NETWORKS), metavar="network")
    parser.add_argument("--repeats", type=int, default=9, help="rounds of a timing")
    parser.add_argument("--name", default="whole_step", help="of the report")
    parser.add_argument("--ways", nargs="+", help="only those ways whose names these are")
    parser.add_argument("--alone", nargs=2, metavar=("WAY", "PLAN"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.alone:
        serve(arguments.networks[0], *arguments.alone)
        return
    networks: dict[str, Any] = dict(_report.today(arguments.name))
    for name in arguments.networks:
        networks[name] = measure(name, arguments.repeats, arguments.ways)
        print(name, *_report.write(arguments.name, networks, render(networks)), file=sys.stderr, flush=True)


def measure(name: str, repeats: int, only: Sequence[str] | None = None) -> dict[str, Any]:
    """Every way of one network, or only those named; those that clip next to a plain step that does."""
    budgets = NETWORKS[name].budgets
    rivals = ["checkpointing", "save_on_cpu", "compiled", _TORCHS]
    if find_spec("torchao") and NETWORKS[name].optimizer is _ADAMW:
        rivals += ["torchao 8 bit", "checkpointing, torchao 8 bit"]
    packed = {"noise": 1e-2, "update_noise": 0.02, "offload": False}
    ways: dict[str, dict[str, Any] | None] = dict.fromkeys(["plain", *rivals])
    ways |= {f"states, {budget}": {"budget": budget} for budget in budgets}
    ways |= dict.fromkeys(f"{_OURS}{budget}" for budget in budgets)
    ways |= {
        "states, least": {},
        "states, least, no file": {"offload": False},
        f"noise 1e-2, 8-bit state, no file, {budgets[0]}": {**packed, "budget": budgets[0]},
        "noise 1e-2, 8-bit state, no file, least": packed,
        "8-bit state, no file, least": {**packed, "noise": None, "exact": True},
        "without states, least": {"states": False},
        f"clipped, states, {budgets[0]}": {"budget": budgets[0], "clip": CLIP},
    }
    wanted = ways if only is None else {way: ways[way] for way in ways if way in only}
    return {"rows": [_row(name, way, options, repeats) for way, options in wanted.items()]}


def _row(name: str, way: str, options: dict[str, Any] | None, repeats: int) -> dict[str, Any]:
    plan = None
    if options is not None:
        options = {"states": True, **({} if "noise" in options else {"exact": True}), **options}
        one = Training(name)
        try:
            plan = squeezebox.plan(
                one.model,
                optimizer=one.optimizer,
                sample=(one.inputs, one.target),
                loss_fn=loss_fn,
                **options,
            )
        except BudgetError as error:
            return {"way": way, "refused": str(error)}
        del one
    plain_way = "plain, clipped" if way.startswith("clipped") else "plain"
    with Child(name, plain_way, None) as plain, Child(name, way, plan) as ours:
        if ours.refused is not None:
            return {"way": way, "refused": ours.refused}
        residents = [each.ask("resident") for each in (plain, ours)]
        peaks = [each.ask("peak") for each in (plain, ours)]
        rounds = [[each.ask("step") for each in (plain, ours)] for _ in range(repeats)]
        digests = [each.ask("digest") for each in (plain, ours)]
        update_noise, compiled = ours.ask("update_noise"), ours.ask("compiled")
    ratios = sorted(own / theirs for theirs, own in rounds)
    row = {
        "way": way,
        "plain_peak_bytes": peaks[0],
        "peak_bytes": peaks[1],
        "predicted_peak_bytes": plan.predicted_peak_bytes if plan else compiled[0],
        "budget_bytes": plan.budget_bytes if plan else None,
        "plain_seconds": statistics.median(theirs for theirs, _ in rounds),
        "time": {"median": statistics.median(ratios), "minimum": ratios[0], "maximum": ratios[-1]},
        "predicted_seconds": plan.predicted_seconds - plan.plain_seconds if plan else None,
        "equal": digests[0] == digests[1],
        "file_bytes": _moved(plan) if plan else compiled[1],
        "packed": _packed(plan) if plan else None,
        "update_noise": update_noise,
        "plain_process_bytes": residents[0],
        "process_bytes": residents[1],
    }
    print(name, *row.values(), file=sys.stderr, flush=True)
    return row


def _moved(plan: StepPlan) -> int:
    """Bytes of state, gradients and saved tensors that are in the file some time of a step."""
    saved = plan.keys(Action.OFFLOAD)
    own = sum(each.saved_bytes for each in plan.tensors if each.key in saved)
    return own + (plan.optimizer.moved_bytes if plan.optimizer else 0)


def _packed(plan: StepPlan) -> list[int]:
    """How many saved tensors are packed, and of how many."""
    return [len(plan.keys(Action.COMPRESS)), len(plan.tensors)]


class Child:
    """A process that trains, one step whenever it is asked to."""

    def __init__(self, name: str, way: str, plan: StepPlan | None) -> None:
        self._folder = tempfile.TemporaryDirectory()
        path = Path(self._folder.name) / "plan.json"
        if plan is not None:
            plan.save(path)
        command = [sys.executable, "-m", "benchmarks.whole_step", name, "--alone", way, str(path)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.refused: str | None = self.ask("refused")

    def ask(self, question: str) -> Any:
        """What :func:`serve` answers."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(question + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate()
        self._folder.cleanup()


def serve(name: str, way: str, path: str) -> None:
    """Train, and answer one question a line."""
    _load_code(NETWORKS[name].optimizer)
    before = _resident("VmRSS")
    training = Training(name, clips=way.startswith(("clipped", "plain, clipped")))
    training.checkpoints = way.startswith("checkpointing")
    training.saves_on_cpu = way == "save_on_cpu"
    if way in ("compiled", _TORCHS):
        training.compile(0.5 if way == _TORCHS else 1.0)
    if way.startswith(_OURS):
        try:
            training.compile_within(way.removeprefix(_OURS))
        except BudgetError as error:
            print(json.dumps(str(error)), flush=True)
            return
    if way.endswith("torchao 8 bit"):
        training.use_torchao()
    if Path(path).exists():
        training.attach(squeezebox.load_plan(path))
    for _ in range(4):  # a session measures the second one itself
        training.step()
    resident = _resident("VmHWM") - before
    answers: Mapping[str, Callable[[], Any]] = {
        "refused": lambda: None,
        "resident": lambda: resident,
        "peak": training.peak,
        "step": training.timed,
        "digest": training.digest,
        "compiled": training.planned,
        "update_noise": lambda: training.session and training.session.report().update_noise,
    }
    for line in sys.stdin:
        print(json.dumps(answers[line.strip()]()), flush=True)


def _load_code(optimizer: Callable[[Any], torch.optim.Optimizer]) -> None:
    """Train a tiny network, squeezed: what is loaded when it is used first is not the step's."""
    squeezebox.compile_kernels()
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.GELU(), nn.Flatten(), nn.Linear(16, 4))
    made, sample = optimizer(model.parameters()), (torch.randn(2, 3, 4, 4), torch.tensor([0, 1]))
    for options in ({"exact": True}, {"noise": 1e-2, "update_noise": 0.02}):
        plan = squeezebox.plan(
            model, optimizer=made, sample=sample, loss_fn=loss_fn, states=True, offload=False, **options
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
        "a multiple of the plain step's: median (least to most); saved tensors that are packed.",
        "",
        "| network | way | peak | predicted | share | process | share | in the file | packed | time "
        "| to the bit, or update noise |",
        "| --- " * 11 + "|",
    ]
    for name, network in networks.items():
        for row in network["rows"]:
            if "refused" in row:
                lines.append(f"| {name} | {row['way']} | refused: {row['refused'][:120]} ... |" + " |" * 8)
                continue
            predicted, seconds = row["predicted_peak_bytes"], row["time"]
            cells = [
                f"{row['peak_bytes'] / _MIB:.1f}",
                f"{predicted / _MIB:.1f}" if predicted else "",
                f"{row['peak_bytes'] / row['plain_peak_bytes']:.3f}",
                f"{row['process_bytes'] / _MIB:.1f}",
                f"{row['process_bytes'] / row['plain_process_bytes']:.3f}",
                f"{row['file_bytes'] / _MIB:.1f}",
                "{} of {}".format(*row["packed"]) if row["packed"] else "",
                f"{seconds['median']:.2f} ({seconds['minimum']:.2f} to {seconds['maximum']:.2f})",
                "equal" if row["equal"] else _noise(row["update_noise"]),
            ]
            lines.append(f"| {name} | {row['way']} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _noise(found: float | None) -> str:
    return "differs" if found is None else f"{found:.1e}"


if __name__ == "__main__":
    main()

"""Five ways to hold a training step in memory, each network in one run.

Goes in: names of networks of benchmarks/tasks.py, which are briefly trained on photographs or text, or none
for the one that is drawn. Comes out: benchmarks/reports/ways-<date>.json and .md, with the step that
docs/step.svg draws for the README.

The ways are plain PyTorch, gradient checkpointing of every block, torch's save_on_cpu, Inductor under
activation_memory_budget, and Squeezebox's exact plan without a budget. A step is zero_grad, forward, loss,
backward and the optimizer's step; its peak is everything. All ways are timed in alternation. Noise is the
squared difference of all gradients from plain PyTorch's, over the squared norm of those.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch._functorch import config as functorch_config

import squeezebox
from benchmarks import _report, checkpointing, tasks
from benchmarks.tasks import Task
from squeezebox.profiling import record_closure
from squeezebox.schema import Kind, LiveSample
from squeezebox.session import Session, _timeline

DRAWN = "gpt"
COMPILED_BUDGET = 0.5
PARTS = {
    "there throughout": (Kind.PARAMETER, Kind.BUFFER, Kind.STATE, Kind.INPUT),
    "gradients": (Kind.GRADIENT,),
    "saved for backward": (Kind.SAVED, Kind.PACKED),
    "temporaries": (Kind.TEMPORARY,),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("networks", nargs="*", default=[DRAWN], metavar="network")
    parser.add_argument("--rounds", type=int, default=7, help="of the timing")
    arguments = parser.parse_args()
    results: dict[str, Any] = {"networks": {}}
    for name in arguments.networks:
        torch.manual_seed(0)
        begun = time.perf_counter()
        task = tasks.build(name, tasks.SETUPS[name])
        results["networks"][name] = measure(task, arguments.rounds)
        if name == DRAWN:
            results["step"] = {"network": name, **drawn(task)}
        paths = _report.write("ways", results, render(results["networks"]))
        print(name, f"{time.perf_counter() - begun:.0f} s", *paths, file=sys.stderr, flush=True)


def measure(plain: Task, rounds: int) -> dict[str, Any]:
    """Every way's peak, seconds, noise, and the seconds of its first step."""
    found: dict[str, Any] = {}
    with contextlib.ExitStack() as open_ways:
        arms = {"plain": plain} | {name: plain.copy() for name in WAYS}
        for name, task in arms.items():
            begun = time.perf_counter()
            if name in WAYS:
                open_ways.enter_context(WAYS[name](task))
            task.step()
            first = time.perf_counter() - begun
            task.step()
            noise = distance(task, plain)
            found[name] = {"peak_bytes": task.peak()[0], "noise": noise, "first_step_seconds": first}
        compared = _report.interleaved({name: task.step for name, task in arms.items()}, rounds, 2)
    for name, row in found.items():
        row["seconds"] = dataclasses.asdict(compared.seconds[name])
        if name != "plain":
            row["over_plain"] = dataclasses.asdict(compared.ratios[f"{name}/plain"])
    return found


def distance(task: Task, plain: Task) -> float:
    """The noise of one step's gradients, at the plain network's weights."""
    task.model.load_state_dict(plain.model.state_dict())
    exact, found = _gradients(plain), _gradients(task)
    differing = sum(float((a - b).double().square().sum()) for a, b in zip(found, exact, strict=True))
    return differing / sum(float(each.double().square().sum()) for each in exact)


def _gradients(task: Task) -> list[Tensor]:
    torch.manual_seed(1)
    task.optimizer.zero_grad()
    task.backward()
    return [p.grad.clone() for p in task.model.parameters() if p.grad is not None]


@contextlib.contextmanager
def _forward(task: Task, forward: Callable[[Tensor], Any]) -> Iterator[None]:
    task.forward = forward
    try:
        yield
    finally:
        task.forward = task.model


def _on_cpu(task: Task) -> AbstractContextManager[None]:
    def forward(inputs: Tensor) -> Any:
        with torch.autograd.graph.save_on_cpu():
            return task.model(inputs)

    return _forward(task, forward)


@contextlib.contextmanager
def _compiled(task: Task) -> Iterator[None]:
    torch._dynamo.reset()
    with (
        functorch_config.patch(activation_memory_budget=COMPILED_BUDGET),
        _forward(task, torch.compile(task.model)),
    ):
        yield
    torch._dynamo.reset()


@contextlib.contextmanager
def _squeezed(task: Task) -> Iterator[Session]:
    plan = squeezebox.plan(
        task.model,
        sample=(task.inputs, task.target),
        loss_fn=task.loss_fn,
        optimizer=task.optimizer,
        exact=True,
    )
    session = squeezebox.attach(task.model, optimizer=task.optimizer, plan=plan)
    try:
        for _ in range(2):  # the session measures the first ones itself
            task.step()
            session.report()
        yield session
    finally:
        session.detach()


WAYS: dict[str, Callable[[Task], AbstractContextManager[Any]]] = {
    "checkpointing": lambda task: checkpointing.checkpointed(task.model),
    "save_on_cpu": _on_cpu,
    "compiled": _compiled,
    "squeezebox": _squeezed,
}


def drawn(task: Task) -> dict[str, Any]:
    """Live bytes over a plain step, and over one under the plan, by what they are for."""
    trace = record_closure(
        task.model, task.step, optimizer=task.optimizer, around=lambda marks: contextlib.nullcontext()
    )
    samples = list(_timeline._thinned(list(_timeline._samples(trace))))
    before = _rows(samples, trace.seconds)
    with _squeezed(task) as session:
        timeline = session.timeline(task.step).figures
    return {"parts": list(PARTS), "before": before, "after": _rows(timeline.samples, timeline.seconds)}


def _rows(samples: Sequence[LiveSample], seconds: float) -> list[str]:
    """Share of the step's time, phase, and the bytes of every part, one line a sample."""
    kinds = list(Kind)
    return [
        " ".join(
            (
                f"{sample.seconds / seconds:.4f}",
                sample.phase,
                *(str(sum(sample.nbytes[kinds.index(kind)] for kind in part)) for part in PARTS.values()),
            )
        )
        for sample in samples
    ]


_NOTE = f"""Checkpointing repeats every block. save_on_cpu moves nothing, as the step is on the CPU: how
far its time is from 1 tells how far other work on the machine bent all times.
Inductor's activation_memory_budget is {COMPILED_BUDGET}. Squeezebox's plan is exact and has no budget of
bytes; its first step includes planning. Ratios are medians (and ranges) over the rounds.

| network | way | peak MiB | plain / peak | time / plain | noise | first step s |
|---|---|---|---|---|---|---|"""


def render(networks: dict[str, Any]) -> str:
    """One row a network and way."""
    rows = [
        _row(name, way, ways["plain"]["peak_bytes"], row)
        for name, ways in networks.items()
        for way, row in ways.items()
    ]
    return "\n".join([_NOTE, *rows])


def _row(name: str, way: str, plain_bytes: int, row: dict[str, Any]) -> str:
    over = row.get("over_plain")
    time_over = f"{over['median']:.2f} ({over['minimum']:.2f} to {over['maximum']:.2f})" if over else "1.00"
    cells = (
        name,
        way,
        f"{row['peak_bytes'] / 2**20:.1f}",
        f"{plain_bytes / row['peak_bytes']:.2f}",
        time_over,
        f"{row['noise']:.1e}",
        f"{row['first_step_seconds']:.1f}",
    )
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main()

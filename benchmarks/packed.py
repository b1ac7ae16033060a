"""How much smaller everything saved gets at a given noise, when nothing is kept, moved or made again.

Goes in: nothing; networks from benchmarks/tasks.py, briefly trained on photographs or text, at several
sizes of the batch. Comes out: benchmarks/reports/packed-<date>.json and .md.

Every step has a batch of its own. Bounds settle over the first steps, are corrected by the whole noise on a
few more, and then ratio and noise of a few steps are taken: noise differs from one to the next by a factor
of two or so, so medians and ranges are given. Bits are of an element, by what the tensors are read for.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch

import squeezebox
from benchmarks import _report, tasks
from benchmarks.tasks import SETUPS, Task
from squeezebox.schema import StepRecord

CHECKS = 12


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("networks", nargs="*", default=["resnet50"], metavar="network")
    parser.add_argument("--batches", nargs="*", type=int, default=[8, 32])
    parser.add_argument("--size", type=int, help="of images; default: as in benchmarks/tasks.py")
    parser.add_argument("--train-steps", type=int, default=120, help="plain ones, small, before all")
    parser.add_argument("--noise", type=float, default=1e-2)
    parser.add_argument("--settling", type=int, default=6, help="steps before the first correction")
    parser.add_argument("--calibrations", type=int, default=4)
    parser.add_argument("--measured", type=int, default=5, help="steps whose ratio and noise are taken")
    parser.add_argument("--name", default="packed", help="of the report")
    arguments = parser.parse_args()
    rows = []
    for name in arguments.networks:
        for batch in arguments.batches:
            torch.manual_seed(0)
            rows.append(measure(name, batch, arguments))
            print(rows[-1], file=sys.stderr, flush=True)
    for path in _report.write(arguments.name, {"rows": rows, "settings": vars(arguments)}, table(rows)):
        print(path)


def measure(name: str, batch: int, arguments: argparse.Namespace) -> dict[str, Any]:
    setup = replace(SETUPS[name], batch=batch, train_steps=arguments.train_steps)
    setup = replace(setup, size=arguments.size or setup.size)
    task = tasks.build(name, setup)
    step = stepping(task, setup.batches(batch, setup.size, 2), setup.layout)
    counts = (arguments.settling, arguments.calibrations, arguments.measured)
    found = records(task, step, arguments.noise, *counts)
    return {
        "network": name,
        "batch": batch,
        "size": setup.size,
        "loss": float(task.loss().detach()),
        "saved_bytes": found[0].saved_bytes,
        "ratios": [record.saved_bytes / record.packed_bytes for record in found],
        "noises": [record.noise for record in found],
        "bits": bits(found[-1]),
    }


def stepping(task: Task, stream: Iterator[Any], layout: torch.memory_format) -> Callable[[], None]:
    """A step of the task on the next batch, which stays the task's until the next one."""

    def step() -> None:
        task.inputs, task.target = next(stream)
        if task.inputs.dim() == 4:
            task.inputs = task.inputs.contiguous(memory_format=layout)
        task.step()

    return step


def records(
    task: Task, step: Callable[[], None], noise: float, settling: int, calibrations: int, measured: int
) -> list[StepRecord]:
    """Of the last ``measured`` steps, with their noise, after bounds have settled and were corrected."""
    options = {"noise": noise, "checks_per_refresh": CHECKS}
    session = squeezebox.attach(task.model, optimizer=task.optimizer, **options)
    found = []
    try:
        for _ in range(settling):
            step()
        for _ in range(calibrations):
            step()
            session.calibrate(task.backward)
        for _ in range(measured):
            step()
            session.measure_noise(task.backward)
            found.append(session.report().record)
    finally:
        session.detach()
    return found


def bits(record: StepRecord) -> dict[str, dict[str, float]]:
    """By role: the share of what is saved and of what is held, and bits an element."""
    sums: dict[str, list[int]] = defaultdict(lambda: [0, 0, 0])
    for tensor in record.tensors:
        of_role = sums[tensor.role.value]
        for place, count in enumerate((tensor.saved_bytes, tensor.packed_bytes, math.prod(tensor.shape))):
            of_role[place] += count
    return {
        role: {
            "saved": saved / record.saved_bytes,
            "held": held / record.packed_bytes,
            "bits": 8 * held / elements,
        }
        for role, (saved, held, elements) in sums.items()
    }


def table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| network | batch | loss | saved MiB | saved / held | noise | role: bits (share of held) |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        roles = sorted(row["bits"].items(), key=lambda item: -item[1]["held"])
        shown = ", ".join(f"{role}: {part['bits']:.2f} ({part['held']:.0%})" for role, part in roles[:4])
        lines.append(
            f"| {row['network']} | {row['batch']} of {row['size']} | {row['loss']:.2f} "
            f"| {row['saved_bytes'] / 2**20:.0f} | {_spread(row['ratios'], '.1f')} "
            f"| {_spread(row['noises'], '.1e')} | {shown} |"
        )
    return "\n".join(lines)


def _spread(values: list[float], figures: str) -> str:
    low, middle, high = min(values), statistics.median(values), max(values)
    return f"{middle:{figures}} ({low:{figures}}..{high:{figures}})"


if __name__ == "__main__":
    main()

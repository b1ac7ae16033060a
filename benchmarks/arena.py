"""Training with packed tensors in an arena and without: peaks, seconds, spills, whether results are equal.

Goes in: nothing; networks of benchmarks/tasks.py at smaller sizes. Comes out:
benchmarks/reports/arena-<date>.json and .md.

Two copies of a network take the same steps on the same batches, another one each step, in alternation; one
has `arena=True`. A step is zero_grad, forward, loss, backward and the optimizer's step. Seconds are ratios
within a step, medians over those that are not measured; every fifth is, by the allocator's events.
"""

from __future__ import annotations

import argparse
import copy
import gc
import statistics
import sys
import time
from typing import Any

import torch
from torch import Tensor, nn

import squeezebox
from benchmarks import _report, models, training
from benchmarks.tasks import SETUPS, Setup
from squeezebox.profiling import PeakMeter

SIZES = {"resnet18": (8, 64), "gpt": (4, 64)}
KINDS: dict[str, dict[str, Any]] = {"noise 1e-2": {"noise": 1e-2}, "exact": {"exact": True}}
SETTLED = 20  # steps in which bounds are refreshed and the arena is laid out
EVERY = 5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("networks", nargs="*", default=list(SIZES), metavar="network")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--name", default="arena", help="of the report")
    arguments = parser.parse_args()
    rows = []
    for name in arguments.networks:
        for kind in KINDS:
            rows.append({"network": name, "kind": kind, **measure(name, kind, arguments.steps)})
            print(rows[-1], file=sys.stderr, flush=True)
    results = {"rows": rows, "settings": vars(arguments)}
    print(*_report.write(arguments.name, results, render(rows, arguments.steps)), file=sys.stderr)


class Arm:
    """One of the two trainings."""

    def __init__(self, model: nn.Module, setup: Setup, kind: str, arena: bool) -> None:
        self.model = model
        self.optimizer = setup.optimizer(model.parameters())
        self.session = squeezebox.attach(model, optimizer=self.optimizer, arena=arena, **KINDS[kind])
        self.losses: list[float] = []
        self.peaks: list[int] = []
        self.seconds: dict[int, float] = {}

    def step(self, number: int, inputs: Tensor, target: Tensor) -> None:
        """Take one, measured or timed."""
        meter = PeakMeter(torch.device("cpu"))
        self.optimizer.zero_grad()
        gc.collect()
        measured = number >= SETTLED and number % EVERY == 0 and meter.start()
        begun = time.perf_counter()
        with self.session.step():
            loss = training.classification_loss(self.model(inputs), target)
        loss.backward()
        self.optimizer.step()
        if measured:
            reserved = self.session._store.reserved
            self.peaks.append(meter.stop([]).total_bytes + sum(tensor.nbytes for tensor in reserved))
        elif number >= SETTLED:
            self.seconds[number] = time.perf_counter() - begun
        self.losses.append(float(loss.detach()))


def measure(name: str, kind: str, steps: int) -> dict[str, Any]:
    """Both arms of one network."""
    torch.manual_seed(0)
    batch, size = SIZES[name]
    setup = SETUPS[name].smaller(batch=batch, size=size, train_steps=0)
    sizes = {**setup.sizes, **({setup.sized: setup.size} if setup.sized else {})}
    model = models.build(name, num_classes=setup.num_classes(), **sizes).train()
    batches = setup.batches(batch, size, 0)
    with_arena, without = (Arm(copy.deepcopy(model), setup, kind, arena) for arena in (True, False))
    records = []
    for number in range(steps):
        inputs, target = next(batches)
        for arm in (with_arena, without) if number % 2 else (without, with_arena):
            torch.manual_seed(number)
            arm.step(number, inputs, target)
        records.append(with_arena.session.report().record)
    arenas = [record.arena for record in records if record.arena is not None]
    settled = arenas[SETTLED:]
    ratios = [with_arena.seconds[number] / without.seconds[number] for number in with_arena.seconds]
    return {
        "equal": with_arena.losses == without.losses,
        "arena_bytes": arenas[-1].nbytes,
        "packed_bytes": [record.packed_bytes for record in records[SETTLED:]],
        "peaks_with": with_arena.peaks,
        "peaks_without": without.peaks,
        "seconds_ratio": statistics.median(ratios),
        "seconds_ratio_spread": [min(ratios), max(ratios)],
        "layouts": arenas[-1].layouts,
        "tensors": arenas[-1].tensors,
        "spills": [arena.spills for arena in arenas],
        "spilled_bytes": [arena.spilled_bytes for arena in arenas],
        "settled_spills": sum(arena.spills for arena in settled),
        "total_spills": arenas[-1].total_spills,
    }


def render(rows: list[dict[str, Any]], steps: int) -> str:
    """The table in Markdown."""
    lines = [
        f"Peaks are those of {len(rows[0]['peaks_with'])} measured steps beyond what model, optimizer "
        "and batch hold; the arena counts. Spills are tensors, of all steps and (after step "
        f"{SETTLED}) of {steps - SETTLED}.",
        "",
        "| network | kind | arena | in it | peak with | peak without | seconds with / without | spills "
        "| layouts | same losses |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        low, high = row["seconds_ratio_spread"]
        lines.append(
            f"| {row['network']} | {row['kind']} | {_mib([row['arena_bytes']])} | {row['tensors']} "
            f"| {_mib(row['peaks_with'])} | {_mib(row['peaks_without'])} "
            f"| {row['seconds_ratio']:.3f} ({low:.2f} to {high:.2f}) "
            f"| {row['total_spills']} ({row['settled_spills']}) | {row['layouts']} "
            f"| {'yes' if row['equal'] else 'no'} |"
        )
    return "\n".join(lines)


def _mib(sizes: list[int]) -> str:
    low, high = min(sizes) / 2**20, max(sizes) / 2**20
    return f"{low:.3f} MiB" if low == high else f"{low:.3f} to {high:.3f} MiB"


if __name__ == "__main__":
    main()

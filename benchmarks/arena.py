"""Training with packed tensors in an arena and without: peaks, seconds, spills, whether results are equal.

Goes in: nothing; networks of benchmarks/tasks.py at smaller sizes. Comes out:
benchmarks/reports/arena-<date>.json and .md.

Three copies of a network take the same steps on the same batches, another one each step, in alternation: one
with `arena=True`, one without, and one whose places lie in a block that stays, as a device's do on the host.
A step is zero_grad, forward, loss, backward and the optimizer's step. Seconds are ratios within a step,
medians over those that are not measured; some early ones and every fifth are, by the allocator's events.
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
from squeezebox.memory import HEADROOM, Reserve
from squeezebox.profiling import PeakMeter

SIZES = {"resnet18": (8, 64), "gpt": (4, 64)}
KINDS = ("noise 1e-2", "noise 1e-2, a sample", "noise 1e-2, a plan", "exact")
SAMPLE = ("sample", "loss_fn")
ARMS = ("places", "without", "lasting")
SETTLED = 17  # steps in which bounds are refreshed
EARLY, EVERY = (1, 2), 3  # steps that are measured; the optimizer's state is there from the second on


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("networks", nargs="*", default=list(SIZES), metavar="network")
    parser.add_argument("--kinds", nargs="*", default=list(KINDS), metavar="kind")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--name", default="arena", help="of the report")
    arguments = parser.parse_args()
    rows = []
    for name in arguments.networks:
        for kind in arguments.kinds:
            rows.append({"network": name, "kind": kind, **measure(name, kind, arguments.steps)})
            print(rows[-1], file=sys.stderr, flush=True)
    results = {"rows": rows, "settings": vars(arguments)}
    print(*_report.write(arguments.name, results, render(rows, arguments.steps)), file=sys.stderr)


class Arm:
    """One of the trainings."""

    def __init__(self, model: nn.Module, setup: Setup, name: str, options: dict[str, Any]) -> None:
        self.model = model
        self.optimizer = setup.optimizer(model.parameters())
        arena = name != "without"
        given = options if arena else {key: options[key] for key in options if key not in SAMPLE}
        self.session = squeezebox.attach(model, optimizer=self.optimizer, arena=arena, **given)
        if name == "lasting":
            reserve = self.session.engine.store.reserve = Reserve(self._allocate, lasting=True)
            reserve._headroom = HEADROOM
        self.lasting_bytes = 0
        self.losses: list[float] = []
        self.peaks: dict[int, int] = {}
        self.seconds: dict[int, float] = {}

    def _allocate(self, nbytes: int) -> Tensor:
        self.lasting_bytes = nbytes
        return torch.empty(nbytes, dtype=torch.uint8)

    def step(self, number: int, inputs: Tensor, target: Tensor) -> None:
        """Take one, measured or timed."""
        meter = PeakMeter(torch.device("cpu"))
        self.optimizer.zero_grad()
        gc.collect()
        wanted = number in EARLY or (number >= SETTLED and number % EVERY == 0)
        measured = wanted and meter.start()
        begun = time.perf_counter()
        with self.session.step():
            loss = training.classification_loss(self.model(inputs), target)
        loss.backward()
        self.optimizer.step()
        if measured:
            self.peaks[number] = meter.stop([]).total_bytes + self.lasting_bytes
        elif number >= SETTLED:
            self.seconds[number] = time.perf_counter() - begun
        self.losses.append(float(loss.detach()))
        self.record = self.session.report().record  # which ends the session's own measurement


def measure(name: str, kind: str, steps: int) -> dict[str, Any]:
    """All arms of one network."""
    torch.manual_seed(0)
    batch, size = SIZES[name]
    setup = SETUPS[name].smaller(batch=batch, size=size, train_steps=0)
    sizes = {**setup.sizes, **({setup.sized: setup.size} if setup.sized else {})}
    model = models.build(name, num_classes=setup.num_classes(), **sizes).train()
    batches = setup.batches(batch, size, 0)
    options = options_of(kind, model, setup, next(batches))
    names = ARMS if kind == KINDS[0] else ARMS[:2]
    arms = {name: Arm(copy.deepcopy(model), setup, name, options) for name in names}
    records = []
    for number in range(steps):
        inputs, target = next(batches)
        for arm in sorted(arms, reverse=bool(number % 2)):
            torch.manual_seed(number)
            arms[arm].step(number, inputs, target)
        records.append(arms["places"].record)
    arenas = [record.arena for record in records if record.arena is not None]
    settled = arenas[SETTLED:]
    places, without = arms["places"], arms["without"]
    ratios = [places.seconds[number] / without.seconds[number] for number in places.seconds]
    plan = options.get("plan")
    return {
        "equal": all(arm.losses == without.losses for arm in arms.values()),
        "arena_bytes": arenas[-1].nbytes,
        "packed_bytes": [record.packed_bytes for record in records[SETTLED:]],
        "peaks": {name: arm.peaks for name, arm in arms.items()},
        "held_bytes": held_bytes(places, inputs, target),
        "predicted_peak_bytes": plan.predicted_peak_bytes if plan is not None else None,
        "seconds_ratio": statistics.median(ratios),
        "seconds_ratio_spread": [min(ratios), max(ratios)],
        "layouts": arenas[-1].layouts,
        "tensors": arenas[-1].tensors,
        "spills": [arena.spills for arena in arenas],
        "spilled_bytes": [arena.spilled_bytes for arena in arenas],
        "settled_spills": sum(arena.spills for arena in settled),
        "total_spills": arenas[-1].total_spills,
    }


def options_of(kind: str, model: nn.Module, setup: Setup, sample: Any) -> dict[str, Any]:
    """What is given to attach()."""
    if kind == "exact":
        return {"exact": True}
    shown = dict(zip(SAMPLE, (sample, training.classification_loss), strict=True))
    if not kind.endswith("plan"):
        return {"noise": 1e-2, **(shown if kind.endswith("sample") else {})}
    optimizer = setup.optimizer(model.parameters())
    limits = {"noise": 1e-2, "recompute": False, "offload": False, "arena": True}
    return {"plan": squeezebox.plan(model, optimizer=optimizer, **limits, **shown)}


def held_bytes(arm: Arm, *batch: Tensor) -> int:
    """What is there before a step."""
    states = [value for state in arm.optimizer.state.values() for value in state.values()]
    tensors = [*arm.model.parameters(), *arm.model.buffers(), *states, *batch]
    return sum(tensor.nbytes for tensor in tensors if isinstance(tensor, Tensor))


def render(rows: list[dict[str, Any]], steps: int) -> str:
    """The table in Markdown."""
    lines = [
        f"Peaks are everything, of measured steps from step {SETTLED} on, and of the second and third; the "
        f"arena counts. Spills are tensors, of all steps and (after step {SETTLED}) of {steps - SETTLED}.",
        "",
        "| network | kind | places | tensors in them | peak without | more with places | in early steps "
        "| in a block that stays | foretold | seconds with / without | spills | same losses |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        low, high = row["seconds_ratio_spread"]
        lines.append(
            f"| {row['network']} | {row['kind']} | {_mib([row['arena_bytes']])} | {row['tensors']} "
            f"| {_mib(_total(row, 'without'))} | {_more(row, 'places', False)} "
            f"| {_more(row, 'places', True)} | {_more(row, 'lasting', False)} "
            f"| {_mib([row['predicted_peak_bytes']]) if row['predicted_peak_bytes'] else ''} "
            f"| {row['seconds_ratio']:.3f} ({low:.2f} to {high:.2f}) "
            f"| {row['total_spills']} ({row['settled_spills']}) | {'yes' if row['equal'] else 'no'} |"
        )
    return "\n".join(lines)


def _total(row: dict[str, Any], arm: str) -> list[int]:
    peaks = row["peaks"][arm]
    return [row["held_bytes"] + peaks[number] for number in peaks if number >= SETTLED]


def _more(row: dict[str, Any], arm: str, early: bool) -> str:
    """In KiB, and as a share of the peak without."""
    peaks, plain = row["peaks"].get(arm, {}), row["peaks"]["without"]
    steps = [number for number in peaks if (number in EARLY) == early]
    if not steps:
        return ""
    more = sorted(peaks[number] - plain[number] for number in steps)
    shares = sorted((peaks[number] - plain[number]) / (row["held_bytes"] + plain[number]) for number in steps)
    return f"{more[0] / 1024:.1f} to {more[-1] / 1024:.1f} KiB ({shares[-1]:+.3%})"


def _mib(sizes: list[int]) -> str:
    low, high = min(sizes) / 2**20, max(sizes) / 2**20
    return f"{low:.3f} MiB" if low == high else f"{low:.3f} to {high:.3f} MiB"


if __name__ == "__main__":
    main()

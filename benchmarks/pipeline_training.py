"""Whether gradients that are one batch late cost a language model anything: 1F1B against 2BW.

Goes in: nothing; characters of Python's standard library, its validation text from other modules. Comes out:
benchmarks/reports/pipeline_training-<date>.json with all curves, and .md.

A small GPT is trained on two gloo ranks of squeezebox.pipeline.Runner with AdamW, a cosine learning rate
after a warm-up and gradients clipped to norm 1. First some learning rates are tried with 1F1B and a seed of
their own, and the one with the lowest validation loss in the end is taken for all arms, so an arm which
would do better with another one is at a disadvantage. The loss to reach is that trial's last validation loss
plus 0.05; batches to it are counted to the first validation that is as low. All arms of a seed begin with
the same weights and see the same batches.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import islice
from typing import Any

import torch

from benchmarks import _ranks, _report, models, text
from benchmarks.training import classification_loss
from squeezebox.pipeline import Runner, cut
from squeezebox.schema import InputForm

RANKS = 2
TRIAL_SEED = 100
VALIDATION_SEED = 1000
MARGIN = 0.05  # over the trial's last validation loss
BARS = "▁▂▃▄▅▆▇█"


@dataclass(frozen=True, kw_only=True, slots=True)
class Arm:
    """How to train; ``warmup`` is the share of all batches that are flushed at first."""

    schedule: str
    correction: bool = False
    warmup: float = 0.0


ARMS: Mapping[str, Arm] = {
    "1F1B": Arm(schedule="1f1b"),
    "2BW": Arm(schedule="2bw"),
    "2BW, corrected": Arm(schedule="2bw", correction=True),
    "2BW, a quarter flushed at first": Arm(schedule="2bw", warmup=0.25),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Setup:
    """Sizes, and the highest learning rate."""

    width: int = 128
    depth: int = 4
    length: int = 64
    microbatch: int = 4
    microbatches: int = 4
    batches: int = 400
    rising: int = 20
    every: int = 25
    validation: int = 8
    rate: float = 1e-3

    @property
    def samples(self) -> int:
        return self.microbatch * self.microbatches

    def rate_at(self, batch: int) -> float:
        """Rises in a line, then falls to a tenth along a cosine."""
        if batch < self.rising:
            return self.rate * (batch + 1) / self.rising
        done = (batch - self.rising) / max(1, self.batches - self.rising)
        return self.rate * (0.55 + 0.45 * math.cos(math.pi * done))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rates", nargs="*", type=float, default=[5e-4, 1e-3, 2e-3], help="to try with 1F1B")
    parser.add_argument("--seeds", nargs="*", type=int, default=[0, 1])
    parser.add_argument("--batches", type=int, default=Setup().batches)
    parser.add_argument("--quick", action="store_true", help="a tiny model, few batches, one rate and seed")
    arguments = parser.parse_args()
    setup = Setup(batches=arguments.batches)
    if arguments.quick:
        setup = Setup(width=32, depth=2, batches=20, rising=4, every=5, validation=1)
        arguments.rates, arguments.seeds = arguments.rates[1:2], arguments.seeds[:1]
    trials = [train("1F1B", replace(setup, rate=rate), TRIAL_SEED) for rate in arguments.rates]
    best = min(trials, key=_last)
    target = round(_last(best) + MARGIN, 3)
    setup = replace(setup, rate=best["rate"])
    runs = [train(arm, setup, seed) for seed in arguments.seeds for arm in ARMS]
    for run in runs:
        run["batches_to_target"] = batches_to(target, run["validation"])
    payload = {"settings": asdict(setup), "target": target, "trials": trials, "runs": runs}
    for path in _report.write("pipeline_training", payload, table(setup, target, trials, runs)):
        print(path)


def train(arm: str, setup: Setup, seed: int) -> dict[str, Any]:
    """The last rank's curves."""
    found: dict[str, Any] = _ranks.run(rank, RANKS, ARMS[arm], setup, seed)[-1]
    found = {"arm": arm, "seed": seed, "rate": setup.rate} | found
    print(arm, seed, setup.rate, found["validation"][-1], found["seconds"], file=sys.stderr, flush=True)
    return found


def rank(number: int, arm: Arm, setup: Setup, seed: int) -> dict[str, Any]:
    """What one rank does: (batch, loss) in training and validation, both empty but on the last rank."""
    torch.manual_seed(seed)
    sizes = {"width": setup.width, "depth": setup.depth, "heads": 4, "context": setup.length}
    model = models.build("gpt", text.NUM_CHARACTERS, **sizes)
    example = torch.zeros(setup.microbatch, setup.length, dtype=torch.int64)
    plan = _ranks.plan(
        len(cut(model, (example,))),
        RANKS,
        arm.schedule,
        setup.microbatches,
        microbatch=setup.microbatch,
        inputs=(InputForm(shape=(setup.length,), dtype="int64"),),
    )
    runner = Runner(
        model,
        plan,
        optimizer=torch.optim.AdamW(model.parameters(), lr=setup.rate),
        loss_fn=classification_loss,
        clip=1.0,
        correction=arm.correction,
        warmup=round(arm.warmup * setup.batches),
    )
    try:
        return _curves(runner, setup, seed)
    finally:
        runner.close()


def _curves(runner: Runner, setup: Setup, seed: int) -> dict[str, Any]:
    training: list[tuple[int, float]] = []
    validation: list[tuple[int, float]] = []
    stream = text.batches(setup.samples, setup.length, seed)
    held_out = text.batches(setup.samples, setup.length, VALIDATION_SEED, text.HELD_OUT)
    unseen = [*islice(held_out, setup.validation)]
    start = time.perf_counter()
    for batch, (inputs, target) in enumerate(islice(stream, setup.batches)):
        for group in runner.optimizer.param_groups:
            group["lr"] = setup.rate_at(batch)
        loss = runner.step(inputs, target)
        if loss is not None:
            training.append((batch, loss.item()))
        if (batch + 1) % setup.every == 0 or batch + 1 == setup.batches:
            losses = [runner.evaluate(*each) for each in unseen]
            found = [each.item() for each in losses if each is not None]
            validation += [(batch + 1, statistics.fmean(found))] if found else []
    return {"training": training, "validation": validation, "seconds": time.perf_counter() - start}


def _last(run: Mapping[str, Any]) -> float:
    return float(run["validation"][-1][1])


def batches_to(target: float, validation: Sequence[tuple[int, float]]) -> int | None:
    """Batches up to the first validation that is as low, None if there is none."""
    return next((batch for batch, loss in validation if loss <= target), None)


def sparkline(losses: Sequence[float], low: float, high: float) -> str:
    """A bar each, from the lowest loss of all to the highest."""
    span = (high - low) or 1.0
    return "".join(BARS[min(len(BARS) - 1, int((each - low) / span * len(BARS)))] for each in losses)


def table(
    setup: Setup,
    target: float,
    trials: Sequence[Mapping[str, Any]],
    runs: Sequence[Mapping[str, Any]],
) -> str:
    shown = ", ".join(f"{run['rate']:g}: {_last(run):.3f}" for run in trials)
    flushed = {run["seed"]: _last(run) for run in runs if run["arm"] == "1F1B"}
    every = [loss for run in runs for _, loss in run["validation"]]
    lines = [
        f"GPT of width {setup.width} and depth {setup.depth}, {setup.microbatches} microbatches of "
        f"{setup.microbatch} passages of {setup.length} characters, {setup.batches} batches, "
        "AdamW, clip 1.0.",
        "",
        f"Last validation loss of 1F1B by learning rate (seed {TRIAL_SEED}): {shown}; {setup.rate:g} for all "
        f"that follows. Loss to reach: {target}.",
        "",
        "| arm | seed | last validation loss | over 1F1B | batches to the loss "
        f"| validation losses, every {setup.every} batches |",
        "|---|---|---|---|---|---|",
    ]
    for run in sorted(runs, key=lambda run: [*ARMS].index(run["arm"])):
        losses = [loss for _, loss in run["validation"]]
        needed = run["batches_to_target"] or "not reached"
        lines.append(
            f"| {run['arm']} | {run['seed']} | {losses[-1]:.3f} | {losses[-1] - flushed[run['seed']]:+.3f} "
            f"| {needed} | {sparkline(losses, min(every), max(every))} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()

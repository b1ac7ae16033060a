"""What packing activations and their gradients between ranks saves in bytes, and costs in loss and seconds.

Goes in: nothing; characters of Python's standard library, its validation text from other modules. Comes out:
benchmarks/reports/pipeline_wire-<date>.json with all losses, and .md.

A small GPT is trained on two gloo ranks of squeezebox.pipeline.Runner, 1F1B, with the wire off and at some
errors, each without and with feedback. All arms of a seed begin with the same weights and see the same
batches. Noise is the relative squared error that the senders measured. Seconds are the median batch's; both
ranks share this machine's memory bandwidth, and loopback is a fast wire, so they only show what packing
itself takes.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import islice
from typing import Any

import torch

from benchmarks import _ranks, _report, models, text
from benchmarks.pipeline_training import VALIDATION_SEED, Setup
from benchmarks.training import classification_loss
from squeezebox.pipeline import Runner, Wire, cut
from squeezebox.schema import InputForm

RANKS = 2
OFF = "off"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--errors", nargs="*", type=float, default=[1e-2, 1e-1, 5e-1])
    parser.add_argument("--seeds", nargs="*", type=int, default=[0, 1])
    parser.add_argument("--batches", type=int, default=120)
    parser.add_argument("--quick", action="store_true", help="a tiny model, few batches, one error and seed")
    parser.add_argument("--name", default="pipeline_wire", help="of the report")
    arguments = parser.parse_args()
    setup = Setup(batches=arguments.batches, rate=3e-3)
    if arguments.quick:
        setup = Setup(width=32, depth=2, batches=6, rising=2, validation=1)
        arguments.errors, arguments.seeds = arguments.errors[:1], arguments.seeds[:1]
    runs = [
        train(name, wire, setup, seed)
        for seed in arguments.seeds
        for name, wire in arms(arguments.errors).items()
    ]
    payload = {"settings": asdict(setup), "runs": runs}
    for path in _report.write(arguments.name, payload, table(setup, runs)):
        print(path)


def arms(errors: Sequence[float]) -> dict[str, Wire | None]:
    """By name; activations and gradients get the same error."""
    found: dict[str, Wire | None] = {OFF: None}
    for error in errors:
        for feedback in (False, True):
            name = f"{error:g}{', feedback' if feedback else ''}"
            found[name] = Wire(activation_error=error, gradient_error=error, feedback=feedback)
    return found


def train(name: str, wire: Wire | None, setup: Setup, seed: int) -> dict[str, Any]:
    """The last rank's losses, and both ways' traffic."""
    first, last = _ranks.run(rank, RANKS, wire, setup, seed)
    run = {"arm": name, "seed": seed, "forward": first["traffic"], "back": last["traffic"]}
    run |= {key: last[key] for key in ("training", "validation", "seconds")}
    print(name, seed, run["validation"], run["seconds"], run["back"], file=sys.stderr, flush=True)
    return run


def rank(number: int, wire: Wire | None, setup: Setup, seed: int) -> dict[str, Any]:
    """What one rank does; the losses are the last one's."""
    torch.manual_seed(seed)
    sizes = {"width": setup.width, "depth": setup.depth, "heads": 4, "context": setup.length}
    model = models.build("gpt", text.NUM_CHARACTERS, **sizes)
    pieces = cut(model, (torch.zeros(setup.microbatch, setup.length, dtype=torch.int64),))
    plan = _ranks.plan(
        len(pieces),
        RANKS,
        "1f1b",
        setup.microbatches,
        microbatch=setup.microbatch,
        inputs=(InputForm(shape=(setup.length,), dtype="int64"),),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=setup.rate)
    runner = Runner(model, plan, optimizer=optimizer, loss_fn=classification_loss, clip=1.0, wire=wire)
    try:
        return _losses(runner, setup, seed)
    finally:
        runner.close()


def _losses(runner: Runner, setup: Setup, seed: int) -> dict[str, Any]:
    training, seconds = [], []
    for batch, (inputs, target) in enumerate(
        islice(text.batches(setup.samples, setup.length, seed), setup.batches)
    ):
        for group in runner.optimizer.param_groups:
            group["lr"] = setup.rate_at(batch)
        start = time.perf_counter()
        loss = runner.step(inputs, target)
        seconds.append(time.perf_counter() - start)
        training += [] if loss is None else [loss.item()]
    held_out = text.batches(setup.samples, setup.length, VALIDATION_SEED, text.HELD_OUT)
    unseen = [runner.evaluate(*each) for each in islice(held_out, setup.validation)]
    found = [loss.item() for loss in unseen if loss is not None]
    (traffic,) = runner.traffic()
    return {
        "training": training,
        "validation": statistics.fmean(found) if found else None,
        "seconds": statistics.median(seconds),
        "traffic": asdict(traffic) | {"ratio": traffic.plain_bytes / traffic.sent_bytes},
    }


def table(setup: Setup, runs: Sequence[Mapping[str, Any]]) -> str:
    off = {run["seed"]: run for run in runs if run["arm"] == OFF}
    lines = [
        f"GPT of width {setup.width} and depth {setup.depth}, {setup.microbatches} microbatches of "
        f"{setup.microbatch} passages of {setup.length} characters, {setup.batches} batches, AdamW, learning "
        f"rate {setup.rate:g}, clip 1.0. An error is a share of the tensor's root mean square.",
        "",
        "| error | seed | MiB forward | ratio | noise | MiB back | ratio | noise "
        "| last 20 training losses | validation loss | over off | batch, ms |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for run in sorted(runs, key=lambda run: [each["arm"] for each in runs].index(run["arm"])):
        ways = " | ".join(
            f"{way['sent_bytes'] / 2**20:.1f} | {way['ratio']:.1f} | {way['noise']:.1e}"
            for way in (run["forward"], run["back"])
        )
        over = run["validation"] - off[run["seed"]]["validation"]
        lines.append(
            f"| {run['arm']} | {run['seed']} | {ways} | {statistics.fmean(run['training'][-20:]):.3f} "
            f"| {run['validation']:.3f} | {over:+.3f} | {1e3 * run['seconds']:.0f} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()

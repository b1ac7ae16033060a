"""Steps over devices of speeds 1:2:4: a plan for unequal devices against an equal split.

Goes in: nothing. Comes out: benchmarks/reports/pipeline_devices-<date>.json and .md.

Ranks are processes with squeezebox.pipeline.Runner and gloo messages between them. A block sleeps for its
forward, and twice as long for its backward; on the process that stands for a faster device, it sleeps for as
much less. So devices are emulated, and stages cost no processor. Blocks differ by up to 3 times. The equal
split has as many blocks on each device, in the order of processes. The other one is plan_on_devices', which
chooses order and cuts. Links are taken to cost nothing; messages are tiny.

Seconds a step are medians of all steps but the first of each round; rounds of both splits take turns.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import random
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from benchmarks import _ranks, _report
from benchmarks.pipeline_schedules import SleepingBlock
from squeezebox.pipeline import Runner
from squeezebox.planner import plan_on_devices
from squeezebox.schedules import PUBLISHED, Costs, make, simulate
from squeezebox.schema import (
    Block,
    Device,
    DeviceLink,
    Devices,
    Holding,
    InputForm,
    PipelinePlan,
    PipelineProfile,
)

GOAL = 0.25  # shorter than by an equal split
_INPUTS = (InputForm(shape=(4,), dtype="float32"),)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--schedules", nargs="*", default=["gpipe", "1f1b", "zb-h1", "2bw"])
    parser.add_argument("--blocks", type=int, default=12)
    parser.add_argument("--forward", type=float, default=0.025, help="seconds of the mean block at speed 1")
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=1)
    arguments = parser.parse_args()
    draw = random.Random(0)
    weights = [draw.uniform(0.5, 1.5) for _ in range(arguments.blocks)]
    seconds = [arguments.forward * each * len(weights) / sum(weights) for each in weights]
    rows = []
    for schedule in arguments.schedules:
        for speeds in ((1.0, 2.0, 4.0), (4.0, 1.0, 2.0)):
            rows.append(row(schedule, speeds, seconds, arguments))
            print(rows[-1], file=sys.stderr, flush=True)
    payload = {"settings": vars(arguments), "seconds": seconds, "rows": rows, "goal": GOAL}
    for path in _report.write("pipeline_devices", payload, table(rows)):
        print(path)


def row(
    schedule: str, speeds: Sequence[float], seconds: Sequence[float], arguments: argparse.Namespace
) -> dict[str, Any]:
    """Both splits, simulated and measured."""
    equal = _ranks.plan(len(seconds), len(speeds), schedule, arguments.microbatches, inputs=_INPUTS)
    plans = {"equal": equal, "planned": planned(schedule, speeds, seconds, arguments.microbatches)}
    times: dict[str, list[float]] = {name: [] for name in plans}
    for _ in range(arguments.rounds):
        for name, plan in plans.items():
            found = _ranks.run(rank, plan.ranks, plan, speeds, seconds, arguments.steps)
            times[name] += [max(each) for each in zip(*found, strict=True)]
    measured = {name: statistics.median(each) for name, each in times.items()}
    expected = {name: simulated(plan, speeds, seconds) for name, plan in plans.items()}
    return {
        "schedule": schedule,
        "speeds": speeds,
        "order": plans["planned"].processes,
        "ends": [stage.end for stage in plans["planned"].stages],
        "measured": measured,
        "spread": {name: (min(each), max(each)) for name, each in times.items()},
        "simulated": expected,
        "shorter": 1.0 - measured["planned"] / measured["equal"],
        "error": measured["planned"] / expected["planned"] - 1.0,
    }


def planned(
    schedule: str, speeds: Sequence[float], seconds: Sequence[float], microbatches: int
) -> PipelinePlan:
    names = [f"speed {speed:g}" for speed in speeds]
    devices = Devices(
        devices=tuple(
            Device(name=name, memory_bytes=2**30, speed=speed)
            for name, speed in zip(names, speeds, strict=True)
        ),
        links=tuple(
            DeviceLink(between=pair, bytes_per_second=1e12, latency_seconds=0.0)
            for pair in itertools.combinations(names, 2)
        ),
    )
    blocks = tuple(
        Block(
            name=f"block {number}",
            parameter_bytes=4,
            state_bytes=0,
            output_bytes=16,
            holdings=(
                Holding(
                    policy="keep",
                    saved_bytes=16,
                    working_bytes=0,
                    forward_seconds=own,
                    backward_seconds=2 * own,
                ),
            ),
        )
        for number, own in enumerate(seconds)
    )
    (found,) = plan_on_devices(
        [PipelineProfile(microbatch=1, blocks=blocks)],
        batch=microbatches,
        devices=devices,
        speed=1.0,
        schedules=[schedule],
        depths=[len(speeds)],
    )
    return dataclasses.replace(found, inputs=_INPUTS)


def simulated(plan: PipelinePlan, speeds: Sequence[float], seconds: Sequence[float]) -> float:
    """A step's seconds; without a flush, those between the last two of four."""
    processes = plan.processes or range(plan.ranks)
    forward = tuple(
        sum(seconds[stage.first : stage.end]) / speeds[process]
        for stage, process in zip(plan.stages, processes, strict=True)
    )
    costs = Costs(
        forward=forward,
        backward=tuple(2 * each for each in forward),
        input=(0.0, *forward[1:]),  # nobody waits for the first stage's, which comes with its weights'
        weight=(2 * forward[0], *forward[1:]),
    )
    if PUBLISHED[plan.schedule].flushes:
        return simulate(make(plan.schedule, plan.ranks, plan.microbatches), costs).seconds
    ends = [
        simulate(make(plan.schedule, plan.ranks, plan.microbatches, batches=batches), costs).seconds
        for batches in (3, 4)
    ]
    return ends[1] - ends[0]


def rank(
    number: int, plan: PipelinePlan, speeds: Sequence[float], seconds: Sequence[float], steps: int
) -> list[float]:
    """Seconds of each step but the first, on this process's device."""
    model = nn.Sequential(*(SleepingBlock(each / speeds[number], []) for each in seconds))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    runner = Runner(model, plan, optimizer=optimizer, loss_fn=torch.mean, engine="own")
    times = []
    try:
        batch = torch.ones(plan.microbatches, 4)
        for step in range(steps + 1):
            if PUBLISHED[plan.schedule].flushes:
                dist.barrier()
            begun = time.perf_counter()
            runner.step(batch if runner.is_first else None)
            if step:
                times.append(time.perf_counter() - begun)
        runner.drain()
    finally:
        runner.close()
    return times


def table(rows: Sequence[dict[str, Any]]) -> str:
    lines = [
        "| schedule | speeds of processes | order | cuts | equal split, ms | planned, ms | shorter | "
        "planned, over simulated |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for each in rows:
        shown = {
            name: f"{1e3 * each['measured'][name]:.0f} ({1e3 * low:.0f}..{1e3 * high:.0f})"
            for name, (low, high) in each["spread"].items()
        }
        lines.append(
            f"| {each['schedule']} | {':'.join(f'{speed:g}' for speed in each['speeds'])} | "
            f"{', '.join(map(str, each['order']))} | {', '.join(map(str, each['ends'][:-1]))} | "
            f"{shown['equal']} | {shown['planned']} | {each['shorter']:.0%} | {each['error']:+.1%} |"
        )
    least = min(each["shorter"] for each in rows)
    lines += [
        "",
        f"- Shorter than by an equal split: at least {100 * least:.0f} % (goal: {100 * GOAL:.0f} %).",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()

"""Replicas of a pipeline: what each keeps when they share the weights, and stages with replicas of their own.

Goes in: nothing. Comes out: benchmarks/reports/pipeline_replicas-<date>.json and .md.

Shared: Breadth-First over gloo processes, two ranks a pipeline, trains a chain of linear layers with AdamW,
once with whole replicas and once with ``shard=True``. What a rank keeps are its weights, gradients and
optimizer state between two batches: P + P + 2 P, or 1/R of that. What is predicted adds, where replicas
share, twice the largest stage's weights: weights and gradients are whole while the rank works at it, then
gradients and those of other replicas. The peak is of torch's memory events over all batches, with the
weights. Both arms have the same activations and messages in it. VmHWM is the kernel's, from before the model
is made. Gathers and bytes are the runner's own counts, and those of squeezebox.schedules.sharing.

Seconds: both arms are planned by squeezebox.plan_pipeline for the same chain and more rows, and trained in
turn, batch by batch, in the same processes. Where these are more than the cores, they keep each other
waiting, which no plan knows; of two, each has a core. Updates of the weights are in no plan either.

In turn: a slow stage and a fast one that sleep, so they cost no processor. PipeDream's split for the workers
is trained by as many gloo processes. Seconds a microbatch are between the reading rank's steps, the first few
left out: the median of rounds, and the range.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import math
import re
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks import _ranks, _report
from benchmarks.pipeline_schedules import SleepingBlock
from squeezebox.pipeline import Runner, schedule_of
from squeezebox.planner import pipedream_split, with_replicas
from squeezebox.planning import plan_pipeline
from squeezebox.profiling import PeakMeter
from squeezebox.schedules import sharing
from squeezebox.schema import Block, Holding, InputForm, Link, PipelinePlan, PipelineProfile

MIB = 2**20
RANKS = 2
LINK = Link(bytes_per_second=1e9)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--blocks", type=int, default=16)
    parser.add_argument("--microbatches", type=int, default=4)
    parser.add_argument("--batches", type=int, default=4)
    parser.add_argument("--forward", type=float, default=0.02, help="seconds of the fast stage")
    parser.add_argument("--rows", type=int, default=64, help="of a microbatch, where batches are timed")
    parser.add_argument("--steps", type=int, default=12, help="batches of which each is timed")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="a smaller network, one round")
    if "--quick" in sys.argv[1:]:
        parser.set_defaults(width=256, blocks=8, batches=2, rows=8, steps=2, rounds=1)
    arguments = parser.parse_args()
    shared = [row for replicas in (2, 4) for loops in (2, 4) for row in share(replicas, loops, arguments)]
    timed = [seconds(*shape, arguments) for shape in ((1, 2, 2), (1, 2, 4), (2, 2, 2), (2, 2, 4))]
    in_turn = [
        turns(slow, workers, schedule, arguments)
        for slow, workers in ((2.0, 2), (2.0, 3), (3.0, 2), (3.0, 4))
        for schedule in ("pipedream", "2bw")
    ]
    results = {"shared": shared, "seconds": timed, "in turn": in_turn, "settings": vars(arguments)}
    text = "\n\n".join((shared_table(shared), seconds_table(timed), turns_table(in_turn)))
    for path in _report.write("pipeline_replicas", results, text):
        print(path)


def share(replicas: int, loops: int, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for the fullest rank of each arm."""
    form = InputForm(shape=(arguments.width,), dtype="float32")
    even = _ranks.plan(
        arguments.blocks, RANKS, "breadth-first", arguments.microbatches, loops=loops, inputs=(form,)
    )
    plan = dataclasses.replace(even, replicas=replicas)
    rows = []
    for shard in (False, True):
        found = _ranks.run(_trained, RANKS * replicas, plan, shard, arguments)
        rows.append(max(found, key=lambda each: each["peak_bytes"]) | {"replicas": replicas, "loops": loops})
        print(rows[-1], file=sys.stderr, flush=True)
    return rows


def _trained(rank: int, plan: PipelinePlan, shard: bool, arguments: argparse.Namespace) -> dict[str, Any]:
    gc.collect()
    before = _peak_from_here()
    model = chain(arguments)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    runner = Runner(model, plan, optimizer=optimizer, loss_fn=nn.functional.mse_loss, shard=shard)
    weights = runner.weights_bytes
    meter = PeakMeter(torch.device("cpu"))
    meter.start()
    size = plan.microbatch * plan.microbatches
    for _ in range(arguments.batches):
        given = torch.randn(size, arguments.width)
        runner.step(given, given)
    peak = weights + meter.stop(()).total_bytes
    told = runner.sharing()
    hwm = _status("VmHWM") - before
    state = sum(each.nbytes for own in runner.optimizer.state.values() for each in own.values())
    predicted = sum(4 * nbytes for nbytes in stage_bytes(plan, rank % plan.ranks, arguments).values())
    counts = None
    if shard:
        own = stage_bytes(plan, rank % plan.ranks, arguments)
        predicted = predicted // plan.replicas + 2 * max(own.values())
        others = [
            own.get(stage, 0) * (plan.replicas - 1) // plan.replicas for stage in range(len(plan.stages))
        ]
        each = sharing(schedule_of(plan), rank % plan.ranks, others)
        counts = {name: arguments.batches * count for name, count in dataclasses.asdict(each).items()}
    runner.close()
    return {
        "shard": shard,
        "keeps_bytes": 2 * weights + state,
        "predicted_bytes": predicted,
        "peak_bytes": peak,
        "resident_peak_bytes": hwm,
        "counted": None if told is None else dataclasses.asdict(told),
        "on_paper": counts,
    }


def stage_bytes(plan: PipelinePlan, rank: int, arguments: argparse.Namespace) -> dict[int, int]:
    block = 4 * arguments.width * (arguments.width + 1)
    return {
        number: block * (stage.end - stage.first)
        for number, stage in enumerate(plan.stages)
        if rank in plan.ranks_of(number)
    }


def seconds(ranks: int, replicas: int, loops: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """Batches of both arms, in turn, and what was planned for them here."""
    torch.set_num_threads(1)
    given = torch.randn(replicas * arguments.microbatches * arguments.rows, arguments.width)
    model = chain(arguments)
    plans = plan_pipeline(
        model,
        sample=(given, given),
        loss_fn=nn.functional.mse_loss,
        ranks=ranks * replicas,
        memory_bytes=2**40,
        optimizer=torch.optim.AdamW(model.parameters()),
        microbatches=[arguments.rows],
        schedules=["breadth-first", *(["gpipe"] if ranks == 1 else [])],
        policies=["keep"],
        depths=[ranks],
    )
    whole = next(plan for plan in plans if not plan.shard and len(plan.stages) in (1, loops * ranks))
    shared = next(plan for plan in plans if plan.shard and len(plan.stages) == loops * ranks)
    found = _ranks.run(_in_turn, ranks * replicas, [whole, shared], arguments)
    arms = [[max(batch) for batch in zip(*(rank[arm] for rank in found), strict=True)] for arm in (0, 1)]
    row = {
        "ranks": ranks,
        "replicas": replicas,
        "loops": loops,
        "seconds": [sorted(arm) for arm in arms],
        "planned_seconds": [whole.seconds, shared.seconds],
        "planned_peak_bytes": [max(whole.rank_peak_bytes), max(shared.rank_peak_bytes)],
        "ratios": sorted(one / other for other, one in zip(*arms, strict=True)),
    }
    print(row, file=sys.stderr, flush=True)
    return row


def _in_turn(rank: int, plans: list[PipelinePlan], arguments: argparse.Namespace) -> list[list[float]]:
    """Seconds of each plan's batches, the first few left out."""
    runners = []
    for plan in plans:
        model = chain(arguments)
        optimizer = torch.optim.AdamW(model.parameters())
        runners.append(Runner(model, plan, optimizer=optimizer, loss_fn=nn.functional.mse_loss))
    given = torch.randn(arguments.microbatches * arguments.rows, arguments.width)
    times: list[list[float]] = [[], []]
    for batch in range(2 + arguments.steps):
        for arm in (0, 1) if batch % 2 else (1, 0):
            torch.distributed.barrier()
            begun = time.perf_counter()
            runners[arm].step(given, given)
            runners[arm].drain()
            times[arm] += [time.perf_counter() - begun] if batch > 1 else []
    for runner in runners:
        runner.close()
    return times


def chain(arguments: argparse.Namespace) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(arguments.width, arguments.width) for _ in range(arguments.blocks)))


def turns(slow: float, workers: int, schedule: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """PipeDream's split of a slow and a fast stage, as planned and as trained."""
    seconds = slow * arguments.forward, arguments.forward
    blocks = tuple(_block(str(number), each) for number, each in enumerate(seconds))
    split = pipedream_split(blocks, workers, LINK)
    profile = PipelineProfile(microbatch=1, blocks=blocks)
    microbatches = 12 if schedule == "2bw" else math.lcm(*(stage.replicas for stage in split.stages))
    plan = with_replicas(profile, split.stages, schedule, microbatches, LINK)
    plan = dataclasses.replace(plan, inputs=(InputForm(shape=(1,), dtype="float32"),))
    found = [
        _ranks.run(_slept, workers, plan, seconds, 24 // microbatches + 4)[0] for _ in range(arguments.rounds)
    ]
    row = {
        "slow": slow,
        "workers": workers,
        "schedule": schedule,
        "replicas": [stage.replicas for stage in split.stages],
        "planned_seconds": plan.seconds / microbatches,
        "seconds": sorted(each / microbatches for each in found),
    }
    print(row, file=sys.stderr, flush=True)
    return row


def _slept(rank: int, plan: PipelinePlan, seconds: tuple[float, ...], batches: int) -> float:
    """Seconds from batch to batch, where it goes round."""
    model = nn.Sequential(*(SleepingBlock(each, []) for each in seconds))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    runner = Runner(model, plan, optimizer=optimizer, loss_fn=nn.functional.mse_loss)
    given, ends = torch.ones(plan.microbatches, 1), []
    for _ in range(batches):
        runner.step(given, given)
        ends.append(time.perf_counter())
    runner.drain()
    runner.close()
    return (ends[-1] - ends[2]) / (len(ends) - 3)


def _block(name: str, seconds: float) -> Block:
    holding = Holding(
        policy="keep", saved_bytes=4, working_bytes=4, forward_seconds=seconds, backward_seconds=2 * seconds
    )
    # The fast stage has so many weights that nobody would have replicas of it.
    heavy = 10**9 if name == "1" else 4
    return Block(name=name, parameter_bytes=heavy, state_bytes=0, output_bytes=4, holdings=(holding,))


def _peak_from_here() -> int:
    """Bytes that are resident now, from where the kernel is to take the peak."""
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def _status(name: str) -> int:
    found = re.search(rf"{name}:\s+(\d+)", Path("/proc/self/status").read_text())
    assert found is not None
    return 1024 * int(found[1])


def shared_table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| replicas | stages a rank | arm | keeps MiB | peak MiB | less than whole MiB | predicted MiB "
        "| VmHWM MiB | gathers, on paper | MiB gathered, on paper | scatters, on paper "
        "| MiB scattered, on paper |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    whole = rows[0]
    for row in rows:
        whole = whole if row["shard"] else row
        counts = ["", "", "", ""]
        if row["shard"]:
            counts = [
                f"{_number(row['counted'][name], name)}, {_number(row['on_paper'][name], name)}"
                for name in ("gathers", "gathered_bytes", "reductions", "reduced_bytes")
            ]
        less = [
            f"{(whole[name] - row[name]) / MIB:.1f}" if row["shard"] else ""
            for name in ("peak_bytes", "predicted_bytes")
        ]
        cells = [
            str(row["replicas"]),
            str(row["loops"]),
            "shared" if row["shard"] else "whole",
            f"{row['keeps_bytes'] / MIB:.1f}",
            f"{row['peak_bytes'] / MIB:.1f}",
            *less,
            f"{row['resident_peak_bytes'] / MIB:.0f}",
            *counts,
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def seconds_table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| ranks of a pipeline | replicas | stages a rank | whole ms, median (least..most) | planned "
        "| shared ms | planned | shared over whole | planned | planned MiB, whole and shared |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        cells = [str(row[name]) for name in ("ranks", "replicas", "loops")]
        for times, planned in zip(row["seconds"], row["planned_seconds"], strict=True):
            cells += [_spread([1e3 * each for each in times], ".0f"), f"{1e3 * planned:.0f}"]
        whole, shared = row["planned_seconds"]
        cells += [_spread(row["ratios"], ".2f"), f"{shared / whole:.2f}"]
        cells += [", ".join(f"{nbytes / MIB:.1f}" for nbytes in row["planned_peak_bytes"])]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _spread(values: list[float], form: str) -> str:
    return f"{statistics.median(values):{form}} ({values[0]:{form}}..{values[-1]:{form}})"


def _number(value: int, name: str) -> str:
    return f"{value / MIB:.2f}" if name.endswith("bytes") else str(value)


def turns_table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| slow stage | ranks | replicas of stages | schedule | planned ms a microbatch "
        "| measured, median (least..most) | over planned |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        seconds, planned = row["seconds"], row["planned_seconds"]
        median = statistics.median(seconds)
        spread = f"{1e3 * median:.1f} ({1e3 * seconds[0]:.1f}..{1e3 * seconds[-1]:.1f})"
        lines.append(
            f"| {row['slow']:.0f} x | {row['workers']} | {'-'.join(map(str, row['replicas']))} "
            f"| {row['schedule']} | {1e3 * planned:.1f} | {spread} | {median / planned - 1:+.1%} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()

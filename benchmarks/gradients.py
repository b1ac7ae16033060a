"""Gradients between two ranks in fewer bytes: accuracy, step time over links, and the hook's own time.

    python -m benchmarks.gradients accuracy --seeds 10
    python -m benchmarks.gradients links

Real processes over gloo on one machine, a thread each. Each part writes a report of its own:

accuracy: the trainings of benchmarks/_tasks.py, cut short, in two ranks of half a batch each. Every seed
trains each arm from the same weights on the same batches. The question is put as in benchmarks/accuracy.py:
two one-sided t tests on paired differences, arm minus plain; the margin is the deviation of plain over seeds.
The report is written after every training; the next run goes on from the newest one.

links: seconds of a training step over emulated links. All arms take turns in the
same two processes. A step lasts until the later rank has ended it, from when both have begun.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

import squeezebox
from benchmarks import _ranks, _report
from benchmarks._tasks import TASKS, loss_fn
from benchmarks.accuracy import column, vars_of
from squeezebox.reports import LEVEL, equivalence
from squeezebox.schema import Link

RANKS = 2
Row = dict[str, Any]

# --- accuracy ------------------------------------------------------------------------------------------

STEPS: Mapping[str, int] = {"images": 120, "text": 300}
BATCH: Mapping[str, int] = {"images": 96, "text": 8}  # of both ranks
ARMS: Mapping[str, Mapping[str, Any]] = {
    "plain": {"method": "plain"},
    "entropy, 36 times": {"ratio": 36},
    "entropy, 72 times": {"ratio": 72},
    "PowerSGD, rank 1": {"method": "powersgd", "rank": 1},
    "PowerSGD, rank 2": {"method": "powersgd", "rank": 2},
    "PowerSGD, rank 4": {"method": "powersgd", "rank": 4},
}


def accuracy(seeds: int, tasks: Sequence[str]) -> None:
    """All trainings that the newest report does not have."""
    rows = newest_rows()
    known = {(row["task"], row["seed"], row["arm"]) for row in rows}
    every = ((task, seed, arm) for seed in range(seeds) for task in tasks for arm in ARMS)
    squeezebox.compile_kernels()
    _ranks.run(train_all, RANKS, [each for each in every if each not in known], rows)


def newest_rows() -> list[Row]:
    """Of the newest report's trainings of these lengths and arms; none if there is none."""
    for path in sorted(_report.REPORTS.glob("gradients_accuracy-*.json"), reverse=True):
        found = json.loads(path.read_text())["results"]["rows"]
        return [row for row in found if row["arm"] in ARMS and row["steps"] == STEPS.get(row["task"])]
    return []


def train_all(rank: int, wanted: Sequence[tuple[str, int, str]], rows: list[Row]) -> None:
    """One training after the other; the first rank writes."""
    for each in wanted:
        row = train(rank, *each)
        if rank == 0:
            rows.append(row)
            print(", ".join(f"{key} {value}" for key, value in row.items()), flush=True)
            write_accuracy(rows)


def train(rank: int, name: str, seed: int, arm: str) -> Row:
    """One training from its start; what it reached, and what the first rank sent."""
    task, started = TASKS[name], time.perf_counter()
    torch.manual_seed(seed)
    model = task.model()
    ddp = DistributedDataParallel(model)
    squeezed = squeezebox.compress_gradients(ddp, **ARMS[arm], patience=600.0)
    optimizer = task.optimizer(model)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, optimizer.param_groups[0]["lr"], STEPS[name], pct_start=0.05, cycle_momentum=False
    )
    torch.manual_seed(seed)
    for _, (inputs, target) in zip(range(STEPS[name]), task.batches(seed), strict=False):
        optimizer.zero_grad()
        own = slice(rank, BATCH[name], RANKS)
        loss_fn(ddp(inputs[own]), target[own]).backward()
        optimizer.step()
        schedule.step()
    squeezed.close()
    total = squeezed.total
    return {
        "task": name,
        "seed": seed,
        "arm": arm,
        "steps": STEPS[name],
        "result": task.evaluate(model) if rank == 0 else 0.0,
        "plain_bytes": total.plain_bytes,
        "sent_bytes": total.sent_bytes,
        "noise": total.noise,
        "seconds": time.perf_counter() - started,
        "commit": _report.header()["commit"],
    }


def write_accuracy(rows: Sequence[Row]) -> None:
    """The report, of the seeds that have all arms."""
    ordered = sorted(rows, key=lambda row: (row["task"], row["seed"], list(ARMS).index(row["arm"])))
    results = {name: summarised(own) for name in TASKS if len(own := complete(ordered, name)) > len(ARMS)}
    shown = "\n\n".join(accuracy_table(results))
    _report.write("gradients_accuracy", {"tasks": results, "rows": ordered}, shown)


def complete(rows: Sequence[Row], task: str) -> list[Row]:
    """A task's rows of the seeds that have them all."""
    own = [row for row in rows if row["task"] == task]
    counts = [row["seed"] for row in own]
    return [row for row in own if counts.count(row["seed"]) == len(ARMS)]


def summarised(rows: Sequence[Row]) -> dict[str, Any]:
    """What each arm reached and sent, and the test of each against plain."""
    by_arm = {arm: [row for row in rows if row["arm"] == arm] for arm in ARMS}
    plain = column(by_arm["plain"], "result")
    found: dict[str, Any] = {}
    for arm, own in by_arm.items():
        results = column(own, "result")
        sent, whole = (sum(column(own, name)) for name in ("sent_bytes", "plain_bytes"))
        found[arm] = {
            "result": statistics.fmean(results),
            "deviation": statistics.stdev(results),
            "fewer_bytes": whole / sent,
            "noise": statistics.fmean(column(own, "noise")),
        }
        if arm != "plain":
            differences = [a - b for a, b in zip(results, plain, strict=True)]
            found[arm]["test"] = vars_of(equivalence(differences, statistics.stdev(plain)))
    return found


def accuracy_table(results: Mapping[str, Any]) -> Iterator[str]:
    """The Markdown of the report, in paragraphs."""
    for name, arms in results.items():
        task = TASKS[name]
        count = list(arms.values())[1]["test"]["count"]
        yield f"## {task.about}, but {STEPS[name]} steps of batch {BATCH[name]}"
        yield (
            f"{count} seeds, {RANKS} ranks of half a batch each. Results are {task.measure}. Differences are "
            "paired, arm minus plain, with their 90 % interval; the margin is plain's deviation over seeds. "
            "Fewer bytes: what plain sends over what went in the whole training, with first passes, which "
            "go as they are. Noise is owed over wanted, on a rank; PowerSGD's includes how ranks differ."
        )
        lines = [
            "| arm | fewer bytes | result | deviation | difference | interval | margin "
            f"| equivalent (p, level {LEVEL}) | passes a margin of | power | noise |",
            "|---|---|---|---|---|---|---|---|---|---|---|",
            *(accuracy_line(arm, row, task.scale) for arm, row in arms.items()),
        ]
        yield "\n".join(lines)


def accuracy_line(arm: str, row: Mapping[str, Any], scale: float) -> str:
    result, deviation = (f"{scale * row[name]:.4g}" for name in ("result", "deviation"))
    line = f"| {arm} | {row['fewer_bytes']:.1f} | {result} | {deviation} |"
    if "test" not in row:
        return line + " | | | | | | |"
    test = row["test"]
    mean, low, high, margin, least = (
        f"{scale * test[name]:.3g}" for name in ("mean", "low", "high", "margin", "least_margin")
    )
    verdict = "yes" if test["equivalent"] else "not shown"
    return (
        f"{line} {mean} | {low} to {high} | {margin} | {verdict} ({test['p_value']:.3f}) | {least} "
        f"| {100 * test['power']:.0f} % | {row['noise']:.2g} |"
    )


# --- links ---------------------------------------------------------------------------------------------

LINKS = {"100 Mb/s": 1.25e7, "1 Gb/s": 1.25e8, "10 Gb/s": 1.25e9}
SENDERS: Mapping[str, Mapping[str, Any] | None] = {
    "plain": None,
    "fp16 (torch's hook)": None,
    "PowerSGD, rank 1": {"method": "powersgd", "rank": 1},
    "PowerSGD, rank 2": {"method": "powersgd", "rank": 2},
    "PowerSGD, rank 3": {"method": "powersgd", "rank": 3},
    "PowerSGD, rank 4": {"method": "powersgd", "rank": 4},
    "entropy, 36 times": {"ratio": 36},
    "planes, noise 0.1": {"method": "planes", "noise": 0.1},
}


def links(rounds: int) -> None:
    """Every link in turn, and the report."""
    squeezebox.compile_kernels()
    results = {name: slowest(_ranks.run(step_times, RANKS, speed, rounds)) for name, speed in LINKS.items()}
    text = "\n\n".join(link_table(results, rounds))
    print(text)
    _report.write("gradients_links", results, text)


def step_times(rank: int, speed: float, rounds: int) -> dict[str, Row]:
    """Each arm's seconds, and what it sent in its last step."""
    group = squeezebox.gradients.link_group(Link(bytes_per_second=speed), patience=600.0)
    task = TASKS["images"]
    inputs, target = next(task.batches(rank))
    inputs, target = inputs[:32], target[:32]
    arms = {}
    for arm, options in SENDERS.items():
        torch.manual_seed(0)
        ddp = DistributedDataParallel(task.model(), process_group=group)
        if options is not None:
            squeezebox.compress_gradients(ddp, **options, patience=600.0)
        elif arm != "plain":
            ddp.register_comm_hook(group, default_hooks.fp16_compress_hook)
        arms[arm] = ddp, task.optimizer(ddp.module)
    found: dict[str, Row] = {arm: {"seconds": [], "sent_bytes": 0} for arm in arms}
    for number in range(-4, rounds):  # buckets, factors and levels settle first
        for arm, (ddp, optimizer) in arms.items():
            before = group.wire.sent_bytes
            dist.barrier()
            begun = time.perf_counter()
            optimizer.zero_grad()
            loss_fn(ddp(inputs), target).backward()
            optimizer.step()
            if number >= 0:
                found[arm]["seconds"].append(time.perf_counter() - begun)
            found[arm]["sent_bytes"] = group.wire.sent_bytes - before
    return found


def slowest(ranks: Sequence[Mapping[str, Row]]) -> dict[str, Row]:
    """Of every step the later rank's end."""
    pairs = {arm: zip(*(each[arm]["seconds"] for each in ranks), strict=True) for arm in SENDERS}
    return {
        arm: {"seconds": [max(pair) for pair in pairs[arm]], "sent_bytes": ranks[0][arm]["sent_bytes"]}
        for arm in SENDERS
    }


def link_table(results: Mapping[str, Mapping[str, Row]], rounds: int) -> Iterator[str]:
    yield (
        f"ResNet-18 with BatchNorm, its stages a quarter as wide (0.7 M parameters), {RANKS} ranks of 32 "
        f"images, {rounds} rounds. Milliseconds of a step: median (least to most). Times plain: median of "
        "each round's ratio, below 1 is faster. The ranks share two cores with what else runs."
    )
    for link, arms in results.items():
        lines = [
            f"| {link} | bytes a step | ms a step | times plain |",
            "|---|---|---|---|",
            *(link_line(arm, row, arms["plain"]["seconds"]) for arm, row in arms.items()),
        ]
        yield "\n".join(lines)


def link_line(arm: str, row: Row, plain: Sequence[float]) -> str:
    times = [1e3 * each for each in row["seconds"]]
    ratio = statistics.median(a / b for a, b in zip(row["seconds"], plain, strict=True))
    spread = f"{statistics.median(times):.0f} ({min(times):.0f} to {max(times):.0f})"
    return f"| {arm} | {row['sent_bytes']:,} | {spread} | {ratio:.2f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parts = parser.add_subparsers(dest="part", required=True)
    one = parts.add_parser("accuracy")
    one.add_argument("--seeds", type=int, default=10, help="trainings of every arm, at least 2")
    one.add_argument("--tasks", nargs="+", default=list(TASKS), choices=list(TASKS))
    other = parts.add_parser("links")
    other.add_argument("--rounds", type=int, default=11, help="measured steps of each arm on each link")
    arguments = parser.parse_args()
    if arguments.part == "accuracy":
        accuracy(arguments.seeds, arguments.tasks)
    else:
        links(arguments.rounds)


if __name__ == "__main__":
    main()

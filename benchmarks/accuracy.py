"""Does training with noise, and with optimizer state in 8 bits, get as far? An equivalence test over seeds.

Goes in: the trainings of benchmarks/_tasks.py. Comes out: benchmarks/reports/accuracy-<date>.json and .md,
written after every training; a report holds its trainings' rows, and the next run goes on from those of the
newest that are of the same code.

Every seed trains each arm from the same initial weights on the same batches in the same order. The
question is put as two one-sided t tests (Schuirmann 1987) on the paired differences, arm minus plain:
equivalent, at the 5 % level, if the 90 % interval of the mean difference lies within the margin. The margin
is the sample standard deviation (n - 1) of plain's own results over the seeds. Two trainings that
differ anywhere drift apart, so few seeds can fail to show what many would: the report gives the test's power
and the margin that the data would pass.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from typing import Any

import torch

import squeezebox
from benchmarks import _report
from benchmarks._tasks import TASKS, Task, loss_fn
from squeezebox.reports import LEVEL, equivalence
from squeezebox.session import Session

# arm -> (gradient noise, update noise)
ARMS: Mapping[str, tuple[float | None, float | None]] = {
    "plain": (None, None),
    "noise 1e-3": (1e-3, None),
    "noise 1e-2": (1e-2, None),
    "noise 1e-2, 8-bit state": (1e-2, 0.02),
}
Row = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--tasks", nargs="+", default=list(TASKS), choices=list(TASKS))
    parser.add_argument("--seeds", type=int, default=10, help="trainings of every arm, at least 2")
    parser.add_argument("--workers", type=int, default=2, help="trainings at a time, each of one thread")
    arguments = parser.parse_args()
    if arguments.seeds < 2:
        parser.error("--seeds must be at least 2: one training has no spread")
    rows = _report.newest_rows("accuracy")
    known = {(row["task"], row["seed"], row["arm"]) for row in rows}
    wanted = [
        (task, seed, arm)
        for seed in range(arguments.seeds)
        for task in arguments.tasks
        for arm in ARMS
        if (task, seed, arm) not in known
    ]
    squeezebox.compile_kernels()  # until then a training would be exact
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(arguments.workers, context, torch.set_num_threads, (1,)) as workers:
        running = [workers.submit(train, *each) for each in wanted]
        for done in as_completed(running):
            rows.append(done.result())
            say(", ".join(f"{key} {value}" for key, value in rows[-1].items()))
            write(rows)
    write(rows)


def write(rows: Sequence[Row]) -> None:
    """The report, of the seeds that have all arms."""
    ordered = sorted(rows, key=lambda row: (row["task"], row["seed"], list(ARMS).index(row["arm"])))
    results = {name: summarised(own) for name in TASKS if len(own := complete(ordered, name)) > len(ARMS)}
    shown = "\n\n".join(table(results))
    _report.write("accuracy", {"tasks": results, "rows": ordered}, shown)


def complete(rows: Sequence[Row], task: str) -> list[Row]:
    """A task's rows of the seeds that have them all."""
    own = [row for row in rows if row["task"] == task]
    seeds = {row["seed"] for row in own}
    whole = {seed for seed in seeds if sum(row["seed"] == seed for row in own) == len(ARMS)}
    return [row for row in own if row["seed"] in whole]


# --- training ------------------------------------------------------------------------------------------


def train(name: str, seed: int, arm: str) -> Row:
    """One training from its start; what it reached and what it held."""
    task, started = TASKS[name], time.perf_counter()
    torch.manual_seed(seed)
    model = task.model()
    optimizer = task.optimizer(model)
    schedule = torch.optim.lr_scheduler.OneCycleLR(  # 5 % of the steps to warm up, then a cosine
        optimizer, optimizer.param_groups[0]["lr"], task.steps, pct_start=0.05, cycle_momentum=False
    )
    noise, update_noise = ARMS[arm]
    session = None
    if noise is not None:
        session = squeezebox.attach(model, optimizer=optimizer, noise=noise, update_noise=update_noise)
    torch.manual_seed(seed)
    for inputs, target in task.batches(seed):
        optimizer.zero_grad()
        loss_fn(model(inputs), target).backward()
        optimizer.step()
        schedule.step()
    row: Row = {"task": name, "seed": seed, "arm": arm, "seconds": time.perf_counter() - started}
    if session is not None:
        row |= held(session, task, model)
        session.detach()
    return row | {"result": task.evaluate(model), "commit": _report.header()["commit"]}


def held(session: Session, task: Task, model: torch.nn.Module) -> Row:
    """Bytes of the last step, and noise at the end, of the gradient on one batch."""
    report = session.report()
    inputs, target = next(task.batches(10_001))
    return {
        "saved_bytes": report.saved_bytes,
        "packed_bytes": report.packed_bytes,
        "noise": session.measure_noise(lambda: loss_fn(model(inputs), target).backward()),
        "update_noise": report.update_noise,
    }


# --- report --------------------------------------------------------------------------------------------


def summarised(rows: Sequence[Row]) -> dict[str, Any]:
    """Everything that the report states of one task."""
    by_arm = {arm: [row for row in rows if row["arm"] == arm] for arm in ARMS}
    plain = column(by_arm["plain"], "result")
    tests: dict[str, Any] = {}
    for arm in list(ARMS)[1:]:
        differences = [a - b for a, b in zip(column(by_arm[arm], "result"), plain, strict=True)]
        tests[arm] = vars_of(equivalence(differences, statistics.stdev(plain)))
    return {"arms": {arm: totals(found) for arm, found in by_arm.items()}, "tests": tests}


def vars_of(found: Any) -> dict[str, Any]:
    """A dataclass's fields."""
    return {name: getattr(found, name) for name in found.__dataclass_fields__}


def totals(rows: Sequence[Row]) -> dict[str, float]:
    """Means over the seeds, and the spread of the result."""
    results = column(rows, "result")
    found = {"deviation": statistics.stdev(results), "lowest": min(results), "highest": max(results)}
    names = ("result", "seconds", "saved_bytes", "packed_bytes", "noise", "update_noise")
    return found | {
        name: statistics.fmean(column(rows, name)) for name in names if rows[0].get(name) is not None
    }


def table(results: Mapping[str, Any]) -> Iterator[str]:
    """The Markdown of the report, in paragraphs."""
    for name, found in results.items():
        task = TASKS[name]
        first = next(iter(found["tests"].values()))
        yield f"## {task.about}"
        yield (
            f"{first['count']} seeds. Results are {task.measure}: mean, deviation over seeds, lowest to "
            "highest. Differences are paired, arm minus plain, with their 90 % interval; the margin is "
            "plain's deviation."
        )
        lines = [
            "| arm | result | deviation | lowest to highest | saved bytes held | gradient noise "
            "| update noise |",
            "|---|---|---|---|---|---|---|",
            *(arm_line(arm, row, task.scale) for arm, row in found["arms"].items()),
        ]
        yield "\n".join(lines)
        lines = [
            f"| arm | difference | interval | margin | equivalent (p, level {LEVEL}) | passes a margin of "
            "| power |",
            "|---|---|---|---|---|---|---|",
            *(test_line(arm, test, task.scale) for arm, test in found["tests"].items()),
        ]
        yield "\n".join(lines)


def arm_line(arm: str, row: Mapping[str, float], scale: float) -> str:
    result, deviation, lowest, highest = (
        f"{scale * row[name]:.4g}" for name in ("result", "deviation", "lowest", "highest")
    )
    share = f"1/{row['saved_bytes'] / row['packed_bytes']:.1f}" if "saved_bytes" in row else ""
    noises = [f"{row[name]:.1e}" if name in row else "" for name in ("noise", "update_noise")]
    return f"| {arm} | {result} | {deviation} | {lowest} to {highest} | {share} | {' | '.join(noises)} |"


def test_line(arm: str, test: Mapping[str, Any], scale: float) -> str:
    mean, low, high, margin, least = (
        f"{scale * test[name]:.3g}" for name in ("mean", "low", "high", "margin", "least_margin")
    )
    verdict = "yes" if test["equivalent"] else "not shown"
    return (
        f"| {arm} | {mean} | {low} to {high} | {margin} | {verdict} ({test['p_value']:.3f}) | {least} "
        f"| {100 * test['power']:.0f} % |"
    )


def column(rows: Sequence[Row], name: str) -> list[float]:
    """One figure of all rows."""
    return [row[name] for row in rows]


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()

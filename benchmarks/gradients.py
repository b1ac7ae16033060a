"""Gradients between two ranks in fewer bytes: accuracy, step time over links, and the hook's own time.

    python -m benchmarks.gradients accuracy --seeds 10
    python -m benchmarks.gradients links
    python -m benchmarks.gradients own

Real processes over gloo on one machine, a thread each. Each part writes a report of its own:

accuracy: the trainings of benchmarks/_tasks.py, cut short, in two ranks of half a batch each. Every seed
trains each arm from the same weights on the same batches. The question is put as in benchmarks/accuracy.py:
two one-sided t tests on paired differences, arm minus plain; the margin is the deviation of plain over seeds.
The report is written after every training; the next run goes on from the newest one.

links: seconds of a training step over emulated links, as ``squeezebox gradients measure`` takes them. All
arms take turns in the same two processes, of two steps each; the second one counts. A step lasts until the
later rank has ended it, from when both have begun. What is measured goes into the report of the day, so links
may be measured one at a time.

own: processor time of the exchange itself, and of its parts.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import squeezebox
from benchmarks import _ranks, _report, models
from benchmarks._tasks import TASKS, loss_fn
from benchmarks.accuracy import column, vars_of
from squeezebox.gradients import ExchangedStep, measure_exchange
from squeezebox.gradients._coders import CODERS
from squeezebox.gradients._wanted import Wanted
from squeezebox.reports import LEVEL, ExchangeArm, ExchangeWay, MeasuredExchange, equivalence
from squeezebox.schema import Link

RANKS = 2
Row = dict[str, Any]

# --- accuracy ------------------------------------------------------------------------------------------

STEPS: Mapping[str, int] = {"images": 120, "text": 300}
BATCH: Mapping[str, int] = {"images": 96, "text": 8}  # of both ranks
ARMS: Mapping[str, Mapping[str, Any]] = {
    "plain": {"method": "plain"},
    "entropy, 48 times": {"ratio": 48},
    "entropy, 72 times": {"ratio": 72},
    "PowerSGD, rank 1": {"method": "powersgd", "rank": 1},
    "PowerSGD, rank 2": {"method": "powersgd", "rank": 2},
    "PowerSGD, rank 4": {"method": "powersgd", "rank": 4},
}


def accuracy(seeds: int, tasks: Sequence[str]) -> None:
    """All trainings that the newest report does not have."""
    rows = _report.newest_rows("gradients_accuracy")
    known = {(row["task"], row["seed"], row["arm"]) for row in rows}
    every = ((task, seed, arm) for seed in range(seeds) for task in tasks for arm in ARMS)
    squeezebox.compile_kernels()
    _ranks.run(train_all, RANKS, [each for each in every if each not in known], rows)


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
LATENCY = 1e-4
NOISE = 0.1
NETWORKS: Mapping[str, tuple[Sequence[int], int]] = {  # widths of stages, images of a rank
    "small": ((16, 32, 64, 128), 32),
    "large": ((64, 128, 256, 512), 8),
}
ABOUT = {"small": "0.7 M parameters, 32 images a rank", "large": "11 M parameters, 8 images a rank"}


def links(networks: Sequence[str], names: Sequence[str], rounds: int) -> None:
    """These networks over these links, into today's report."""
    squeezebox.compile_kernels()
    results: dict[str, Any] = dict(_report.today("gradients_links"))
    for network, link in itertools.product(networks, names):
        found = _ranks.run(step_times, RANKS, network, LINKS[link], rounds)[0]
        print(f"{network}, {link}\n{found}\n", flush=True)
        results.setdefault(network, {})[link] = found.to_dict()
        results = {name: in_order(results[name], LINKS) for name in in_order(results, NETWORKS)}
        _report.write("gradients_links", results, "\n\n".join(link_tables(results)))


def in_order(found: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    return {name: found[name] for name in names if name in found}


def step_times(rank: int, network: str, speed: float, rounds: int) -> MeasuredExchange:
    """What ``squeezebox gradients measure`` measures."""
    widths, images = NETWORKS[network]
    task = TASKS["images"]
    inputs, target = next(task.batches(rank))
    torch.manual_seed(0)
    step = ExchangedStep(
        model=models.build("resnet18", num_classes=10, widths=widths),
        inputs=inputs[:images],
        target=target[:images],
        loss_fn=loss_fn,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9),
    )
    link = Link(bytes_per_second=speed, latency_seconds=LATENCY)
    return measure_exchange(step, noise=NOISE, rounds=rounds, link=link)


def link_tables(results: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    yield (
        f"ResNet-18 with BatchNorm on Fashion-MNIST, {RANKS} ranks; in a round all exchanges "
        f"take turns. Links are emulated, with {1e3 * LATENCY:g} ms a collective. planes, entropy and auto "
        f"keep to a noise of {NOISE}. Milliseconds of the slower rank: median (least to most). Times plain: "
        "median of each round's ratio, below 1 is faster. To send: from forward's end until all gradients "
        "are there; planned from what auto measured. The ranks share two cores with what else runs."
    )
    for network, by_link in results.items():
        yield f"## {network}: {ABOUT[network]}"
        for link, found in by_link.items():
            yield link_table(link, MeasuredExchange(**typed(found)))


def typed(found: Mapping[str, Any]) -> dict[str, Any]:
    """A result's fields from those of its JSON."""
    rows = {"arms": ExchangeArm, "ways": ExchangeWay}
    return {**found, **{name: tuple(kind(**row) for row in found[name]) for name, kind in rows.items()}}


def link_table(link: str, found: MeasuredExchange) -> str:
    arms = {arm.name: arm for arm in found.arms}
    rounds = len(arms["plain"].step_seconds)
    best = min(
        (arms[name] for name in ("plain", "fp16")), key=lambda arm: statistics.median(arm.step_seconds)
    )
    auto = arms["auto"]
    groups = ", ".join(f"{count} {method}" for method, count in found.groups)
    lines = [
        f"| {link} | bytes a step | ms a step | times plain | ms to send | planned | over measured | noise |",
        "|---|---|---|---|---|---|---|---|",
        *(link_line(arm, arms["plain"]) for arm in found.arms),
        "",
        f"{rounds} rounds. A step without exchange takes {1e3 * found.alone_seconds:.0f} ms. auto takes "
        f"{auto.times(best):.2f} times the faster one of plain and fp16, {best.name}. Its groups: {groups}.",
    ]
    return "\n".join(lines)


def link_line(arm: ExchangeArm, plain: ExchangeArm) -> str:
    times = [1e3 * each for each in arm.step_seconds]
    spread = f"{statistics.median(times):.0f} ({min(times):.0f} to {max(times):.0f})"
    sent = statistics.median(arm.exchange_seconds)
    planned = arm.planned_seconds
    shown = " | " if planned is None else f"{1e3 * planned:.0f} | {planned / sent:.2f}"
    return (
        f"| {arm.name} | {arm.sent_bytes:,} | {spread} | {arm.times(plain):.2f} | {1e3 * sent:.0f} | {shown} "
        f"| {arm.noise:.2g} |"
    )


# --- own time ------------------------------------------------------------------------------------------

ELEMENTS = (1 << 16, 1 << 20, 25 << 18)  # the last is DDP's usual bucket, of 25 MiB
PARAMETERS = 16
TARGET = 0.5  # nanoseconds an element
WAYS: Mapping[str, Mapping[str, Any]] = {
    "plain": {"method": "plain"},
    "fp16": {"method": "fp16"},
    "planes, noise 0.1": {"method": "planes", "noise": NOISE},
    "entropy, noise 0.1": {"method": "entropy", "noise": NOISE},
}
MOVED = 16.0  # bytes an element: gradient and what is owed are read, what is owed and the mean are written


def own(rounds: int) -> None:
    """The hook's own time, its parts, and a floor."""
    squeezebox.compile_kernels()
    whole = _ranks.run(hook_times, RANKS, rounds)[0]
    parts = {count: part_times(count, rounds) for count in ELEMENTS}
    results = {"whole": whole, "parts": parts}
    text = "\n\n".join(own_tables(whole, parts, rounds))
    print(text)
    _report.write("gradients_own", results, text)


def hook_times(rank: int, rounds: int) -> dict[str, dict[int, float]]:
    """Processor nanoseconds an element of a backward with the exchange, less those of one without."""
    found: dict[str, dict[int, float]] = {}
    for way, options in WAYS.items():
        found[way] = {}
        for count in ELEMENTS:
            torch.manual_seed(rank)
            layer = Scaled(count)
            ddp = DistributedDataParallel(layer, bucket_cap_mb=1 << 10, gradient_as_bucket_view=True)
            squeezed = squeezebox.compress_gradients(ddp, **options, patience=600.0)
            taken = {syncs: [backward_time(ddp, syncs) for _ in range(rounds + 5)] for syncs in (True, False)}
            squeezed.close()
            synced, alone = (statistics.median(each[5:]) for each in (taken[True], taken[False]))
            found[way][count] = 1e9 * (synced - alone) / count
    return found


class Scaled(torch.nn.Module):
    """Parameters whose gradients are random and cost little."""

    def __init__(self, count: int) -> None:
        super().__init__()
        sizes = [count // PARAMETERS] * PARAMETERS
        self.weights = torch.nn.ParameterList(torch.nn.Parameter(torch.zeros(size)) for size in sizes)
        self.data = [torch.randn(size) for size in sizes]

    def forward(self, scale: float) -> torch.Tensor:
        pairs = zip(self.weights, self.data, strict=True)
        return scale * torch.stack([(weight * each).sum() for weight, each in pairs]).sum()


def backward_time(ddp: DistributedDataParallel, syncs: bool) -> float:
    ddp.zero_grad(set_to_none=False)
    with contextlib.nullcontext() if syncs else ddp.no_sync():
        loss = ddp(1.0)
        dist.barrier()
        begun = time.process_time()
        loss.backward()
        return time.process_time() - begun


def part_times(count: int, rounds: int) -> dict[str, float]:
    """Nanoseconds an element of what a message of planes takes on one thread, and of a copy."""
    torch.set_num_threads(1)
    coder, sizes = CODERS["planes"], [count // PARAMETERS] * PARAMETERS
    gradient, owed, other = (torch.randn(count) for _ in range(3))
    level = coder.start(NOISE, None)
    message = coder.encode(Wanted(gradient, owed, sizes), level, 0)
    calls = {
        "add what is owed, its norms, pack": lambda: coder.encode(Wanted(gradient, owed, sizes), level, 0),
        "unpack, of each rank": lambda: sum(
            piece.numel() for piece in coder.decode(message, sizes, other.dtype)
        ),
        "sum, difference, its norm and mean": lambda: (
            other.add_(owed),
            other.sub_(owed),
            other.norm(),
            other.mul_(0.5),
        ),
        "hand over what is owed and the mean": lambda: (other.copy_(owed), other.copy_(gradient)),
        "a copy": lambda: other.copy_(gradient),
    }
    return {name: 1e9 * processor_time(call, rounds) / count for name, call in calls.items()}


def processor_time(call: Callable[[], object], rounds: int) -> float:
    found = []
    for _ in range(rounds + 1):
        begun = time.process_time()
        call()
        found.append(time.process_time() - begun)
    return statistics.median(found[1:])


def own_tables(
    whole: Mapping[str, Mapping[int, float]], parts: Mapping[int, Mapping[str, float]], rounds: int
) -> Iterator[str]:
    yield (
        f"Processor time of a rank's backward with the exchange of {PARAMETERS} parameters over gloo, less "
        f"that of one without, over elements; {RANKS} ranks, median of {rounds} rounds. gloo's copies and "
        f"sums are in it. The target is {TARGET} ns an element with planes."
    )
    head = f"| ns an element | {' | '.join(f'{count:,} elements' for count in ELEMENTS)} |"
    rule = "|---" * (1 + len(ELEMENTS)) + "|"
    yield "\n".join([head, rule, *(own_line(way, [row[n] for n in ELEMENTS]) for way, row in whole.items())])
    yield (
        "What planes does for a group, on one thread. The floor is the time of a copy for what any hook with "
        f"feedback must move: {MOVED:g} bytes an element, where a copy moves 8."
    )
    names = [name for name in parts[ELEMENTS[0]] if name != "a copy"]
    lines = [own_line(name, [parts[count][name] for count in ELEMENTS]) for name in names]
    floor = own_line("floor", [parts[count]["a copy"] * MOVED / 8.0 for count in ELEMENTS])
    yield "\n".join([head, rule, *lines, floor])


def own_line(name: str, values: Sequence[float]) -> str:
    return f"| {name} | {' | '.join(f'{each:.2f}' for each in values)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parts = parser.add_subparsers(dest="part", required=True)
    one = parts.add_parser("accuracy")
    one.add_argument("--seeds", type=int, default=10, help="trainings of every arm, at least 2")
    one.add_argument("--tasks", nargs="+", default=list(TASKS), choices=list(TASKS))
    other = parts.add_parser("links")
    other.add_argument("--networks", nargs="+", default=list(NETWORKS), choices=list(NETWORKS))
    other.add_argument("--links", nargs="+", default=list(LINKS), choices=list(LINKS))
    other.add_argument("--rounds", type=int, default=11, help="measured steps of each arm on each link")
    last = parts.add_parser("own")
    last.add_argument("--rounds", type=int, default=21, help="measured backwards of each way")
    arguments = parser.parse_args()
    if arguments.part == "accuracy":
        accuracy(arguments.seeds, arguments.tasks)
    elif arguments.part == "links":
        links(arguments.networks, arguments.links, arguments.rounds)
    else:
        own(arguments.rounds)


if __name__ == "__main__":
    main()

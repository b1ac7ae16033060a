"""What every rank of a pipeline holds at its peak, foretold and measured.

Goes in: nothing; characters of Python's standard library. Comes out:
benchmarks/reports/pipeline_memory-<date>.json and .md.

A small GPT's blocks are measured in one process by squeezebox.plan_pipeline; each plan is then trained by
real gloo processes, of which each sums up its own allocations over the first batches, drained at the end, by
torch's memory events. To these the weights are added, which were there before. 2BW is set against 1F1B with
the same stages: it should hold one more version of the weights, one more gradient and nothing else.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from itertools import islice
from typing import Any

import torch

from benchmarks import _ranks, _report, models, text
from benchmarks.training import classification_loss
from squeezebox import schedules
from squeezebox.pipeline import Runner
from squeezebox.planning import attach_stages, plan_pipeline
from squeezebox.profiling import PeakMeter
from squeezebox.schema import Link, PipelinePlan

LINK = Link(bytes_per_second=1e9)  # no matter for bytes
ARMS = (
    ("gpipe", "keep"),
    ("1f1b", "keep"),
    ("1f1b", "recompute"),
    ("1f1b", "compress"),
    ("interleaved-1f1b", "keep"),
    ("zb-h1", "keep"),
    ("zb-h1", "recompute"),
    ("2bw", "keep"),
    ("2bw", "compress"),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--ranks", nargs="*", type=int, default=[2, 4])
    parser.add_argument("--width", type=int, default=192)
    parser.add_argument("--depth", type=int, default=6)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--microbatch", type=int, default=4)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--noise", type=float, default=1e-2)
    parser.add_argument("--batches", type=int, default=8, help="in which memory is summed up")
    parser.add_argument("--quick", action="store_true", help="two ranks, a smaller network")
    if "--quick" in sys.argv[1:]:
        parser.set_defaults(ranks=[2], width=64, depth=2, length=32)
    arguments = parser.parse_args()
    rows, extra = [], []
    for ranks in arguments.ranks:
        for schedule, policy in ARMS:
            rows += measure(schedule, policy, ranks, arguments)
            print(*rows[-ranks:], sep="\n", file=sys.stderr, flush=True)
        extra += extras(ranks, arguments)
    results = {"rows": rows, "extra": extra, "settings": vars(arguments)}
    for path in _report.write("pipeline_memory", results, table(rows) + "\n" + extra_table(results["extra"])):
        print(path)


def planned(schedule: str, policy: str, ranks: int, arguments: argparse.Namespace) -> PipelinePlan:
    model, batch = network(arguments), arguments.microbatch * arguments.microbatches
    return plan_pipeline(
        model,
        sample=next(text.batches(batch, arguments.length, 0)),
        loss_fn=classification_loss,
        ranks=ranks,
        memory_bytes=2**40,
        optimizer=torch.optim.AdamW(model.parameters()),
        microbatches=[arguments.microbatch],
        schedules=[schedule],
        policies=[policy],
        noise=arguments.noise,
        depths=[ranks],
        link=LINK,
    )[0]


def measure(schedule: str, policy: str, ranks: int, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each rank."""
    plan = planned(schedule, policy, ranks, arguments)
    measured = _ranks.run(train, ranks, plan, arguments)
    owners = [*zip(plan.stages, schedules.placement(schedule, ranks, len(plan.stages)), strict=True)]
    return [
        {
            "ranks": ranks,
            "schedule": schedule,
            "policy": policy,
            "rank": rank,
            "stages": [[stage.first, stage.end] for stage, owner in owners if owner == rank],
            "planned_bytes": plan.rank_peak_bytes[rank],
            "measured_bytes": peak,
            "weights_bytes": weights,
        }
        for rank, (peak, weights) in enumerate(measured)
    ]


def train(rank: int, plan: PipelinePlan, arguments: argparse.Namespace) -> tuple[int, int]:
    """This rank's peak, and the bytes of one version of its weights."""
    model = network(arguments)
    runner = Runner(
        model, plan, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3), loss_fn=classification_loss
    )
    weights = runner.weights_bytes
    sessions = attach_stages(runner)
    source = text.batches(plan.microbatch * plan.microbatches, arguments.length, 0)
    meter = PeakMeter(torch.device("cpu"))
    meter.start()
    for batch in islice(source, arguments.batches):
        runner.step(*batch)
    runner.drain()
    peak = meter.stop(()).total_bytes
    for session in sessions:
        session.detach()
    runner.close()
    return weights + peak, weights


def network(arguments: argparse.Namespace) -> torch.nn.Module:
    torch.manual_seed(0)
    return models.build(
        "gpt",
        text.NUM_CHARACTERS,
        width=arguments.width,
        depth=arguments.depth,
        heads=4,
        context=arguments.length,
    )


def extras(ranks: int, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """What 2BW holds over 1F1B on each rank, with the same stages."""
    flushed = planned("1f1b", "keep", ranks, arguments)
    plans = flushed, dataclasses.replace(flushed, schedule="2bw")
    before, after = (_ranks.run(train, ranks, plan, arguments) for plan in plans)
    return [
        {"ranks": ranks, "rank": rank, "extra_bytes": more - less, "weights_bytes": weights}
        for rank, ((less, weights), (more, _)) in enumerate(zip(before, after, strict=True))
    ]


def table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| ranks | schedule | policy | rank | planned MiB | measured MiB | planned over measured |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        ratio = row["planned_bytes"] / row["measured_bytes"] - 1.0
        lines.append(
            f"| {row['ranks']} | {row['schedule']} | {row['policy']} | {row['rank']} "
            f"| {row['planned_bytes'] / 2**20:.2f} | {row['measured_bytes'] / 2**20:.2f} | {ratio:+.1%} |"
        )
    worst = max(abs(row["planned_bytes"] / row["measured_bytes"] - 1.0) for row in rows)
    within = sum(abs(row["planned_bytes"] / row["measured_bytes"] - 1.0) <= 0.05 for row in rows)
    return "\n".join([*lines, "", f"Within 5 %: {within} of {len(rows)}; the worst is off by {worst:.1%}."])


def extra_table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "",
        "2BW over 1F1B with the same stages, in versions of the rank's weights (a version and a gradient "
        "make 2; the last rank reads but one version):",
        "",
        "| ranks | rank | MiB more | in versions |",
        "|---|---|---|---|",
    ]
    for row in rows:
        extra, version = row["extra_bytes"], row["weights_bytes"]
        lines.append(f"| {row['ranks']} | {row['rank']} | {extra / 2**20:.2f} | {extra / version:.2f} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()

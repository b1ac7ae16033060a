"""What passes hand on, as planned, next to recomputing all of it and to keeping all of it in a file.

Goes in: nothing; random pixels. Comes out: benchmarks/reports/streaming_choice-<date>.json and .md.

Networks with batch normalisation in training take steps on a square image. All arms are in one process and
take turns. The arm that recomputes has a planner that never hands on anything.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from typing import Any
from unittest import mock

import torch
from torch import nn

from benchmarks import _report
from benchmarks.streaming_tiles import UNet
from squeezebox.memory import ProcessMeter
from squeezebox.streaming import StreamedStep

_MIB = 1 << 20
_SEARCH = "squeezebox.streaming._choice.Search.cheapest"
ARMS = ("recomputed", "filed", "planned")


def chain() -> nn.Module:
    """Eight convolutions of 16 channels with batch normalisation."""
    layers: list[nn.Module] = []
    for given in (3, *[16] * 7):
        layers += [nn.Conv2d(given, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU()]
    return nn.Sequential(*layers, nn.Conv2d(16, 4, 1))


NETWORKS = {"U-Net": UNet, "chain": chain}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--side", type=int, default=512)
    parser.add_argument("--memory", type=int, nargs="+", default=[16, 48, 96], help="MiB")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    rows = [
        row
        for network in NETWORKS
        for memory in arguments.memory
        for row in compared(network, memory, arguments.side, arguments.repeats)
    ]
    for path in _report.write(
        "streaming_choice", {"side": arguments.side, "rows": rows}, table(rows, arguments)
    ):
        print(path)


def compared(network: str, memory: int, side: int, repeats: int) -> list[dict[str, Any]]:
    """A row of each arm: seconds, those predicted, those of planning, bytes."""
    image, target = torch.rand(1, 3, side, side), torch.randint(4, (1, side, side))
    rows, steps = [], {}
    for arm in ARMS:
        torch.manual_seed(0)
        steps[arm] = step = StreamedStep(
            NETWORKS[network](),
            nn.functional.cross_entropy,
            memory=memory * _MIB,
            spool={"recomputed": False, "filed": True, "planned": None}[arm],
        )
        begun = time.perf_counter()
        if arm == "recomputed":
            with mock.patch(_SEARCH, lambda search: (frozenset(), frozenset())):
                plan = step.plan(image, target)
        else:
            plan = step.plan(image, target)
        rows.append(
            {"network": network, "memory": memory, "arm": arm, "planning": time.perf_counter() - begun}
            | {"predicted": plan.seconds, "kept": plan.kept_bytes, "disk": plan.disk_bytes}
            | {"recomputed": sum(stage.recomputed_bytes for stage in plan.stages)}
        )
    seconds: dict[str, list[float]] = {arm: [] for arm in ARMS}
    grown = dict.fromkeys(ARMS, 0)
    for number in range(repeats + 1):
        for arm, step in steps.items():
            meter = ProcessMeter()
            meter.start()
            begun = time.perf_counter()
            step(image, target)
            if number:
                seconds[arm].append(time.perf_counter() - begun)
                grown[arm] = max(grown[arm], meter.stop() or 0)
    forced = min(statistics.median(seconds[arm]) for arm in ARMS[:2])
    for row in rows:
        each = seconds[row["arm"]]
        row |= {"seconds": statistics.median(each), "least": min(each), "most": max(each)}
        row |= {"ratio": row["seconds"] / forced, "grown": grown[row["arm"]]}
    return rows


def table(rows: Sequence[dict[str, Any]], arguments: argparse.Namespace) -> str:
    """The Markdown of the report."""
    lines = [
        f"An image of {arguments.side} x {arguments.side} pixels, float32, {arguments.threads} thread(s); "
        f"medians of {arguments.repeats} steps that take turns, least to most. The ratio is to the better of "
        "the arms that recompute all and that file all. The process grows by what the system counts.",
        "",
        "| network | memory= in MiB | arm | seconds | ratio | predicted | planning | kept, MiB | filed | "
        "recomputed | grown by |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        sizes = " | ".join(f"{row[name] / _MIB:.0f}" for name in ("kept", "disk", "recomputed", "grown"))
        lines.append(
            f"| {row['network']} | {row['memory']} | {row['arm']} | "
            f"{row['seconds']:.2f} ({row['least']:.2f} to {row['most']:.2f}) | {row['ratio']:.2f} | "
            f"{row['predicted']:.2f} | {row['planning']:.1f} | {sizes} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()

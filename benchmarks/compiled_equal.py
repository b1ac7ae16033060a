"""Compiled steps of no more bytes than torch's own ``activation_memory_budget`` takes, each in turn with it.

Goes in: nothing; the networks and batches of benchmarks.compiled_budget. Comes out:
benchmarks/reports/compiled_equal-<date>.json and .md, written anew after every network.

For every setting with a peak below torch.compile's own, squeezebox.compile gets that peak as its budget. The
two steps run in turns, one first and then the other, for 40 seconds. Times are medians of the ratios of a
turn, with the middle half of these.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from benchmarks import _report, tasks
from benchmarks.compiled_budget import SETTINGS, SIZES, Arm, inductor, layout_of, within

SECONDS = 40.0  # of the two steps in turns
HEADS = "network", "setting", "its peak MiB", "our peak MiB", "turns", "our time / its time", "middle half"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("networks", nargs="*", default=list(SIZES))
    arguments = parser.parse_args()
    torch._dynamo.config.recompile_limit = 64  # every arm is the same code
    results: dict[str, Any] = dict(_report.today("compiled_equal"))
    for name in arguments.networks:
        setup = replace(tasks.SETUPS[name], train_steps=5, layout=layout_of(name), **SIZES[name])
        results[name] = measure(tasks.build(name, setup))
        paths = _report.write("compiled_equal", results, table(results))
        print(*paths, table(results), sep="\n", file=sys.stderr, flush=True)


def measure(task: tasks.Task) -> list[dict[str, Any]]:
    """A row for each setting."""
    torch._dynamo.reset()
    plain_bytes, rows = Arm(task, inductor(1.0)).peak_bytes, []
    for setting in SETTINGS:
        theirs = Arm(task, inductor(setting))
        if theirs.peak_bytes >= plain_bytes:
            continue
        ours = Arm(task, partial(within, task, theirs.peak_bytes, None), theirs.peak_bytes)
        ratios = turns(ours, theirs)
        rows.append(
            {
                "setting": setting,
                "their_bytes": theirs.peak_bytes,
                "our_bytes": ours.peak_bytes,
                "ratios": ratios,
            }
        )
    return rows


def turns(ours: Arm, theirs: Arm) -> list[float]:
    """Our time over theirs, of each turn."""
    found, end = list[float](), time.perf_counter() + SECONDS
    for arm in (ours, theirs) * 3:
        arm.run()
    while time.perf_counter() < end:
        seconds = dict[Arm, float]()
        for arm in (ours, theirs) if len(found) % 2 else (theirs, ours):
            begun = time.perf_counter()
            arm.run()
            seconds[arm] = time.perf_counter() - begun
        found.append(seconds[ours] / seconds[theirs])
    return found


def table(results: dict[str, Any]) -> str:
    """The Markdown table of the report."""
    lines = [f"| {' | '.join(HEADS)} |", "|---" * len(HEADS) + "|"]
    for name, rows in results.items():
        for row in rows:
            least, middle, most = statistics.quantiles(row["ratios"], n=4)
            lines.append(
                f"| {name} | {row['setting']} | {row['their_bytes'] / 2**20:.2f} "
                f"| {row['our_bytes'] / 2**20:.2f} | {len(row['ratios'])} "
                f"| {middle:.3f} | {least:.2f}..{most:.2f} |"
            )
    return "\n".join(lines)


if __name__ == "__main__":
    main()

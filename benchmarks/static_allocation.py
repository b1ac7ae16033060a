"""How low an arena can be: hard instances, steps of networks, and two streams that must not race.

Goes in: MiniMalloc's instances (benchmarks/minimalloc), and benchmark networks on fake tensors. Comes out:
benchmarks/reports/static_allocation-<date>.json and .md.

Heights are over the lower bound, the most bytes that live at once. Every layout is verified pair by pair.
With --rival, omnimalloc's supermalloc (of the extra `bench`) gets the same seconds for each hard instance.
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import _offload_streams, _report
from benchmarks._step_trace import deep_gpt, trace
from squeezebox import memory
from squeezebox.schema import Buffer

INSTANCES = Path(__file__).parent / "minimalloc"
GPT = {"num_classes": 256, "width": 192, "depth": 6, "heads": 4, "context": 128}
NETWORKS: dict[str, dict[str, int]] = {
    "alexnet": {},
    "vgg16": {},
    "resnet50": {},
    "efficientnet_b0": {},
    "unet": {},
    "gpt": GPT,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0, help="of the search, for each instance")
    parser.add_argument("--rival", action="store_true", help="omnimalloc too")
    parser.add_argument("--tensors", type=int, default=10_000, help="of the step whose planning is timed")
    parser.add_argument("--runs", type=int, default=200, help="random timings of the two streams")
    arguments = parser.parse_args()
    memory.layout(memory.read_buffers(INSTANCES / "C.csv"), seconds=5.0)  # compile first
    results: dict[str, Any] = {
        "networks": [network(name, sizes) for name, sizes in NETWORKS.items()],
        "planning": planning(arguments.tensors),
        "offload": _offload_streams.compare(trace("resnet50"), arguments.runs),
        "instances": [
            instance(path, arguments.seconds, arguments.rival) for path in sorted(INSTANCES.glob("*.csv"))
        ],
        "settings": vars(arguments),
    }
    for path in _report.write("static_allocation", results, tables(results)):
        print(path)


def instance(path: Path, seconds: float, rival: bool) -> dict[str, Any]:
    buffers = memory.read_buffers(path)
    row: dict[str, Any] = {"name": path.stem, "buffers": len(buffers)}
    for packer in (memory.somas, memory.search):
        begun = time.perf_counter()
        made = memory.layout(buffers, packer=packer, seconds=seconds, alignment=1)
        row[f"{made.packer}_seconds"] = time.perf_counter() - begun
        row[f"{made.packer}_ratio"] = made.nbytes / made.lower_bound_bytes
    if rival:
        row["supermalloc_ratio"] = supermalloc(buffers, seconds)
    print(row, flush=True)
    return row


def supermalloc(buffers: Sequence[Buffer], seconds: float) -> float:
    from omnimalloc.allocators.supermalloc import SupermallocAllocator
    from omnimalloc.primitives import Allocation

    rows = tuple(Allocation(id=b.name, size=b.nbytes, start=b.lower, end=b.upper) for b in buffers)
    result = SupermallocAllocator(timeout=seconds).solve(rows)
    return float(result.peak / result.lower_bound)


def network(name: str, sizes: dict[str, int]) -> dict[str, Any]:
    """A step's arena with the usual alignment, over what lives at once without any."""
    step = trace(name, **sizes)
    least = memory.layout(step.buffers, alignment=1, packer=memory.somas).lower_bound_bytes
    buffers, conflicts = memory.safe_sharing(step.operators, step.nbytes, kept=step.kept)
    rows = {
        packer.__name__: memory.layout(step.buffers, packer=packer).nbytes / least
        for packer in (memory.somas, memory.search)
    }
    used = memory.layout(buffers, conflicts=conflicts)
    row = {
        "name": name,
        "tensors": len(step.buffers),
        "operators": len(step.operators),
        "least_bytes": least,
        "total_bytes": sum(each.nbytes for each in step.buffers),
        "somas_ratio": rows["somas"],
        "search_ratio": rows["search"],
        "by_use_ratio": used.nbytes / least,
    }
    print(row, flush=True)
    return row


def planning(tensors: int) -> dict[str, Any]:
    """Seconds from a step's operators to verified offsets, by what is used when."""
    step = deep_gpt(tensors)
    sharing, placing, made = [], [], None
    for _ in range(3):
        begun = time.perf_counter()
        buffers, conflicts = memory.safe_sharing(step.operators, step.nbytes, kept=step.kept)
        sharing.append(time.perf_counter() - begun)
        made = memory.layout(buffers, conflicts=conflicts)
        placing.append(time.perf_counter() - begun - sharing[-1])
    assert made is not None
    row = {
        "tensors": len(step.buffers),
        "operators": len(step.operators),
        "sharing_seconds": dataclasses.asdict(spread(sharing)),
        "layout_seconds": dataclasses.asdict(spread(placing)),
        "ratio": made.nbytes / made.lower_bound_bytes,
    }
    print(row, flush=True)
    return row


def spread(values: Sequence[float]) -> _report.Spread:
    return _report.Spread(
        median=float(np.median(values)), minimum=min(values), maximum=max(values), count=len(values)
    )


def tables(results: dict[str, Any]) -> str:
    return "\n\n".join(
        (
            instance_table(results["instances"], results["settings"]["seconds"]),
            network_table(results["networks"]),
            planning_text(results["planning"]),
            _offload_streams.text(results["offload"]),
        )
    )


def instance_table(rows: list[dict[str, Any]], seconds: float) -> str:
    rival = "supermalloc_ratio" in rows[0]
    lines = [
        f"## MiniMalloc's instances, height over lower bound, {seconds:g} s each",
        "",
        "| instance | buffers | SOMAS's heuristics | search | search's seconds |" + " supermalloc |" * rival,
        "|---|---|---|---|---|" + "---|" * rival,
    ]
    for row in rows:
        lines.append(
            f"| {row['name']} | {row['buffers']} | {row['somas_ratio']:.4f} | {row['search_ratio']:.4f} "
            f"| {row['search_seconds']:.1f} |" + (f" {row['supermalloc_ratio']:.4f} |" if rival else "")
        )
    worst = max(row["search_ratio"] for row in rows)
    return "\n".join([*lines, "", f"The search's worst: {worst:.4f}."])


def network_table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "## One training step, arena (offsets multiples of 64 bytes) over the most bytes that live at once",
        "",
        "Parameters and the optimizer's state are not in the arena. The last column places by what operators "
        "read and write instead of by when storages were freed.",
        "",
        "| network | tensors | all of them MiB | at once MiB | SOMAS's heuristics | search | by use |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        lines.append(
            f"| {row['name']} | {row['tensors']} | {row['total_bytes'] / 2**20:.1f} "
            f"| {row['least_bytes'] / 2**20:.1f} | {row['somas_ratio']:.6f} | {row['search_ratio']:.6f} "
            f"| {row['by_use_ratio']:.6f} |"
        )
    return "\n".join(lines)


def planning_text(row: dict[str, Any]) -> str:
    sharing, placing = row["sharing_seconds"], row["layout_seconds"]
    return (
        f"## Planning\n\nA GPT's step of {row['tensors']} tensors and {row['operators']} operators: "
        f"{ranged(sharing)} to say who may share, {ranged(placing)} to place and verify; the arena is "
        f"{row['ratio']:.6f} of the lower bound."
    )


def ranged(seconds: dict[str, float]) -> str:
    return f"{seconds['median']:.2f} s ({seconds['minimum']:.2f} to {seconds['maximum']:.2f})"


if __name__ == "__main__":
    main()

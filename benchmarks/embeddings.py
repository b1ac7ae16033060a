"""Placements of embedding tables over two ranks: planned, sorted by lookups, and random.

Goes in: nothing; generated sets of tables of 1,000 to 300,000 rows, looked up by Zipf's law with exponent
1.05. Comes out: benchmarks/reports/embeddings-<date>.json and .md. May touch: processes and a port of this
machine.

Each rank has an eighth of all tables' bytes with their optimizer state. The plan sees some steps; then the
placements train on others in turns, step by step. In one process, memory shared by measured lookups is
compared with memory shared by size.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import squeezebox
from benchmarks import _ranks, _report
from squeezebox.layers import ShardedEmbeddingBag
from squeezebox.planner import TableSample, TableSearch
from squeezebox.schema import EmbeddingPlan

RANKS, SAMPLE, RANDOM = 2, 16, 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--sets", type=int, default=8)
    parser.add_argument("--bags", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=20)
    arguments = parser.parse_args()
    given = arguments.bags, arguments.steps
    rows = [
        _ranks.run(compared, ranks, seed, ranks, *given)[0]
        for ranks in (RANKS, 1)
        for seed in range(arguments.sets)
    ]
    for path in _report.write("embeddings", {"rows": rows}, table(rows)):
        print(path)


def compared(rank: int, seed: int, ranks: int, bags: int, steps: int) -> dict[str, Any]:
    """Seconds of a step with each placement, and of the planned one over each other one."""
    random = np.random.default_rng(seed)
    tables = [
        (int(10 ** random.uniform(3, 5.5)), int(random.choice([8, 16, 32, 64, 128])))
        for _ in range(int(random.integers(4, 15)))
    ]
    rows = [Zipf(size, random) for size, _ in tables]
    pooled = [int(random.choice([1, 2, 5, 10, 20, 30])) for _ in tables]
    own = np.random.default_rng([seed, rank])

    def batch() -> tuple[list[torch.Tensor], None]:
        drawn = [each.draw((bags // ranks, count), own) for each, count in zip(rows, pooled, strict=True)]
        return [torch.from_numpy(each) for each in drawn], None

    sample = [batch() for _ in range(SAMPLE)]
    nbytes = sum(size * dim * 8 for size, dim in tables) // 4 + 12 * sum(size for size, _ in tables)
    memory = nbytes // ranks if ranks == 1 else nbytes // ranks + 12 * max(size for size, _ in tables)
    begun = time.perf_counter()
    plan = squeezebox.plan_embeddings(tables, sample, memory, optimizer=optimizer)
    planning = time.perf_counter() - begun
    layers = {"planned": layer(plan)}
    if ranks == 1:
        layers["by size"] = ShardedEmbeddingBag(tables, memory, optimizer=optimizer, draw=False)
    else:
        search = searched(tables, sample, memory)
        weights = {"by lookups": [float(count) for count in pooled]}
        weights |= {f"random {number}": list(random.random(len(tables))) for number in range(RANDOM)}
        for name, each in weights.items():
            whole = EmbeddingPlan(tables=plan.tables, ranks=ranks, shards=search.whole(each))
            layers[name] = layer(whole)
    for each in sample:
        for one in layers.values():
            step(one, each)
    seconds: dict[str, list[float]] = {name: [] for name in layers}
    for _ in range(steps):
        each = batch()
        for name, one in layers.items():
            dist.barrier()
            begun = time.perf_counter()
            step(one, each)
            dist.barrier()
            seconds[name].append(time.perf_counter() - begun)
    ratios = {
        name: statistics.median(a / b for a, b in zip(seconds["planned"], times, strict=True))
        for name, times in seconds.items()
        if name != "planned"
    }
    return {
        "set": seed,
        "ranks": ranks,
        "tables": tables,
        "pooled": pooled,
        "plan": plan.to_dict(),
        "planning_seconds": planning,
        "seconds": {name: statistics.median(times) for name, times in seconds.items()},
        "ratios": ratios,
    }


class Zipf:
    """Rows of a table, those looked up often anywhere in it."""

    def __init__(self, rows: int, random: np.random.Generator) -> None:
        odds = np.arange(1, rows + 1) ** -1.05
        self.cumulated, self.places = np.cumsum(odds / odds.sum()), random.permutation(rows)

    def draw(self, shape: tuple[int, int], random: np.random.Generator) -> np.ndarray:
        at = np.searchsorted(self.cumulated, random.random(shape))
        return self.places[at.clip(max=len(self.places) - 1)]


def optimizer(tables: list[Any]) -> torch.optim.Optimizer:
    return torch.optim.Adagrad(tables, lr=0.01)


def layer(plan: EmbeddingPlan) -> ShardedEmbeddingBag:
    return ShardedEmbeddingBag(plan, optimizer=optimizer, draw=False)


def step(layer: ShardedEmbeddingBag, batch: Any) -> None:
    outputs = layer(*batch)
    torch.autograd.backward(outputs, [torch.ones_like(each) for each in outputs])
    layer.step()


def searched(tables: Any, sample: Any, memory: int) -> TableSearch:
    """What shares a rank's memory among whole tables, from the first rank's sample."""
    given: list[Any] = [[[each.numpy() for each in indices] for indices, _ in sample]]
    dist.broadcast_object_list(given)
    samples = []
    for table, size in enumerate(tables):
        steps = [np.unique(indices[table]) for indices in given[0]]
        ids, counts = np.unique(np.concatenate(steps), return_counts=True)
        samples.append(
            TableSample(size=size, bags=1, lookups=1, ids=ids, early=counts, late=counts / len(steps))
        )
    return TableSearch(samples, [memory] * RANKS, known_bytes=12, element_bytes=8)


def table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "A step of all bags: time with the planned placement over that with another one, medians of steps in "
        "turns. On two ranks the others are whole tables, sorted by lookups or at random (mean of "
        f"{RANDOM}); in one process, memory is shared by size.",
        "",
        "| set | tables | ranks | split tables | planned, s | planned / by lookups | planned / random "
        "| planned / by size | planning, s |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        ratios = row["ratios"]
        random = [value for name, value in ratios.items() if name.startswith("random")]
        shown = [
            ratios.get("by lookups"),
            statistics.fmean(random) if random else None,
            ratios.get("by size"),
        ]
        split = len(row["plan"]["shards"]) - len(row["tables"])
        cells = ["" if value is None else f"{value:.2f}" for value in shown]
        lines.append(
            f"| {row['set']} | {len(row['tables'])} | {row['ranks']} | {split} | "
            f"{row['seconds']['planned']:.4f} | {' | '.join(cells)} | {row['planning_seconds']:.1f} |"
        )
    lines.append("")
    for name, ranks in (("by lookups", RANKS), ("by size", 1)):
        values = [row["ratios"][name] for row in rows if row["ranks"] == ranks]
        lines.append(
            f"Planned over {name}: geometric mean {statistics.geometric_mean(values):.3f}, "
            f"{min(values):.2f} to {max(values):.2f}."
        )
    values = [v for row in rows for name, v in row["ratios"].items() if name.startswith("random")]
    lines.append(f"Planned over random: geometric mean {statistics.geometric_mean(values):.3f}.")
    return "\n".join(lines)


if __name__ == "__main__":
    main()

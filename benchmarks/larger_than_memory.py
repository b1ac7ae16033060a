"""Steps on a graph of five times the memory, and on a table of four times, next to plain torch's in memory.

Goes in: nothing; generated graphs whose features are five times the memory, and lookups by Zipf's law with
exponent 1.05. Comes out: benchmarks/reports/larger_than_memory-<date>.json and .md.

``memory=`` is the limit, of the graph a fifth of its features. The system's cache is not limited, so what is
in a file may be in it. Where this process may empty it, as root on Linux, steps are timed after that too.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from benchmarks import _report
from squeezebox.layers import ShardedEmbeddingBag
from squeezebox.streaming import Graph, GraphStep

_CACHE = Path("/proc/sys/vm/drop_caches")
WAYS = (False, True) if os.access(_CACHE, os.W_OK) else (False,)


def empty_cache() -> None:
    """Have the system forget what it has of files."""
    os.sync()
    _CACHE.write_text("1")


class Sage(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.own, self.others = nn.Linear(inputs, outputs), nn.Linear(inputs, outputs)

    def forward(self, x, edge_index):
        sources, targets = edge_index
        return self.own(x) + self.others(torch.zeros_like(x).index_add(0, targets, x[sources]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--nodes", type=int, default=200_000)
    parser.add_argument("--rows", type=int, default=400_000)
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    rows = [
        graph(arguments.nodes, far, mixed, arguments.repeats, cold)
        for cold in WAYS
        for far, mixed in ((0.0, False), (1 / 3, False), (0, True))
    ]
    rows += [
        tables(arguments.rows, name, dense, arguments.repeats, cold)
        for cold in WAYS
        for dense in (False, True)
        for name in ("SGD", "Adagrad", "SparseAdam")
    ]
    for path in _report.write("larger_than_memory", {"rows": rows}, table(rows)):
        print(path)


def graph(nodes: int, far: float, mixed: bool, repeats: int, cold: bool) -> dict[str, Any]:
    """Two layers of GraphSAGE; ``far`` of the edges begin anywhere, the others within 500 nodes.

    Where ``mixed``, nodes are numbered at random then. Where ``cold``, the system's cache is emptied before
    each step.
    """
    torch.manual_seed(0)
    targets = torch.arange(nodes).repeat_interleave(8)
    sources = (targets + torch.randint(-500, 501, targets.shape)).clamp(0, nodes - 1)
    anywhere = torch.rand(targets.shape) < far
    sources[anywhere] = torch.randint(nodes, (int(anywhere.sum()),))
    edges, labels = torch.stack([sources, targets]), torch.randint(16, (nodes,))
    edges = torch.randperm(nodes)[edges] if mixed else edges
    network = nn.ModuleList([Sage(64, 64), nn.ReLU(), Sage(64, 16)])
    with tempfile.TemporaryDirectory() as folder:
        mapped = np.memmap(Path(folder) / "features", np.float32, "w+", shape=(nodes, 64))
        mapped[:] = torch.randn(nodes, 64).numpy()
        features = torch.from_numpy(np.array(mapped))
        step = GraphStep(network, Graph(features=mapped, edges=edges, targets=labels), mapped.nbytes // 5)

        def whole() -> None:
            x = network[1](network[0](features, edges))
            nn.functional.cross_entropy(network[2](x, edges), labels).backward()

        before = empty_cache if cold else None
        compared = _report.interleaved({"ours": step, "plain": whole}, repeats, before=before)
    return dataclasses.asdict(compared) | {
        "what": f"graph of {nodes:,} nodes, {far:.0%} of edges far{', mixed' * mixed}, {step.parts} parts",
        "share": 5,
        "cold": cold,
    }


def tables(rows: int, name: str, dense: bool, repeats: int, cold: bool) -> dict[str, Any]:
    """A table of 32 columns: 2048 bags of 20 rows a step, after 50 steps to learn which are looked up.

    With ``dense``, the bags go through a perceptron of 512 and 256 units, as recommenders have one. Where
    ``cold``, the system's cache is emptied before each step.
    """
    dim, factory = 32, lambda tables: getattr(torch.optim, name)(tables, lr=0.01)
    records = {"SGD": 1, "Adagrad": 2, "SparseAdam": 3}[name]
    layer = ShardedEmbeddingBag([(rows, dim)], rows * dim * 4 * records // 4, optimizer=factory)
    plain = nn.EmbeddingBag(rows, dim, mode="sum", sparse=True)
    optimizer = factory([plain.weight])
    random = np.random.default_rng(0)
    odds = np.arange(1, rows + 1) ** -1.05
    places, cumulated = random.permutation(rows), np.cumsum(odds / odds.sum())

    def batch() -> torch.Tensor:
        drawn = np.searchsorted(cumulated, random.random((2048, 20))).clip(max=rows - 1)
        return torch.from_numpy(places[drawn])

    def ours() -> None:
        head(layer([drawn[0]])[0]).square().mean().backward()
        layer.step()

    def theirs() -> None:
        head(plain(drawn[0])).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    head = nn.Sequential(nn.Linear(dim, 512), nn.ReLU(), nn.Linear(512, 256), nn.ReLU(), nn.Linear(256, 1))
    head = head if dense else nn.Identity()
    drawn = [batch()]
    for _ in range(50):
        ours()
        drawn[0] = batch()
    pool = [[batch() for _ in range(1 if cold else 4)] for _ in range(repeats + 1)]
    turns = {"ours": iter(pool), "plain": iter(pool)}
    compared = _report.interleaved(
        {
            "ours": lambda: _each(next(turns["ours"]), drawn, ours),
            "plain": lambda: _each(next(turns["plain"]), drawn, theirs),
        },
        repeats,
        before=empty_cache if cold else None,
    )
    return dataclasses.asdict(compared) | {
        "what": f"table of {rows:,} x {dim}, {name}{', with a perceptron' * dense}",
        "share": 4,
        "cold": cold,
    }


def _each(pool, drawn, step) -> None:
    for batch in pool:
        drawn[0] = batch
        step()


def table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "A step of ours next to plain torch's with all in memory, side by side; median (lowest to highest). "
        "Where files are in the system's cache, this is the cost of the way. Where it was emptied before "
        "each step, all that a step reads comes from the disk.",
        "",
        "| what | times the memory | files are in | ours / plain, time | ours, s | plain, s |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        ratio = row["ratios"]["ours/plain"]
        ours, plain = (row["seconds"][name]["median"] for name in ("ours", "plain"))
        spread = f"{ratio['median']:.2f} ({ratio['minimum']:.2f} to {ratio['maximum']:.2f})"
        place = "disk" if row["cold"] else "cache"
        lines.append(f"| {row['what']} | {row['share']} | {place} | {spread} | {ours:.3f} | {plain:.3f} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()

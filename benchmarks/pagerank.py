"""Personalised PageRank node by node, and by sweeps over all edges until the error is no larger.

Goes in: WordNet's files, as Debian's wordnet-base installs them. Comes out:
benchmarks/reports/pagerank-<date>.json and .md. May touch: nothing else.

A node of the first graph is one of WordNet's sets of synonyms, an edge one of its pointers. The others are
generated: edges lead to nodes near in number, or anywhere. Sweeps are power iteration with scipy's sparse
matrices, from the seeds, until what they have not handed on is at most the tolerance; this is their error.
Both take one thread. Scores are compared by the sum of differences.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.sparse import csr_array

from benchmarks import _report
from squeezebox.streaming import Graph, personalised_pagerank

WORDNET = Path("/usr/share/wordnet")
RESTART = 0.15


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 100])
    parser.add_argument("--tolerances", type=float, nargs="+", default=[1e-3, 1e-6])
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = [
        measured(name, edges, nodes, seeds, tolerance, arguments.repeats)
        for name, edges, nodes in graphs()
        for seeds in arguments.seeds
        for tolerance in arguments.tolerances
    ]
    for path in _report.write("pagerank", {"rows": rows}, table(rows, arguments.repeats)):
        print(path)


def graphs() -> list[tuple[str, np.ndarray, int]]:
    """Names, edges (2 x edges: from, to) and how many nodes."""
    nodes = 100_000
    random = np.random.default_rng(0)
    sources = np.repeat(np.arange(nodes), random.zipf(1.8, nodes).clip(1, 500))
    near = (sources + random.integers(-50, 51, sources.shape)) % nodes
    anywhere = random.integers(0, nodes, sources.shape)
    edges, words = wordnet()
    return [
        ("WordNet", edges, words),
        ("near in number", np.stack([sources, near]), nodes),
        ("anywhere", np.stack([sources, anywhere]), nodes),
    ]


def wordnet() -> tuple[np.ndarray, int]:
    """Pointers between sets of synonyms, which are numbered as they stand in the files."""
    numbers: dict[tuple[str, str], int] = {}
    pointers: list[tuple[int, tuple[str, str]]] = []
    for kind, letter in (("noun", "n"), ("verb", "v"), ("adj", "a"), ("adv", "r")):
        for line in (WORDNET / f"data.{kind}").read_text("utf-8").splitlines():
            if line.startswith("  "):
                continue  # the licence
            offset, _, _, words, *rest = line.partition("|")[0].split()
            number = numbers.setdefault((letter, offset), len(numbers))
            count, *fields = rest[2 * int(words, 16) :]
            pointers += [(number, (fields[4 * each + 2], fields[4 * each + 1])) for each in range(int(count))]
    return np.array([(number, numbers[to]) for number, to in pointers]).T, len(numbers)


def measured(
    name: str, edges: np.ndarray, nodes: int, seeds: int, tolerance: float, repeats: int
) -> dict[str, Any]:
    """A row of one graph, number of seeds and tolerance."""
    chosen = np.random.default_rng(1).choice(nodes, seeds, replace=False)
    graph = Graph(features=torch.zeros(nodes, 1), edges=torch.from_numpy(edges), targets=torch.zeros(nodes))
    found = personalised_pagerank(graph, chosen, restart=RESTART, tolerance=tolerance)
    swept, sweeps = by_sweeps(edges, nodes, chosen, tolerance)
    comparison = _report.interleaved(
        {
            "sweeps": lambda: by_sweeps(edges, nodes, chosen, tolerance),
            "nodes": lambda: personalised_pagerank(graph, chosen, restart=RESTART, tolerance=tolerance),
        },
        repeats,
    )
    return {
        "graph": name,
        "nodes": nodes,
        "edges": edges.shape[1],
        "seeds": seeds,
        "tolerance": tolerance,
        "sweeps": sweeps,
        "visits": found.visits,
        "share": found.visits / (sweeps * edges.shape[1]),
        "error": found.error,
        "difference": float(np.abs(found.scores - swept).sum()),
        **dataclasses.asdict(comparison),
    }


def by_sweeps(edges: np.ndarray, nodes: int, seeds: np.ndarray, tolerance: float) -> tuple[np.ndarray, int]:
    """Scores, and how many sweeps they took."""
    sources, targets = edges
    degrees = np.bincount(sources, minlength=nodes)
    steps = csr_array((1.0 / degrees[sources], (targets, sources)), shape=(nodes, nodes))
    start, is_end = np.zeros(nodes), degrees == 0
    start[seeds] = 1.0 / len(seeds)
    left, scores, sweeps = start.copy(), np.zeros(nodes), 0
    while left.sum() > tolerance:
        scores += RESTART * left
        left = (1.0 - RESTART) * (steps @ left + left[is_end].sum() * start)
        sweeps += 1
    return scores, sweeps


def table(rows: Sequence[dict[str, Any]], repeats: int) -> str:
    """The Markdown of the report."""
    lines = [
        f"Restart {RESTART}; one thread; medians of {repeats} runs in turn, least to most. A sweep goes "
        "along all edges. Both arms begin with the edges as they are given, so that they sort them.",
        "",
        "| graph | nodes, edges | seeds | tolerance | sweeps | edges visited, of the sweeps' | error "
        "| difference | seconds, sweeps' | seconds, node by node | ratio |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        seconds = [
            f"{spread['median']:.3f} ({spread['minimum']:.3f} to {spread['maximum']:.3f})"
            for spread in (row["seconds"][arm] for arm in ("sweeps", "nodes"))
        ]
        cells = [
            row["graph"],
            f"{row['nodes']:,}, {row['edges']:,}",
            row["seeds"],
            f"{row['tolerance']:g}",
            row["sweeps"],
            f"{row['share']:.2f}",
            f"{row['error']:.1e}",
            f"{row['difference']:.1e}",
            *seconds,
            f"{row['ratios']['nodes/sweeps']['median']:.2f}",
        ]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()

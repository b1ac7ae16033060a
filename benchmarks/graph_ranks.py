"""Two ranks that share a graph: bytes sent and accuracy, with messages in few bits and as they are.

Goes in: nothing; graphs of communities, whose features tell a node's community with much noise. Comes out:
benchmarks/reports/graph_ranks-<date>.json and .md. May touch: processes and a port of this machine.

Trainings are paired by seed: the same graph and the same first weights. The margin is one deviation between
the seeds of exact training, as in `squeezebox audit`.
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from benchmarks import _ranks, _report
from benchmarks.larger_than_memory import Sage
from squeezebox.reports import equivalence
from squeezebox.streaming import Graph, GraphStep

CLASSES, WIDTH = 8, 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--nodes", type=int, default=2000)
    parser.add_argument("--bits", type=float, nargs="*", default=[6.5, 4, 2])
    arguments = parser.parse_args()
    arms = [None, *arguments.bits]
    found = _ranks.run(trainings, 2, arms, arguments.seeds, arguments.steps, arguments.nodes)
    for path in _report.write("graph_ranks", {"arms": rows(arms, found)}, table(rows(arms, found))):
        print(path)


def trainings(rank: int, arms: list[float | None], seeds: int, steps: int, nodes: int) -> list[list[Any]]:
    """(accuracy here, nodes tested here, bytes sent) of each arm and seed."""
    return [[training(bits, seed, steps, nodes) for seed in range(seeds)] for bits in arms]


def training(bits: float | None, seed: int, steps: int, nodes: int) -> tuple[int, int, int]:
    random = torch.Generator().manual_seed(seed)
    labels = torch.randint(CLASSES, (nodes,), generator=random)
    targets = torch.arange(nodes).repeat_interleave(6)
    sources = torch.randint(nodes, targets.shape, generator=random)
    alike = torch.randint(nodes, (len(targets), 24), generator=random)
    same = labels[alike] == labels[targets][:, None]
    inside = (torch.rand(targets.shape, generator=random) < 0.8) & same.any(1)
    sources[inside] = alike[inside].gather(1, same[inside].int().argmax(1, keepdim=True))[:, 0]
    features = torch.randn(nodes, 32, generator=random)
    features[:, :CLASSES] += 0.7 * nn.functional.one_hot(labels, CLASSES)
    trained = torch.randperm(nodes, generator=random)[: nodes // 4]
    torch.manual_seed(seed)
    network = nn.Sequential(Sage(32, WIDTH), nn.ReLU(), Sage(WIDTH, WIDTH), nn.ReLU(), Sage(WIDTH, CLASSES))
    optimizer = torch.optim.Adam(network.parameters(), lr=0.003)
    graph = Graph(features=features, edges=torch.stack([sources, targets]), targets=labels, nodes=trained)
    step = GraphStep(network, graph, "64MiB", group=dist.group.WORLD, message_bits=bits)
    torch.manual_seed(1000 * seed + dist.get_rank())
    for _ in range(steps):
        optimizer.zero_grad()
        step()
        optimizer.step()
    sent = step.message_bytes
    exact = GraphStep(network, graph, "64MiB", group=dist.group.WORLD)
    scores = torch.from_numpy(exact.predict(torch.full((nodes, CLASSES), torch.nan).numpy()))
    tested = ~scores.isnan().any(1)
    tested[trained] = False
    right = int((scores[tested].argmax(1) == labels[tested]).sum())
    return right, int(tested.sum()), sent


def rows(arms: list[float | None], found: list[Any]) -> list[dict[str, Any]]:
    totals = [
        [[sum(part) for part in zip(*ranks, strict=True)] for ranks in zip(*arm, strict=True)]
        for arm in zip(*found, strict=True)
    ]
    accuracies = [[right / tested for right, tested, _ in arm] for arm in totals]
    margin = statistics.stdev(accuracies[0])
    lines = []
    for bits, arm, accuracy in zip(arms, totals, accuracies, strict=True):
        differences = [mine - exact for mine, exact in zip(accuracy, accuracies[0], strict=True)]
        lines.append(
            {
                "bits": bits,
                "accuracy": statistics.fmean(accuracy),
                "difference": statistics.fmean(differences),
                "deviation": statistics.stdev(differences),
                "margin": margin,
                "equivalent": bits is None or equivalence(differences, margin).equivalent,
                "bytes": arm[0][2],
                "fewer": totals[0][0][2] / arm[0][2],
                "accuracies": accuracy,
            }
        )
    return lines


def table(lines: list[dict[str, Any]]) -> str:
    found = [
        f"Two ranks over gloo, {len(lines[0]['accuracies'])} paired seeds; accuracy on nodes that are not "
        "trained on. The margin is one deviation between seeds of exact training, "
        f"{100 * lines[0]['margin']:.2f} points; equivalent at 95 %.",
        "",
        "| bits | bytes sent | times fewer | accuracy | difference, points (deviation) | within margin |",
        "|---|---|---|---|---|---|",
    ]
    for line in lines:
        difference = f"{100 * line['difference']:+.2f} ({100 * line['deviation']:.2f})"
        cells = (
            line["bits"] or "exact",
            f"{line['bytes']:,}",
            f"{line['fewer']:.1f}",
            f"{100 * line['accuracy']:.2f} %",
            difference,
            "yes" if line["equivalent"] else "not shown",
        )
        found.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(found)


if __name__ == "__main__":
    main()

"""Two ranks that share a graph over a slow link: a step whose parts wait for messages, and one whose do not.

Goes in: nothing; a generated graph. Comes out: benchmarks/reports/graph_overlap-<date>.json and .md. May
touch: two network namespaces that it makes, joined by a link whose speed `tc` limits (token bucket); so it
needs root on Linux.

Edges lead to nodes near in number, and those of a share of the nodes to the other rank as well. In the plain
arm the step is told that all parts wait for other ranks, which is the order without this. Both arms take
their steps in turn, in the same processes.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

from benchmarks import _report
from benchmarks.larger_than_memory import Sage
from squeezebox.streaming import Graph, GraphStep

MACHINES = "overlap-0", "overlap-1"
_PORT = 29513


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--nodes", type=int, default=40_000)
    parser.add_argument("--share", type=float, default=0.25, help="of the nodes that the other rank reads")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--megabits", type=int, nargs="+", default=[100, 400, 0], help="0: no limit")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank is not None:
        print(json.dumps(taken(arguments)))
        return
    rows = [measured(megabits, arguments) for megabits in arguments.megabits]
    for path in _report.write("graph_overlap", {"rows": rows}, table(rows, arguments)):
        print(path)


def measured(megabits: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """A row of one link: the slower rank's seconds."""
    with link(megabits):
        ranks = [_rank(number, machine, arguments) for number, machine in enumerate(MACHINES)]
        said = [rank.communicate(timeout=280) for rank in ranks]
    if any(rank.returncode for rank in ranks):
        raise RuntimeError("\n".join(error for _, error in said))
    first, second = (json.loads(out.splitlines()[-1]) for out, _ in said)
    row: dict[str, Any] = {
        "megabits": megabits,
        **{name: first[name] for name in ("parts", "waiting", "bytes")},
    }
    for arm in ("plain", "overlapped"):
        row[arm] = [max(each) for each in zip(first[arm], second[arm], strict=True)]
    row["difference"] = max(first["difference"], second["difference"])
    return row


def _rank(number: int, machine: str, arguments: argparse.Namespace) -> subprocess.Popen[str]:
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.graph_overlap", "--rank", str(number)]
    for name in ("nodes", "share", "width", "repeats"):
        command += [f"--{name}", str(getattr(arguments, name))]
    variables = {"GLOO_SOCKET_IFNAME": f"squeeze{number}", "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        ["ip", "netns", "exec", machine, *command],
        env=os.environ | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@contextmanager
def link(megabits: int) -> Iterator[None]:
    """Two namespaces, joined by a link of this speed."""
    commands = [f"ip netns add {name}" for name in MACHINES]
    commands.append("ip link add squeeze0 type veth peer name squeeze1")
    for number, name in enumerate(MACHINES):
        commands += [
            f"ip link set squeeze{number} netns {name}",
            f"ip -n {name} addr add 10.0.1.{number + 1}/24 dev squeeze{number}",
            *(f"ip -n {name} link set {device} up" for device in (f"squeeze{number}", "lo")),
        ]
        if megabits:
            limit = f"rate {megabits}mbit burst 128kb latency 200ms"
            commands.append(f"ip netns exec {name} tc qdisc add dev squeeze{number} root tbf {limit}")
    try:
        for command in commands:
            subprocess.run(command.split(), check=True, capture_output=True)
        yield
    finally:
        for name in MACHINES:
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)


def taken(arguments: argparse.Namespace) -> dict[str, Any]:
    """Seconds of the steps of both arms, and how much their gradients differ."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://10.0.1.1:{_PORT}", rank=arguments.rank, world_size=2)
    width, graph = arguments.width, made(arguments.nodes, arguments.share, arguments.width)
    torch.manual_seed(0)
    network = nn.Sequential(Sage(width, width), nn.ReLU(), Sage(width, width), nn.ReLU(), Sage(width, 8))
    network.double()

    def stepped() -> GraphStep:
        return GraphStep(network, graph, "24MiB", order=range(arguments.nodes), group=dist.group.WORLD)

    overlapped = stepped()
    with mock.patch.object(GraphStep, "_marginal_parts", lambda step: [*range(step.parts)]):
        plain = stepped()
    found: dict[str, Any] = {"plain": [], "overlapped": []}
    for number in range(arguments.repeats + 1):
        gradients = []
        for name, step in (("plain", plain), ("overlapped", overlapped)):
            network.zero_grad()
            dist.barrier()
            begun = time.perf_counter()
            step()
            if number:
                found[name].append(time.perf_counter() - begun)
            gradients.append(torch.cat([each.grad.flatten() for each in network.parameters()]))  # type: ignore[union-attr]
    difference = float((gradients[0] - gradients[1]).abs().max() / gradients[0].abs().max())
    waiting = len(overlapped._marginal)  # noqa: SLF001
    sent = overlapped.message_bytes // (arguments.repeats + 1)
    return {**found, "difference": difference, "parts": plain.parts, "waiting": waiting, "bytes": sent}


def made(nodes: int, share: float, width: int) -> Graph:
    """Edges to near nodes, and between the last nodes of one half and the first of the other."""
    random = torch.Generator().manual_seed(0)
    targets = torch.arange(nodes).repeat_interleave(8)
    sources = (targets + torch.randint(-50, 51, targets.shape, generator=random)) % nodes
    reach, half = int(share * nodes / 2), nodes // 2
    is_near = (targets - half).abs() < reach
    mirrored = 2 * half - 1 - targets
    is_far = is_near & (torch.rand(targets.shape, generator=random) < 0.5)
    sources = torch.where(is_far, mirrored, sources.clamp(0, nodes - 1))
    features = torch.randn(nodes, width, generator=random, dtype=torch.float64)
    labels = torch.randint(8, (nodes,), generator=random)
    return Graph(features=features, edges=torch.stack([sources, targets]), targets=labels)


def table(rows: Sequence[dict[str, Any]], arguments: argparse.Namespace) -> str:
    """The Markdown of the report."""
    lines = [
        f"A graph of {arguments.nodes:,} nodes and 8 edges each, three SAGE layers of {arguments.width}, "
        f"float64, a thread each; medians of {arguments.repeats} steps of the slower rank, least to most. "
        "Bytes are sent by each rank in a step. The difference is that of the arms' gradients, relative to "
        "their largest.",
        "",
        "| link | MB sent | parts, waiting ones | plain s | overlapped s | ratio | difference |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        arms = [row[arm] for arm in ("plain", "overlapped")]
        middle = [statistics.median(arm) for arm in arms]
        shown = [
            f"{each:.2f} ({min(arm):.2f} to {max(arm):.2f})" for each, arm in zip(middle, arms, strict=True)
        ]
        name = f"{row['megabits']} Mb/s" if row["megabits"] else "without limit"
        lines.append(
            f"| {name} | {row['bytes'] / 1e6:.1f} | {row['parts']}, {row['waiting']} | {shown[0]} | "
            f"{shown[1]} | {middle[1] / middle[0]:.2f} | {row['difference']:.1e} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()

"""Steps at little memory: in tiles, where the planner takes them, next to strips of the whole width.

Goes in: nothing; random pixels. Comes out: benchmarks/reports/streaming_tiles-<date>.json and .md.

A classifier without padding, and a U-Net with batch normalisation in training, on a square image. Every arm
runs in a process of its own, with the same `memory=`. Its peak is what the process grows by in later steps
(Linux's VmHWM); the first one, which also measures, plans and traces, is left out. In the arm of strips the
planner is told that tiles are not possible. Gradients of both arms are compared with the whole image's.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from benchmarks import _report
from benchmarks.streaming_rival import Classifier
from squeezebox.memory import ProcessMeter
from squeezebox.schema import BudgetError, UnsupportedModelError
from squeezebox.streaming import StreamedStep

_MIB = 1 << 20


class UNet(nn.Module):
    """One level, with batch normalisation behind every convolution but the last."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.below = self._block(3, 16), self._block(16, 32)
        self.up, self.last = nn.ConvTranspose2d(32, 16, 2, stride=2), nn.Conv2d(32, 4, 3, padding=1)

    def _block(self, channels: int, out: int) -> nn.Module:
        layers: list[nn.Module] = []
        for given in (channels, out):
            layers += [nn.Conv2d(given, out, 3, padding=1, bias=False), nn.BatchNorm2d(out), nn.ReLU()]
        return nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        fine = self.before(x)
        coarse = self.up(self.below(nn.functional.max_pool2d(fine, 2)))
        found: Tensor = self.last(torch.cat([fine, coarse], 1))
        return found


NETWORKS: dict[str, type[nn.Module]] = {"classifier": Classifier, "U-Net": UNet}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--side", type=int, default=1536)
    parser.add_argument("--memory", type=int, nargs="+", default=[24, 40, 96], help="MiB")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--arm", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.arm:
        torch.set_num_threads(arguments.threads)
        arm, network, memory = arguments.arm
        print(json.dumps(taken(arm, network, int(memory), arguments.side, arguments.repeats)))
        return
    rows = compared(arguments)
    for path in _report.write(
        "streaming_tiles", {"side": arguments.side, "rows": rows}, table(rows, arguments)
    ):
        print(path)


def compared(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """A row of each arm."""
    rows = []
    for network in NETWORKS:
        whole = _row(arguments, "whole", network, 0)
        rows.append(whole)
        for memory in arguments.memory:
            rows += [_row(arguments, arm, network, memory) for arm in ("strips", "tiles")]
        exact = torch.tensor(whole["gradients"], dtype=torch.float64)
        for row in rows:
            if row["network"] == network and "gradients" in row:
                found = torch.tensor(row.pop("gradients"), dtype=torch.float64)
                row["error"] = float((found - exact).norm() / exact.norm())
    return rows


def _row(arguments: argparse.Namespace, arm: str, network: str, memory: int) -> dict[str, Any]:
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.streaming_tiles"]
    for name in ("side", "repeats", "threads"):
        command += [f"--{name}", str(getattr(arguments, name))]
    ended = subprocess.run(
        [*command, "--arm", arm, network, str(memory)], check=True, capture_output=True, text=True
    )
    found: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    return {"arm": arm, "network": network, "memory": memory} | found


def taken(arm: str, network: str, memory: int, side: int, repeats: int) -> dict[str, Any]:
    """Seconds of steps, what the process grew by, the plan, and gradients."""
    torch.manual_seed(0)
    image, model = torch.rand(1, 3, side, side), NETWORKS[network]()
    target = torch.randint(4, (1, side, side)) if network == "U-Net" else torch.tensor([3])
    if arm == "whole":
        plan: list[Any] = []

        def step() -> object:
            return nn.functional.cross_entropy(model(image), target).backward()
    else:
        streamed = StreamedStep(model, nn.functional.cross_entropy, memory=memory * _MIB)
        try:
            with contextlib.ExitStack() as stack:
                if arm == "strips":
                    refused = UnsupportedModelError("strips only")
                    place = "squeezebox.streaming._step.with_across"
                    stack.enter_context(mock.patch(place, side_effect=refused))
                stages = streamed.plan(image, target).stages
        except BudgetError:
            return {}
        plan = [[stage.height, stage.width, stage.computed] for stage in stages]

        def step() -> object:
            return streamed(image, target)

    meter, seconds, grown = ProcessMeter(), list[float](), list[int]()
    for number in range(repeats + 1):
        model.zero_grad()
        meter.start()
        begun = time.perf_counter()
        step()
        if number:
            seconds.append(time.perf_counter() - begun)
            grown.append(meter.stop() or 0)
    gradients = torch.cat([each.grad.flatten() for each in model.parameters() if each.grad is not None])
    return {
        "plan": plan,
        "seconds": statistics.median(seconds),
        "least": min(seconds),
        "most": max(seconds),
        "grown_bytes": max(grown),
        "gradients": gradients.tolist(),
    }


def table(rows: Sequence[dict[str, Any]], arguments: argparse.Namespace) -> str:
    """The Markdown of the report."""
    lines = [
        f"An image of {arguments.side} x {arguments.side} pixels, float32, {arguments.threads} threads; "
        f"medians of {arguments.repeats} steps, least to most. Sizes are rows x columns of strips or tiles "
        "in every pass, with the operations that all of them take, in multiples of the image's. The error is "
        "of all gradients together, relative to the whole image's.",
        "",
        "| network | memory= in MiB | arm | seconds | times whole | grew by MiB | sizes | error |",
        "|---|---|---|---|---|---|---|---|",
    ]
    whole: dict[str, Any] = {}
    for row in rows:
        whole = row if row["arm"] == "whole" else whole
        memory = row["memory"] or ""
        if "seconds" not in row:
            lines.append(
                f"| {row['network']} | {memory} | {row['arm']} | a strip of one row needs more | | | | |"
            )
            continue
        sizes = ", ".join(f"{height} x {width} ({ratio:.2f})" for height, width, ratio in row["plan"])
        lines.append(
            f"| {row['network']} | {memory} | {row['arm']} | "
            f"{row['seconds']:.2f} ({row['least']:.2f} to {row['most']:.2f}) | "
            f"{row['seconds'] / whole['seconds']:.2f} | {row['grown_bytes'] / _MIB:.0f} | {sizes} | "
            f"{row['error']:.1e} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()

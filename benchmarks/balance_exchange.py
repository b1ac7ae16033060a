"""A link that becomes four times slower midway: fixed plans of the gradients' exchange, and plans in turn.

    python -m benchmarks.balance_exchange

Two real data parallel ranks over gloo on an emulated link (`gradients.link_group`). One arm trains with
`compress_gradients("auto", balanced=True)`; the others follow one of its plans for good. Arms take turns in
blocks of steps. What the slower link costs is the time after the change under the plan that was chosen
before it, less the time under the best plan then.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

import squeezebox
from benchmarks import _ranks, _report, models
from benchmarks._tasks import TASKS, loss_fn
from benchmarks.gradients import LATENCY, NETWORKS, NOISE, RANKS
from squeezebox.gradients import ExchangePlan, link_group
from squeezebox.schema import Link

BALANCED = "balanced"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--network", default="small", choices=list(NETWORKS))
    parser.add_argument("--speed", type=float, default=1.25e8, help="bytes a second, before the change")
    parser.add_argument("--slower", type=float, default=4.0, help="times, after it")
    parser.add_argument("--steps", type=int, default=20, help="of an arm in a block")
    parser.add_argument("--blocks", type=int, default=4, help="before the change, and after it")
    arguments = parser.parse_args()
    squeezebox.compile_kernels()
    first, second = _ranks.run(_trained, RANKS, arguments)
    assert first["followed"] == second["followed"]  # all ranks decide alike
    print(*_report.write("balance_exchange", first, render(first)), file=sys.stderr)


class Arm:
    """A training of its own."""

    def __init__(self, rank: int, network: str, group: Any, plans: Sequence[ExchangePlan] = ()) -> None:
        widths, images = NETWORKS[network]
        inputs, target = next(TASKS["images"].batches(rank))
        self.sample = inputs[:images], target[:images]
        torch.manual_seed(0)
        model = models.build("resnet18", num_classes=10, widths=widths)
        self.ddp = DistributedDataParallel(model, process_group=group)
        self.optimizer = torch.optim.SGD(self.ddp.parameters(), lr=0.01, momentum=0.9)
        self.squeezed = squeezebox.compress_gradients(
            self.ddp, "auto", noise=NOISE, balanced=not plans, patience=600.0
        )
        for plan in plans:
            state = self.squeezed.state_dict()
            self.squeezed.load_state_dict(state | {"plan": plan.to_dict(), "passes": 2})
        self.seconds: list[float] = []
        self.followed: list[ExchangePlan | None] = []

    def train(self, steps: int) -> None:
        for _ in range(steps):
            begun = time.perf_counter()
            self.optimizer.zero_grad()
            loss_fn(self.ddp(self.sample[0]), self.sample[1]).backward()
            self.optimizer.step()
            self.seconds.append(time.perf_counter() - begun)
            self.followed.append(self.squeezed.plan)


def _trained(rank: int, arguments: argparse.Namespace) -> dict[str, Any]:
    speeds = [arguments.speed, arguments.speed / arguments.slower]
    group = link_group(Link(bytes_per_second=speeds[0], latency_seconds=LATENCY), patience=600.0)
    balanced = Arm(rank, arguments.network, group)
    while balanced.squeezed.plan is None:
        balanced.train(1)
    balanced.seconds, balanced.followed = [], []
    plans = [ExchangePlan.from_dict(each) for each in balanced.squeezed.state_dict()["choices"]]
    fixed = [Arm(rank, arguments.network, group, [plan]) for plan in plans]
    arms = dict(zip([BALANCED, *map(named, plans)], [balanced, *fixed], strict=True))
    for block in range(2 * arguments.blocks):
        speed = speeds[block >= arguments.blocks]
        group.wire.link = Link(bytes_per_second=speed, latency_seconds=LATENCY)
        for arm in arms.values():
            arm.train(arguments.steps)
    for arm in arms.values():
        arm.squeezed.close()
    return {
        "seconds": {name: arm.seconds for name, arm in arms.items()},
        "followed": [plans.index(each) for each in balanced.followed if each is not None],
        "speeds": speeds,
    }


def named(plan: ExchangePlan) -> str:
    """What its groups are."""
    return " + ".join(f"{len(each.names)} {each.method} {each.level:.2g}" for each in plan.groups)


def render(results: dict[str, Any]) -> str:
    """The table."""
    seconds, followed = results["seconds"], results["followed"]
    half = len(followed) // 2
    phases = slice(half), slice(half, None)
    means = {name: [statistics.fmean(each[phase]) for phase in phases] for name, each in seconds.items()}
    names = [name for name in means if name != BALANCED]
    best = [min(means[name][phase] for name in names) for phase in (0, 1)]
    lines = [
        "| exchange | ms a step before | after | both, over the best of each phase |",
        "|---|---|---|---|",
    ]
    for name, (before, after) in means.items():
        ratio = (before + after) / sum(best)
        lines.append(f"| {name} | {1e3 * before:.1f} | {1e3 * after:.1f} | {ratio:.2f} |")
    lost = means[names[0]][1] - best[1]
    regained = (means[names[0]][1] - means[BALANCED][1]) / lost if lost else 0.0
    shown = ["".join(map(str, followed[phase])) for phase in phases]
    return "\n".join(
        [
            f"The link goes from {results['speeds'][0]:g} to {results['speeds'][1]:g} bytes a second.",
            "",
            *lines,
            "",
            f"Of what the slower link costs the first plan, the balance regains {regained:.0%}.",
            f"Plans in force in turn (0 is the first), before: {shown[0]}, and after: {shown[1]}.",
        ]
    )


if __name__ == "__main__":
    main()

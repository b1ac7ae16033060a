"""A link to a neighbour that becomes four times slower midway: fixed plans, and plans that take turns.

    python -m benchmarks.balance

Two real processes over gloo: one trains, the other one lends memory, over a link that is slowed down by
waiting: a request ends no sooner than its bytes take at so many bytes a second after the one before. Three
arms train the same network exactly within the same budget: by a plan that moves tensors over the link, by one
that recomputes, and by both in turn (`attach(plan=[...])`). Arms take turns in blocks of steps, which the
controller sees as one long step at a block's begin. What the slower link costs is the moving plan's time
after the change, less the better plan's.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.nn import functional

import squeezebox
from benchmarks import _ranks, _report
from benchmarks.offload import narrow
from squeezebox.memory import Area, Elsewhere, Neighbour, lend
from squeezebox.schema import Link

ARMS = ("moving", "recomputing", "in turn")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--steps", type=int, default=20, help="of an arm in a block")
    parser.add_argument("--blocks", type=int, default=2, help="before the change, and after it")
    parser.add_argument("--speed", type=float, default=2.4e8, help="bytes a second, before the change")
    parser.add_argument("--budget", default="55%", help="of the plain step's peak")
    arguments = parser.parse_args()
    results = _ranks.run(_part, 2, arguments)[0]
    print(*_report.write("balance", results, render(results)), file=sys.stderr)


class Linked(Elsewhere):
    """A neighbour over a link."""

    filesystem, kind = "gloo over a link", "neighbour"
    frees_memory, keeps_state = True, False

    def __init__(self, neighbour: Neighbour, link: Link) -> None:
        self.neighbour, self.link, self.free_at = neighbour, link, 0.0
        self.path, self.most_bytes, self.advice = neighbour.path, neighbour.most_bytes, neighbour.advice

    def free_bytes(self) -> int:
        return self.neighbour.free_bytes()

    def open(self) -> LinkedArea:
        return LinkedArea(self)


class LinkedArea(Area):
    """Requests that take as long as over the link, one after the other."""

    direct = fills_anything = True

    def __init__(self, place: Linked) -> None:
        self.place, self.inner, self.thread = place, place.neighbour.open(), ThreadPoolExecutor(1)

    def reserve(self, offset: int, nbytes: int) -> None:
        self.inner.reserve(offset, nbytes)

    def begin_write(self, data: memoryview, offset: int) -> Future[None]:
        return self.thread.submit(
            self._last, self.inner.begin_write(data, offset), len(data), time.monotonic()
        )

    def begin_read(self, data: memoryview, offset: int) -> Future[None]:
        return self.thread.submit(
            self._last, self.inner.begin_read(data, offset), len(data), time.monotonic()
        )

    def _last(self, done: Future[None], nbytes: int, begun: float) -> None:
        done.result()
        self.place.free_at = max(begun, self.place.free_at) + self.place.link.seconds(nbytes)
        time.sleep(max(0.0, self.place.free_at - time.monotonic()))

    def finish(self, *, wait: bool) -> None:
        self.thread.shutdown(wait=wait)
        self.inner.finish(wait=wait)

    def close(self) -> None:
        self.inner.close()


def _part(rank: int, arguments: argparse.Namespace) -> dict[str, Any]:
    if rank == 1:
        lend("512MiB")
        return {}
    links = [Link(bytes_per_second=arguments.speed / factor) for factor in (1, 4)]
    neighbour = Neighbour(rank=1)
    try:
        return _compared(arguments, Linked(neighbour, links[0]), links)
    finally:
        neighbour.close()


def _compared(arguments: argparse.Namespace, place: Linked, links: Sequence[Link]) -> dict[str, Any]:
    sample, blocks = _batch(), arguments.blocks
    options: dict[str, Any] = {"sample": sample, "loss_fn": functional.cross_entropy, "exact": True}
    options["budget"] = arguments.budget
    moving = squeezebox.plan(_network(), **options, recompute=False, offload=place)
    recomputing = squeezebox.plan(_network(), **options, offload=False)
    # An idle link's forecast: turns begin with the moving plan, and leave it by what they see.
    seconds = min(moving.predicted_seconds, 0.9 * recomputing.predicted_seconds)
    moving = replace(moving, predicted_seconds=seconds)
    plans = {"moving": moving, "recomputing": recomputing, "in turn": [moving, recomputing]}
    arms = {arm: Arm(plan, moving, place, sample) for arm, plan in plans.items()}
    for block in range(2 * blocks):
        place.link = links[block >= blocks]
        for arm in (*ARMS[block % 3 :], *ARMS[: block % 3]):
            arms[arm].train(arguments.steps)
            print(arm, arms[arm].told(arguments.steps), file=sys.stderr, flush=True)
    assert len({arm.end() for arm in arms.values()}) == 1  # to the bit
    return {
        "facts": _facts({name: arm.seconds for name, arm in arms.items()}),
        "seconds": {name: arm.seconds for name, arm in arms.items()},
        "moved": arms["in turn"].moved,
        "moved_bytes": sum(each.saved_bytes for each in moving.tensors if each.option.codec == "neighbour"),
    }


class Arm:
    """A training of its own."""

    def __init__(
        self, plan: Any, moving: Any, place: Linked, sample: tuple[torch.Tensor, torch.Tensor]
    ) -> None:
        self.model, self.moving, self.sample = _network(), moving, sample
        self.session = squeezebox.attach(self.model, plan=plan, offload=place)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        self.seconds: list[float] = []
        self.moved: list[bool] = []  # whether that plan was in force

    def train(self, steps: int) -> None:
        for _ in range(steps):
            begun = time.perf_counter()
            self.optimizer.zero_grad()
            functional.cross_entropy(self.model(self.sample[0]), self.sample[1]).backward()
            self.optimizer.step()
            self.seconds.append(time.perf_counter() - begun)
            self.moved.append(self.session.engine.plan is self.moving)

    def told(self, steps: int) -> str:
        plans = "".join("rm"[each] for each in self.moved[-steps:])
        return f"{plans} {1e3 * _mean(self.seconds[-steps:]):.0f} ms"

    def end(self) -> float:
        self.session.detach()
        return sum(float(each.detach().double().sum()) for each in self.model.parameters())


def _network() -> nn.Module:
    torch.manual_seed(0)
    return narrow().train()


def _batch() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(8, 3, 64, 64, generator=generator), torch.randint(100, (8,), generator=generator)


def _facts(seconds: dict[str, list[float]]) -> dict[str, Any]:
    """Seconds of a step before and after the change, and the share of what it costs that turns regain."""
    half = len(seconds["moving"]) // 2
    before, after = (
        {arm: _mean(each[part]) for arm, each in seconds.items()} for part in (slice(half), slice(half, None))
    )
    lost = after["moving"] - min(after["moving"], after["recomputing"])
    regained = (after["moving"] - after["in turn"]) / lost if lost else 0.0
    return {"before": before, "after": after, "regained": regained}


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def render(results: dict[str, Any]) -> str:
    """The table."""
    facts, moved = results["facts"], results["moved"]
    lines = [
        "| arm | ms a step before | after | both, over the better plan of each phase |",
        "|---|---|---|---|",
    ]
    best = sum(min(facts[phase][arm] for arm in ARMS[:2]) for phase in ("before", "after"))
    for arm in ARMS:
        before, after = facts["before"][arm], facts["after"][arm]
        lines.append(f"| {arm} | {1e3 * before:.1f} | {1e3 * after:.1f} | {(before + after) / best:.2f} |")
    half = len(moved) // 2
    text = "".join("rm"[each] for each in moved)
    lines += [
        "",
        f"Of what the slower link costs the moving plan, turns regain {facts['regained']:.0%}.",
        f"In force in turn (m: moving, r: recomputing), before: {text[:half]}, and after: {text[half:]}.",
        f"{results['moved_bytes'] / 2**20:.0f} MiB are moved. Weights of all arms are equal to the bit.",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()

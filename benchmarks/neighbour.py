"""A neighbour's memory: bandwidth beside gloo's own, and steps under one budget with a file and with it.

    python -m benchmarks.neighbour

Two real processes over gloo on one machine: one trains, one lends. First, tensors go there and come back,
by the neighbour and by single messages of gloo in the same two processes, in turn; a share is of one round.
Sending counts until the other side has the bytes. Then exact steps of a network, plain, and under the same
budget by recomputing in this host's memory, by a file, and by the neighbour, without recomputing. All take
turns; a ratio is of one round.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

import squeezebox
from benchmarks import _ranks, _report
from benchmarks.offload import narrow
from squeezebox.memory import Neighbour, Spill, disk_folder, disk_speed, lend
from squeezebox.schema import BudgetError

MIB = 1 << 20
SIZES = (1, 4, 16, 64)  # MiB
SENDING, COMING = range(2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=41)
    parser.add_argument("--steps", type=int, default=7)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--size", type=int, default=96, help="side of the images")
    parser.add_argument("--budget", default="60%", help="of the plain step's peak")
    arguments = parser.parse_args()
    results = _ranks.run(_part, 2, arguments)[0]
    print(*_report.write("neighbour", results, render(results)), file=sys.stderr)


def _part(rank: int, arguments: argparse.Namespace) -> dict[str, Any]:
    raw = Raw(rank)
    if rank == 1:
        thread = threading.Thread(target=raw.serve)
        thread.start()
        lend("1GiB")
        thread.join()
        return {}
    neighbour = Neighbour(rank=1)
    found = {"bandwidth": bandwidths(neighbour, raw, arguments.rounds), "steps": steps(neighbour, arguments)}
    raw.end()
    neighbour.close()
    return found


class Raw:
    """Single messages of gloo, asked for by another one of two numbers."""

    def __init__(self, rank: int) -> None:
        store = dist.PrefixStore("raw", dist.distributed_c10d._get_default_store().clone())
        self.group = dist.ProcessGroupGloo(store, rank, 2, timedelta(hours=1))
        self.numbers = torch.zeros(2, dtype=torch.int64)

    def serve(self) -> None:
        data = torch.zeros(max(SIZES) * MIB, dtype=torch.uint8)
        while True:
            self.group.recv([self.numbers], 0, 0).wait()
            nbytes, way = self.numbers.tolist()
            if nbytes == 0:
                return
            if way == SENDING:
                self.group.recv([data[:nbytes]], 0, 1).wait()
                self.group.send([self.numbers], 0, 2).wait()
            else:
                self.group.send([data[:nbytes]], 0, 1).wait()

    def end(self) -> None:
        self.group.send([torch.zeros(2, dtype=torch.int64)], 1, 0).wait()

    def write(self, data: Tensor) -> None:
        header = torch.tensor([data.numel(), SENDING])
        self.group.send([header], 1, 0).wait()
        self.group.send([data], 1, 1).wait()
        self.group.recv([header], 1, 2).wait()

    def read(self, data: Tensor) -> None:
        arriving = self.group.recv([data], 1, 1)
        self.group.send([torch.tensor([data.numel(), COMING])], 1, 0).wait()
        arriving.wait()


def bandwidths(neighbour: Neighbour, raw: Raw, rounds: int) -> list[dict[str, float]]:
    """By size: bytes a second there and back, and shares of gloo's."""
    spill, found = Spill(neighbour), []
    for mib in SIZES:
        data = torch.randint(256, (mib * MIB,), dtype=torch.uint8)
        out = torch.empty_like(data)
        seconds: dict[str, list[float]] = {key: [] for key in ("raw there", "raw back", "there", "back")}
        for number in range(-2, rounds):
            taken = _round(spill, raw, data, out)
            for key, each in taken.items():
                if number >= 0:
                    seconds[key].append(each)
        row = {f"{key} GB/s": data.nbytes / statistics.median(each) / 1e9 for key, each in seconds.items()}
        for way in ("there", "back"):
            pairs = zip(seconds[f"raw {way}"], seconds[way], strict=True)
            row[f"share {way}"] = statistics.median(theirs / own for theirs, own in pairs)
        found.append({"MiB": mib, **row})
        print(found[-1], file=sys.stderr, flush=True)
    spill.close()
    return found


def _round(spill: Spill, raw: Raw, data: Tensor, out: Tensor) -> dict[str, float]:
    taken = {"raw there": _timed(lambda: raw.write(data)), "raw back": _timed(lambda: raw.read(out))}
    begun = time.perf_counter()
    slot = spill.write(data)
    spill.settle()
    taken["there"] = time.perf_counter() - begun
    taken["back"] = _timed(lambda: spill.read(slot, out))
    assert torch.equal(out, data)
    return taken


def _timed(call: Callable[[], object]) -> float:
    begun = time.perf_counter()
    call()
    return time.perf_counter() - begun


def steps(neighbour: Neighbour, arguments: argparse.Namespace) -> dict[str, Any]:
    """Exact steps: plain, and the budget met by recomputing, or by a file or the neighbour instead."""
    places: dict[str, Any] = {"recomputing": False, "file": disk_folder(), "neighbour": neighbour}
    shape = (arguments.batch, 3, arguments.size, arguments.size)
    inputs, target = torch.randn(shape), torch.randint(100, (arguments.batch,))
    arms, plans, refused = {"plain": _network()}, {}, {}
    for name, place in places.items():
        model = _network()
        try:
            plan = squeezebox.plan(
                model,
                sample=(inputs, target),
                loss_fn=functional.cross_entropy,
                budget=arguments.budget,
                exact=True,
                recompute=name == "recomputing",
                offload=place if isinstance(place, bool | Neighbour) else place.path,
            )
        except BudgetError as error:
            refused[name] = str(error)
            continue
        squeezebox.attach(model, plan=plan, offload=place if name == "neighbour" else True)
        arms[name], plans[name] = model, plan
    compared = _report.interleaved(
        {name: lambda model=model: _step(model, inputs, target) for name, model in arms.items()},
        arguments.steps,
    )
    sums = {
        name: sum(float(each.grad.double().abs().sum()) for each in model.parameters())
        for name, model in arms.items()
    }
    speeds = {name: asdict(disk_speed(place)) for name, place in places.items() if place}
    return {
        "compared": asdict(compared),
        "equal": len(set(sums.values())) == 1,
        "refused": refused,
        "plans": {name: _facts(plan) for name, plan in plans.items()},
        "speeds": speeds,
    }


def _network() -> torch.nn.Module:
    torch.manual_seed(0)
    return narrow().train()


def _step(model: torch.nn.Module, inputs: Tensor, target: Tensor) -> None:
    model.zero_grad(set_to_none=True)
    functional.cross_entropy(model(inputs), target).backward()


def _facts(plan: squeezebox.StepPlan) -> dict[str, Any]:
    moved = sum(each.saved_bytes for each in plan.tensors if each.option.codec in ("file", "neighbour"))
    return {
        "moved_bytes": moved,
        "peak": plan.predicted_peak_bytes / plan.plain_peak_bytes,
        "predicted": plan.predicted_seconds / plan.plain_seconds,
    }


def render(results: dict[str, Any]) -> str:
    """The tables."""
    lines = ["## There and back", ""]
    lines += ["| MiB | there: gloo GB/s | neighbour | share | back: gloo GB/s | neighbour | share |"]
    lines += ["|---|---|---|---|---|---|---|"]
    for row in results["bandwidth"]:
        cells = [
            f"{row[f'raw {way} GB/s']:.2f} | {row[f'{way} GB/s']:.2f} | {row[f'share {way}']:.2f}"
            for way in ("there", "back")
        ]
        lines.append(f"| {row['MiB']} | {' | '.join(cells)} |")
    steps = results["steps"]
    lines += ["", "## Steps", "", "| arm | time / plain (lowest to highest) | predicted | peak | moved MiB |"]
    lines += ["|---|---|---|---|---|"]
    for name, facts in steps["plans"].items():
        ratio = steps["compared"]["ratios"][f"{name}/plain"]
        spread = f"{ratio['median']:.2f} ({ratio['minimum']:.2f} to {ratio['maximum']:.2f})"
        moved = f"{facts['moved_bytes'] / MIB:.0f}"
        lines.append(f"| {name} | {spread} | {facts['predicted']:.2f} | {facts['peak']:.2f} | {moved} |")
    lines += ["", f"Gradients of all arms are equal to the bit: {'yes' if steps['equal'] else 'no'}."]
    for name, error in steps["refused"].items():
        lines += ["", f"{name} was refused: {error}"]
    rates = [
        f"{name}: {1e-9 / each['writing']:.2f} there, {1e-9 / each['reading']:.2f} back"
        for name, each in steps["speeds"].items()
    ]
    lines += ["", f"GB/s as plans measured them: {'; '.join(rates)}."]
    return "\n".join(lines)


if __name__ == "__main__":
    main()

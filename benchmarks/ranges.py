"""Whether any element leaves the interval that squeezebox.check_ranges proves, in a million inputs.

Goes in: nothing. Comes out: benchmarks/reports/ranges-<date>.json and .md.

Each network's forward, loss and backward are proven once, from one batch and twice its ranges. Then batches
are drawn anew: evenly within the ranges, at their corners, with the signs of a weight's row, and by ascent:
inputs that are moved along the gradient of the largest element, and cut off at the ranges. Weights are as
they were, or scaled within the ranges. Every element of every operator's result is compared with what was
proven.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks import _report
from squeezebox.doctor._ranges import Ranges, Reached, checked_ranges

MARGIN = 2.0
KINDS = ("even", "corners", "signs of a row", "ascent")


def networks() -> dict[str, tuple[nn.Module, tuple[int, ...]]]:
    """Small ones, and one sample's shape."""
    perceptron = nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 4)
    convolutions = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 8, 3)
    encoder = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    head = nn.Flatten(), nn.Linear(72, 4)
    return {
        "perceptron": (nn.Sequential(*perceptron), (8,)),
        "convolutions": (nn.Sequential(*convolutions, nn.SiLU(), nn.Flatten(), nn.Linear(8, 4)), (3, 8, 8)),
        "attention": (nn.Sequential(encoder, nn.Flatten(), nn.Linear(64, 4)), (4, 16)),
        "normalised": (
            nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.ReLU(), nn.Linear(16, 4)),
            (8,),
        ),
        "groups": (
            nn.Sequential(nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8), nn.SiLU(), nn.AvgPool2d(2), *head),
            (3, 8, 8),
        ),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--inputs", type=int, default=1_000_000)
    parser.add_argument("--batch", type=int, default=1000)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    made = networks()
    rounds = -(-arguments.inputs // (len(made) * arguments.batch))
    rows = []
    for name, (model, shape) in made.items():
        rows.append({"network": name} | measure(model, shape, arguments.batch, rounds))
        print(*rows[-1].values(), file=sys.stderr, flush=True)
    results = {"rows": rows, "margin": MARGIN}
    print(*_report.write("ranges", results, render(results)), file=sys.stderr)


def measure(model: nn.Module, shape: tuple[int, ...], batch: int, rounds: int) -> dict[str, Any]:
    """Inputs drawn, elements compared, those outside, and how near the nearest came."""
    inputs, labels = torch.randn(batch, *shape), torch.arange(batch) % 4
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with Ranges(MARGIN) as proven:
        run(model, inputs, labels)
    counts: Counter[str] = Counter()
    outside, nearest = 0, 0.0
    for number, drawn in enumerate(batches(model, inputs, labels, rounds)):
        model.load_state_dict(before)
        scale_weights(model, number)
        with Ranges() as again:
            run(model, drawn, labels)
        counts["inputs"] += batch
        for one, other in zip(proven.reached, again.reached, strict=True):
            found = compared(one, other)
            counts["results"] += len(found)
            outside += sum(share > 1.0 for share in found)
            nearest = max([nearest, *found])
    figures = checked_ranges(proven.reached, MARGIN)
    return {
        **counts,
        "outside": outside,
        "nearest": nearest,
        "operators": figures.operators,
        "proven": figures.proven,
    }


def run(model: nn.Module, inputs: Tensor, labels: Tensor) -> None:
    """Forward, loss and backward."""
    model.zero_grad()
    functional.cross_entropy(model(inputs.detach()), labels).backward()


def compared(one: Reached, other: Reached) -> list[float]:
    """For each result, how far from the interval's middle it came, as a share of the way to its end."""
    shares = []
    for proven, seen in zip(one.proven, other.seen, strict=True):
        if proven is not None and proven.high - proven.low < float("inf"):
            middle, half = (proven.low + proven.high) / 2, (proven.high - proven.low) / 2
            farthest = max(abs(seen.low - middle), abs(seen.high - middle))
            shares.append(farthest / half if half else float(farthest > 0.0) * 2.0)
    return shares


def batches(model: nn.Module, inputs: Tensor, labels: Tensor, rounds: int) -> Iterator[Tensor]:
    """Within twice the inputs' ranges."""
    low, high = MARGIN * float(inputs.min()), MARGIN * float(inputs.max())
    draw: dict[str, Callable[[], Tensor]] = {
        "even": lambda: torch.rand_like(inputs) * (high - low) + low,
        "corners": lambda: torch.where(torch.rand_like(inputs) < 0.5, low, high),
        "signs of a row": lambda: with_signs(model, inputs, low, high),
        "ascent": lambda: ascended(model, inputs, labels, low, high),
    }
    for number in range(rounds):
        yield draw[KINDS[number % len(KINDS)]]().clamp(low, high)


def with_signs(model: nn.Module, inputs: Tensor, low: float, high: float) -> Tensor:
    """Each sample at the corner that a row of the first weight of its size points to, or a random one."""
    weights = [each for each in model.parameters() if each.dim() == 2 and each.shape[1] == inputs[0].numel()]
    rows = weights[0].detach() if weights else torch.randn(64, inputs[0].numel())
    chosen = rows[torch.randint(len(rows), (len(inputs),))].reshape(inputs.shape)
    return torch.where(chosen * (1 - 2 * (torch.rand(()) < 0.5)) > 0, high, low)


def ascended(model: nn.Module, inputs: Tensor, labels: Tensor, low: float, high: float) -> Tensor:
    """Three steps along the signs of the gradient of the sum of magnitudes that come out."""
    moved = torch.rand_like(inputs) * (high - low) + low
    for _ in range(3):
        moved.requires_grad_()
        (slope,) = torch.autograd.grad(model(moved).abs().sum(), moved)
        moved = (moved.detach() + 0.5 * (high - low) * slope.sign()).clamp(low, high)
    return moved


def scale_weights(model: nn.Module, number: int) -> None:
    """As they were, all twice as large, or each element by a factor of its own from 1 to 2."""
    with torch.no_grad():
        for weight in model.parameters():
            if number % 3 == 1:
                weight.mul_(MARGIN)
            elif number % 3 == 2:
                weight.mul_(torch.rand_like(weight) + 1)


def render(results: dict[str, Any]) -> str:
    rows = results["rows"]
    lines = [
        f"{sum(row['inputs'] for row in rows):,} inputs, {sum(row['results'] for row in rows):,} results of "
        f"operators on batches of them: {sum(row['outside'] for row in rows)} had an element outside.",
        "",
        "| network | inputs | results | outside | operators | proven | nearest, of the way to the end |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    lines += [
        f"| {row['network']} | {row['inputs']:,} | {row['results']:,} | {row['outside']} | "
        f"{row['operators']} | {row['proven']} | {row['nearest']:.6f} |"
        for row in rows
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()

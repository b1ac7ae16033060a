"""What `squeezebox.prune` does to peak and accuracy, and whether the narrowed network is the masked one.

Goes in: a residual network on scikit-learn's handwritten digits, and networks of benchmarks/models.py. Comes
out: benchmarks/reports/prune-<date>.json and .md.
May touch: that folder.

Every seed trains the network twice from the same weights on the same batches: plain, and with the least
important channels gone after a fifth of the steps. The question is put as two one-sided t tests on the paired
differences: equivalent, at the 5 % level, if the 90 % interval of the mean difference lies within the margin,
which is the deviation of plain's results over seeds, known only as well as so many seeds tell it. A peak is
that of a whole step: parameters, gradients, optimizer state, batch, what is saved, and temporaries.
"""

from __future__ import annotations

import argparse
import copy
import statistics
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import squeezebox
from benchmarks import _report, models
from squeezebox.memory import PeakMeter
from squeezebox.reports import deviation_uncertainty, equivalence

Batch = tuple[Tensor, Tensor]
WIDTH, PIXELS, BATCH, EPOCHS = 32, 8, 50, 10


class Block(nn.Module):
    """relu(x + two convolutions of x)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.body = nn.Sequential(*convolved(width, width), nn.ReLU(), *convolved(width, width))

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.body(x))


def convolved(into: int, out: int) -> list[nn.Module]:
    return [nn.Conv2d(into, out, 3, padding=1, bias=False), nn.BatchNorm2d(out)]


def network(width: int, pixels: int) -> nn.Module:
    """Two stages of a residual block, flattened into a hidden layer."""
    first = [*convolved(1, width), nn.ReLU(), Block(width), nn.MaxPool2d(2)]
    second = [*convolved(width, 2 * width), nn.ReLU(), Block(2 * width), nn.MaxPool2d(2), nn.Flatten()]
    head = [nn.Linear(2 * width * (pixels // 4) ** 2, 64), nn.ReLU(), nn.Linear(64, 10)]
    return nn.Sequential(*first, *second, *head)


def digits() -> tuple[Batch, Batch]:
    from sklearn.datasets import load_digits

    x, y = map(torch.from_numpy, load_digits(return_X_y=True))
    x = (x.float() / 16).view(-1, 1, 8, 8)
    return (x[:1200], y[:1200]), (x[1200:], y[1200:])


NETWORKS: dict[str, tuple[str, dict[str, Any], tuple[int, ...]]] = {
    "ResNet-18": ("resnet18", {}, (16, 3, 64, 64)),
    "EfficientNet-B0": ("efficientnet_b0", {}, (16, 3, 64, 64)),
    "U-Net": ("unet", {"width": 16}, (4, 3, 64, 64)),
    "ViT": ("vit", {"image": 64, "width": 96, "depth": 4, "heads": 4}, (16, 3, 64, 64)),
}


def peak(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Batch) -> int:
    """Of a whole step, which is taken."""
    optimizer.zero_grad()
    meter = PeakMeter(torch.device("cpu"))
    if not meter.start():
        raise RuntimeError("another profiler is active")
    state = [
        each for values in optimizer.state.values() for each in values.values() if isinstance(each, Tensor)
    ]
    meter.given([*model.parameters(), *model.buffers(), *state, *batch])
    step(model, optimizer, batch)
    return meter.stop([]).total_bytes


def step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Batch) -> None:
    optimizer.zero_grad()
    F.cross_entropy(model(batch[0]), batch[1]).backward()
    optimizer.step()


def batches(data: Batch, seed: int) -> Iterator[Batch]:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(EPOCHS):
        for chosen in torch.randperm(len(data[0]), generator=generator).split(BATCH):
            yield data[0][chosen], data[1][chosen]


def trained(seed: int, channels: float | None) -> dict[str, Any]:
    """Held-out accuracy in percent, and the peak of one more step."""
    torch.manual_seed(seed)
    data, (images, labels) = digits()
    model = network(WIDTH, PIXELS)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    given = list(batches(data, seed))
    slower = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.01, len(given))
    if channels is not None:
        start, end = len(given) // 20, len(given) // 5
        squeezebox.prune(model, optimizer, inputs=given[0][0], channels=channels, start=start, end=end)
    for batch in given:
        step(model, optimizer, batch)
        slower.step()
    with torch.no_grad():
        named = model.eval()(images).argmax(1)
    model.train()
    accuracy = 100 * float((named == labels).double().mean())
    return {"accuracy": accuracy, "peak": peak(model, optimizer, given[0])}


def narrowed(name: str, channels: float) -> dict[str, Any]:
    """The peak before and after, and how far the narrowed network is from the masked one, also in float64."""
    kind, sizes, shape = NETWORKS[name]
    found: dict[str, Any] = {}
    for dtype in (torch.float32, torch.float64):
        torch.manual_seed(0)
        model = models.build(kind, num_classes=10, **sizes).to(dtype)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        x = torch.randn(shape, dtype=dtype)
        with torch.no_grad():
            classes = copy.deepcopy(model)(x).argmax(1)
        step(model, optimizer, (x, classes))
        before = peak(model, optimizer, (x, classes))
        pruning = squeezebox.prune(model, optimizer, inputs=x, channels=channels, end=1)
        step(model, optimizer, (x, classes))
        figures = pruning.report().figures
        found[str(dtype).removeprefix("torch.")] = figures.difference
        if dtype == torch.float32:
            found |= {"before": before, "after": peak(model, optimizer, (x, classes))}
            found["parameters"] = figures.parameters_after / figures.parameters_before
    return found


def accuracy_table(pairs: list[dict[str, Any]]) -> list[str]:
    plain, pruned = ([pair[arm]["accuracy"] for pair in pairs] for arm in ("plain", "pruned"))
    deviation = statistics.stdev(plain)
    differences = [other - one for one, other in zip(plain, pruned, strict=True)]
    test = equivalence(
        differences, deviation, margin_uncertainty=deviation_uncertainty(deviation, len(differences))
    )
    lower = 1 - statistics.median(pair["pruned"]["peak"] / pair["plain"]["peak"] for pair in pairs)
    return [
        "",
        f"## Accuracy on digits, %: {len(pairs)} seeds, {EPOCHS} epochs of 1,200 images, 597 held out",
        "",
        "| plain | deviation | pruned | difference (90 %) | equivalent (p) | peak lower by |",
        "|---|---|---|---|---|---|",
        f"| {statistics.fmean(plain):.2f} | {deviation:.2f} | {statistics.fmean(pruned):.2f} | "
        f"{test.mean:+.2f} ({test.low:+.2f} to {test.high:+.2f}) | "
        f"{'yes' if test.equivalent else 'not shown'} ({test.p_value:.3f}) | {100 * lower:.1f} % |",
    ]


def network_table(networks: dict[str, Any], channels: float) -> list[str]:
    table = [
        f"## Peak of a step, {100 * channels:g} % of the channels gone",
        "",
        "| network | MiB before | after | lower by | parameters left | from the masked one | in float64 |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, found in networks.items():
        table.append(
            f"| {name} | {found['before'] / 2**20:.1f} | {found['after'] / 2**20:.1f} | "
            f"{100 * (1 - found['after'] / found['before']):.1f} % | {100 * found['parameters']:.1f} % | "
            f"{found['float32']:.1e} | {found['float64']:.1e} |"
        )
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--channels", type=float, default=0.3)
    parser.add_argument("--seeds", type=int, default=16)
    arguments = parser.parse_args()
    channels = arguments.channels
    earlier: dict[str, Any] = dict(_report.today("prune"))  # of a run that was cut off
    networks = earlier.get("networks") or {name: narrowed(name, channels) for name in NETWORKS}
    pairs = earlier.get("pairs", [])
    for seed in range(len(pairs), arguments.seeds):
        pairs.append({"plain": trained(seed, None), "pruned": trained(seed, channels)})
        if len(pairs) > 2:
            table = network_table(networks, channels) + accuracy_table(pairs)
            _report.write("prune", {"networks": networks, "pairs": pairs}, "\n".join(table))
            print(table[-1], flush=True)


if __name__ == "__main__":
    main()

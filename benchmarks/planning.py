"""How long planning takes, in seconds and in plain steps of the same batch, refusals included.

Goes in: networks that differ in what they hold, a few budgets. Comes out: a dated report.
May touch: nothing.
"""

import argparse
import statistics
import time

import torch
from torch import nn
from torch.nn import functional

import squeezebox
from benchmarks import _report, models

BUDGETS = ("90%", "70%", "50%", "30%", None, "5%")
SECONDS, STEPS = 5.0, 20.0
LIMITS = (
    "At most 5 s or 20 plain steps, whichever is more, are wanted; of a refusal, which looks for rewrites, "
    "twice that."
)


class Mixture(nn.Module):
    """A layer of experts, two for every row."""

    def __init__(self, width, experts):
        super().__init__()
        self.norm, self.gate = nn.LayerNorm(width), nn.Linear(width, experts)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
            for _ in range(experts)
        )

    def forward(self, x):
        rows = self.norm(x)
        weights, chosen = self.gate(rows).softmax(-1).topk(2, -1)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            row, place = (chosen == number).nonzero(as_tuple=True)
            out = out.index_put((row,), weights[row, place, None] * expert(rows[row]), accumulate=True)
        return x + out


def convolutions():
    layers = []
    for channels, width in ((3, 32), (32, 64), (64, 64)):
        layers += [nn.Conv2d(channels, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU()]
        layers += [nn.MaxPool2d(2)] * (width > channels > 3)
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))


def mixtures():
    return nn.Sequential(nn.Linear(64, 128), *[Mixture(128, 8) for _ in range(4)], nn.Linear(128, 10))


class Recurrent(nn.Module):
    """Tensors by the thousand: each layer saves some of every step in both directions."""

    def __init__(self):
        super().__init__()
        self.words, self.head = nn.Embedding(200, 64), nn.Linear(192, 10)
        self.layers = nn.GRU(64, 96, num_layers=2, bidirectional=True, batch_first=True)

    def forward(self, x):
        return self.head(self.layers(self.words(x))[0].mean(1))


def images(batch, side):
    return torch.randn(batch, 3, side, side), torch.randint(10, (batch,))


NETWORKS = {
    "three convolutions": (convolutions, lambda: images(16, 64)),
    "four layers of eight experts": (
        mixtures,
        lambda: (torch.randn(2048, 64), torch.randint(10, (2048,))),
    ),
    "two GRU layers of 40 steps": (
        Recurrent,
        lambda: (torch.randint(200, (16, 40)), torch.randint(10, (16,))),
    ),
    "ResNet-18": (lambda: models.build("resnet18", num_classes=10), lambda: images(8, 96)),
    "ViT": (lambda: models.build("vit", num_classes=10), lambda: images(8, 224)),
}


def planned(name, repeats):
    """Of every budget: seconds of each plan, plain steps of each, and what came of it."""
    make, sample_of = NETWORKS[name]
    torch.manual_seed(0)
    model, sample = make(), sample_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def step():
        begun = time.perf_counter()
        functional.cross_entropy(model(sample[0]), sample[1]).backward()
        optimizer.zero_grad()
        return time.perf_counter() - begun

    def plan(budget):
        begun = time.perf_counter()
        try:
            found = squeezebox.plan(
                model,
                sample=sample,
                loss_fn=functional.cross_entropy,
                optimizer=optimizer,
                budget=budget,
                noise=1e-2,
            )
            outcome = f"{found.predicted_peak_bytes / 2**20:.0f} of {found.plain_peak_bytes / 2**20:.0f} MiB"
        except squeezebox.BudgetError:
            outcome = "refused"
        return time.perf_counter() - begun, outcome

    step(), plan("90%")  # what first calls compile
    rows = {}
    for budget in BUDGETS:
        seconds, steps = [], []
        for _ in range(repeats):
            plain = statistics.median(step() for _ in range(5))
            taken, outcome = plan(budget)
            seconds.append(taken)
            steps.append(taken / plain)
        rows[budget or "none"] = {"seconds": seconds, "steps": steps, "outcome": outcome}
    return rows


def within(row):
    """Whether the median run stays within what is allowed."""
    allowed = 2 if row["outcome"] == "refused" else 1
    return (
        statistics.median(row["seconds"]) <= allowed * SECONDS
        or statistics.median(row["steps"]) <= allowed * STEPS
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    repeats = parser.parse_args().repeats
    found = {name: planned(name, repeats) for name in NETWORKS}
    lines = ["| network | budget | seconds | plain steps | within | plan |", "|---|---|---|---|---|---|"]
    for name, rows in found.items():
        for budget, row in rows.items():
            seconds, steps = (
                f"{statistics.median(values):.1f} ({min(values):.1f} to {max(values):.1f})"
                for values in (row["seconds"], row["steps"])
            )
            yes = "yes" if within(row) else "no"
            lines.append(f"| {name} | {budget} | {seconds} | {steps} | {yes} | {row['outcome']} |")
    kept = [within(row) for rows in found.values() for row in rows.values()]
    lines += ["", f"{LIMITS} {sum(kept)} of {len(kept)} are within that."]
    _report.write("planning", found, "\n".join(lines))


if __name__ == "__main__":
    main()

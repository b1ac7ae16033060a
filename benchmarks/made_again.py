"""Peak and time of plans for networks that draw noise, or send tokens to experts.

Goes in: nothing; networks with random weights, random batches. Comes out:
benchmarks/reports/made_again-<date>.json and .md.

Plans move nothing to files (`offload=False`). Plain and planned network are of one seed and step in turn in
one process; ratios are within a round. A peak is what the step allocates beyond parameters, optimizer state
and inputs, at its highest moment, as the allocator counts. `equal`: losses and gradients of one step are
equal to plain PyTorch's to the bit. "A quarter" is a plan whose budget is a quarter of plain's peak. Lean
experts are squeezebox.layers.ExpertMLP of the same sizes with recompute=True, compared with the others.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import sys
import time
from typing import Any

import torch
from torch import nn
from torch.nn import functional

import squeezebox
from benchmarks import _report
from squeezebox import layers
from squeezebox.profiling import PeakMeter

_MIB = 1 << 20


class BayesianLayer(nn.Module):
    """A linear layer with a normal distribution for each weight, drawn anew in each forward."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.mean = nn.Parameter(torch.randn(outputs, inputs) / inputs**0.5)
        self.rho = nn.Parameter(torch.full((outputs, inputs), -3.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        noise = torch.randn_like(self.mean)
        return functional.linear(x, self.mean + functional.softplus(self.rho) * noise)


class Sampled(nn.Module):
    """The mean of several samples of a network."""

    def __init__(self, network: nn.Module, samples: int) -> None:
        super().__init__()
        self.network, self.samples = network, samples

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([self.network(x) for _ in range(self.samples)]).mean(0)


class Experts(nn.Module):
    """A residual layer of gated experts, two for each token, in grouped products."""

    def __init__(self, width: int, hidden: int, experts: int) -> None:
        super().__init__()
        self.norm, self.router = nn.LayerNorm(width), nn.Linear(width, experts)
        self.gate = nn.Parameter(torch.randn(experts, width, hidden) / width**0.5)
        self.up = nn.Parameter(torch.randn(experts, width, hidden) / width**0.5)
        self.down = nn.Parameter(torch.randn(experts, hidden, width) / hidden**0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normal = self.norm(x)
        weights, chosen = self.router(normal).softmax(-1).topk(2, -1)
        order = chosen.flatten().argsort(stable=True)
        counts = functional.one_hot(chosen.flatten(), len(self.gate)).sum(0)
        grouped = functools.partial(functional.grouped_mm, offs=counts.cumsum(0).to(torch.int32))
        tokens = normal[order // 2]
        found = grouped(functional.silu(grouped(tokens, self.gate)) * grouped(tokens, self.up), self.down)
        weighted = found * weights.flatten()[order][:, None]
        return x + torch.zeros_like(x).index_add(0, order // 2, weighted)


class Lean(nn.Module):
    """The same layer with experts that keep their input alone."""

    def __init__(self, width: int, hidden: int, experts: int) -> None:
        super().__init__()
        self.norm, self.router = nn.LayerNorm(width), nn.Linear(width, experts)
        self.experts = layers.ExpertMLP(experts, width, hidden, recompute=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normal = self.norm(x)
        weights, chosen = self.router(normal).softmax(-1).topk(2, -1)
        return x + self.experts(normal, chosen, weights)


def _bayesian() -> tuple[nn.Module, Any, Any]:
    sizes = (256, 512, 512, 512)
    pairs = zip(sizes, sizes[1:], strict=False)
    hidden = [layer for pair in pairs for layer in (BayesianLayer(*pair), nn.ReLU())]
    network = nn.Sequential(*hidden, BayesianLayer(512, 10))
    return Sampled(network, 8), torch.randn(64, 256), torch.randint(10, (64,))


def _experts(depth: int, kind: type[nn.Module] = Experts) -> tuple[nn.Module, Any, Any]:
    network = nn.Sequential(*(kind(128, 256, 8) for _ in range(depth)), nn.Linear(128, 16))
    return network, torch.randn(4096, 128), torch.randint(16, (4096,))


NETWORKS = {
    "Bayesian MLP, 8 samples": _bayesian,
    "4 layers of experts": functools.partial(_experts, 4),
    "8 layers of experts": functools.partial(_experts, 8),
    "8 layers of lean experts": functools.partial(_experts, 8, Lean),
}
COMPARED = {"8 layers of lean experts": "8 layers of experts"}  # with another network
PLANS: dict[str, dict[str, Any]] = {
    "exact": {"exact": True},
    "exact, a quarter": {"exact": True, "share": 0.25},
    "noise 1e-3": {"noise": 1e-3},
}


class Training:
    """A network in training; made the same every time."""

    def __init__(self, name: str) -> None:
        torch.manual_seed(0)
        self.model, self.inputs, self.target = NETWORKS[name]()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-4)

    def step(self, *, update: bool = True) -> torch.Tensor:
        """Its loss."""
        torch.manual_seed(1)
        self.optimizer.zero_grad()
        loss = functional.cross_entropy(self.model(self.inputs), self.target)
        loss.backward()
        if update:
            self.optimizer.step()
        return loss.detach()

    def seconds(self) -> float:
        """Of a step."""
        started = time.perf_counter()
        self.step()
        return time.perf_counter() - started

    def peak(self) -> int:
        """Bytes that a step allocates, at its highest point."""
        self.optimizer.zero_grad()
        meter = PeakMeter(torch.device("cpu"))
        if not meter.start():
            raise RuntimeError("another profiler runs; end that one first")
        self.step()
        return meter.stop(()).total_bytes

    def gradients(self) -> list[torch.Tensor]:
        """Loss and gradients of a step that updates nothing."""
        loss = self.step(update=False)
        return [loss, *(p.grad for p in self.model.parameters() if p.grad is not None)]


def measure(name: str, options: dict[str, Any], repeats: int) -> dict[str, Any]:
    """One network and plan."""
    plain, ours = Training(COMPARED.get(name, name)), Training(name)
    states = sum(p.nbytes for p in plain.model.parameters()) + plain.inputs.nbytes + plain.target.nbytes
    plain_peak = Training(COMPARED.get(name, name)).peak()  # of one apart, as a step changes weights
    if "share" in options:
        options = {**options, "budget": states + int(options["share"] * plain_peak)}
        del options["share"]
    started = time.perf_counter()
    plan = squeezebox.plan(
        ours.model,
        optimizer=ours.optimizer,
        sample=(ours.inputs, ours.target),
        loss_fn=functional.cross_entropy,
        offload=False,
        **options,
    )
    seconds = time.perf_counter() - started
    squeezebox.attach(ours.model, optimizer=ours.optimizer, plan=plan)
    equal = name not in COMPARED and all(map(torch.equal, plain.gradients(), ours.gradients()))
    rounds = [(plain.seconds(), ours.seconds()) for _ in range(repeats + 1)][1:]
    ratios = sorted(own / theirs for theirs, own in rounds)
    plain_seconds = statistics.median(theirs for theirs, _ in rounds)
    return {
        "equal": equal,
        "plain_peak_bytes": plain_peak,
        "peak_bytes": ours.peak(),
        "predicted_peak_bytes": plan.predicted_peak_bytes - states,
        "plain_seconds": plain_seconds,
        "time": {"median": statistics.median(ratios), "minimum": ratios[0], "maximum": ratios[-1]},
        "predicted_time": plan.predicted_seconds / plan.plain_seconds,
        "planning_seconds": seconds,
    }


def render(rows: dict[str, Any]) -> str:
    """The table in Markdown."""
    lines = [
        "Peaks in MiB; time as a multiple of the plain step's, median (least to most).",
        "",
        "| network and plan | equal | plain peak | peak | share | predicted peak | time | predicted time "
        "| planning, s | in plain steps |",
        "| --- " * 10 + "|",
    ]
    for name, row in rows.items():
        ratio, plain, peak = row["time"], row["plain_peak_bytes"], row["peak_bytes"]
        lines.append(
            f"| {name} | {'yes' if row['equal'] else 'no'} | {plain / _MIB:.1f} | {peak / _MIB:.1f} "
            f"| {peak / plain:.3f} | {row['predicted_peak_bytes'] / _MIB:.1f} "
            f"| {ratio['median']:.2f} ({ratio['minimum']:.2f} to {ratio['maximum']:.2f}) "
            f"| {row['predicted_time']:.2f} | {row['planning_seconds']:.0f} "
            f"| {row['planning_seconds'] / row['plain_seconds']:.0f} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("networks", nargs="*", default=list(NETWORKS), metavar="network")
    parser.add_argument("--repeats", type=int, default=7, help="rounds of a timing")
    arguments = parser.parse_args()
    rows: dict[str, Any] = dict(_report.today("made_again"))
    for name in arguments.networks:
        for plan, options in PLANS.items():
            if "share" in options and not name.startswith("8 layers"):  # the others need more
                continue
            rows[f"{name}, {plan}"] = measure(name, options, arguments.repeats)
            written = _report.write("made_again", rows, render(rows))
            print(name, plan, *written, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()

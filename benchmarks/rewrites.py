"""Peak, time and losses of whole training steps under `squeezebox.rewrite`.

Goes in: nothing; networks with random weights, random batches. Comes out:
benchmarks/reports/rewrites-<date>.json and .md.

A step is zero_grad, forward, loss, backward and the optimizer's step. Plain and rewritten network are of one
seed and step in turn in one process; ratios are within a round. A peak is all that lives at the highest
moment, as the allocator counts: weights, gradients, optimizer state, inputs, and what the step allocates.
Losses are compared in each step, so the last one's difference has grown through all updates before it.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.nn import functional

import squeezebox
from benchmarks import _report, made_again, models
from squeezebox.profiling import PeakMeter
from squeezebox.steps import nbytes_of, persistent

WORDS = 50257
_MIB = 1 << 20


class HuggingFace(nn.Module):
    """GPT-2 of transformers, of random weights, that returns its own loss."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import GPT2Config, GPT2LMHeadModel

        config = GPT2Config(vocab_size=WORDS, n_embd=256, n_layer=4, n_head=4, n_positions=256)
        self.model = GPT2LMHeadModel(config)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.model(input_ids=tokens, labels=tokens, use_cache=False).loss
        return loss


def _gpt() -> tuple[nn.Module, Any, Any]:
    model = models.build("gpt", num_classes=WORDS, width=256, depth=4, heads=4, context=256)
    return model, torch.randint(WORDS, (4, 256)), torch.randint(WORDS, (4, 256))


def _hugging_face() -> tuple[nn.Module, Any, Any]:
    return HuggingFace(), torch.randint(WORDS, (4, 256)), None


def _unet() -> tuple[nn.Module, Any, Any]:
    model = models.build("unet", num_classes=4, width=16, depth=3)
    return model, torch.randn(4, 3, 192, 192), torch.randint(4, (4, 192, 192))


def _decoder() -> tuple[nn.Module, Any, Any]:
    """As of an autoencoder of images: three times twice as large, a convolution after each."""
    widths = (96, 96, 48, 24)
    larger = [
        layer
        for before, after in pairwise(widths)
        for layer in (
            nn.Upsample(scale_factor=2),
            nn.Conv2d(before, after, 3, padding=1),
            nn.GroupNorm(8, after),
            nn.SiLU(),
        )
    ]
    model = nn.Sequential(nn.Conv2d(8, widths[0], 3, padding=1), *larger, nn.Conv2d(widths[-1], 4, 1))
    return model, torch.randn(4, 8, 24, 24), torch.randint(4, (4, 192, 192))


def _leaky(in_place: bool) -> tuple[nn.Module, Any, Any]:
    """As of Darknet: convolution, batch norm and leaky ReLU, at three sizes."""
    layers: list[nn.Module] = []
    for before, after in pairwise((3, 32, 32, 64, 64, 128, 128)):
        norm, activation = nn.BatchNorm2d(after), nn.LeakyReLU(0.1, inplace=in_place)
        layers += [nn.Conv2d(before, after, 3, padding=1, bias=False), norm, activation]
        layers += [nn.MaxPool2d(2)] if before != after and before != 3 else []
    model = nn.Sequential(*layers, nn.Conv2d(128, 4, 1))
    return model, torch.randn(4, 3, 96, 96), torch.randint(4, (4, 24, 24))


def loss_fn(output: torch.Tensor, target: torch.Tensor | None) -> torch.Tensor:
    """The model's own; or of classes, last for tokens and second for pixels."""
    if target is None:
        return output
    if output.dim() == 3:
        return functional.cross_entropy(output.flatten(0, 1), target.flatten())
    return functional.cross_entropy(output, target)


NETWORKS: dict[str, Callable[[], tuple[nn.Module, Any, Any]]] = {
    "gpt, 50k words": _gpt,
    "GPT-2 of transformers, 50k words": _hugging_face,
    "unet": _unet,
    "decoder of images": _decoder,
    "batch norm and leaky ReLU": functools.partial(_leaky, False),
    "the same, in place": functools.partial(_leaky, True),
    "4 layers of experts": made_again.NETWORKS["4 layers of experts"],
}


class Training:
    """A network in training; made the same every time."""

    def __init__(self, name: str, rewrites: Any = None) -> None:
        torch.manual_seed(0)
        self.model, self.inputs, self.target = NETWORKS[name]()
        self.optimizer = torch.optim.AdamW(self.model.train().parameters(), lr=1e-4)
        if rewrites is not None:
            squeezebox.rewrite(self.model, rewrites=rewrites)

    def step(self) -> float:
        """Its loss."""
        torch.manual_seed(1)
        self.optimizer.zero_grad()
        loss = loss_fn(self.model(self.inputs), self.target)
        loss.backward()
        self.optimizer.step()
        return loss.item()

    def timed(self) -> tuple[float, float]:
        """Seconds, and the loss."""
        started = time.perf_counter()
        loss = self.step()
        return time.perf_counter() - started, loss

    def peak(self) -> int:
        """Bytes at the highest point of a step."""
        self.optimizer.zero_grad()
        targets = [] if self.target is None else [self.target]
        own = [*self.model.parameters(), *self.model.buffers(), self.inputs, *targets]
        held = nbytes_of([*own, *persistent(self.model, self.optimizer)])
        meter = PeakMeter(torch.device("cpu"))
        if not meter.start():
            raise RuntimeError("another profiler runs; end that one first")
        self.step()
        return held + meter.stop(()).total_bytes


def measure(name: str, repeats: int) -> dict[str, Any]:
    """One network, plain and rewritten."""
    searched = Training(name)
    started = time.perf_counter()
    found = squeezebox.rewrite(
        searched.model, sample=(searched.inputs, searched.target), loss_fn=loss_fn, optimizer="adamw"
    ).rewrites
    seconds = time.perf_counter() - started
    del searched
    plain, ours = Training(name), Training(name, found)
    rounds = [(plain.timed(), ours.timed()) for _ in range(repeats + 1)]
    ratios = sorted(own[0] / theirs[0] for theirs, own in rounds[1:])
    return {
        "rewrites": found.to_dict(),
        "search_seconds": seconds,
        "plain_peak_bytes": plain.peak(),
        "peak_bytes": ours.peak(),
        "plain_seconds": statistics.median(theirs[0] for theirs, _ in rounds[1:]),
        "time": {"median": statistics.median(ratios), "minimum": ratios[0], "maximum": ratios[-1]},
        "loss_differences": [abs(own[1] - theirs[1]) / abs(theirs[1]) for theirs, own in rounds],
    }


def render(networks: dict[str, Any]) -> str:
    """The table in Markdown."""
    lines = [
        "Peaks in MiB; time as a multiple of the plain step's, median (least to most); the loss's relative "
        "difference in the first step, and the largest in all.",
        "",
        "| network | rewrites | plain peak | peak | share | predicted | time | loss, first | loss, all "
        "| search, s |",
        "| --- " * 10 + "|",
    ]
    for name, row in networks.items():
        shares, ratio = row["peak_bytes"] / row["plain_peak_bytes"], row["time"]
        applied = [f"{each['rule']} ({len(each['where'])})" for each in row["rewrites"]["rows"]]
        lines.append(
            f"| {name} | {', '.join(applied) or 'none'} | {row['plain_peak_bytes'] / _MIB:.1f} "
            f"| {row['peak_bytes'] / _MIB:.1f} | {shares:.3f} | {row['rewrites']['peak_bytes'] / _MIB:.1f} "
            f"| {ratio['median']:.2f} ({ratio['minimum']:.2f} to {ratio['maximum']:.2f}) "
            f"| {row['loss_differences'][0]:.1e} | {max(row['loss_differences']):.1e} "
            f"| {row['search_seconds']:.0f} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("networks", nargs="*", default=list(NETWORKS), metavar="network")
    parser.add_argument("--repeats", type=int, default=5, help="rounds of a timing")
    arguments = parser.parse_args()
    write = functools.partial(_report.write, "rewrites")
    networks: dict[str, Any] = dict(_report.today("rewrites"))
    for name in arguments.networks:
        networks[name] = measure(name, arguments.repeats)
        print(name, *write(networks, render(networks)), file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()

"""`attach(speed="small")` beside `speed="fast"`: a step's time, peak and noise, against plain PyTorch's.

Goes in: nothing; networks of benchmarks/models.py on made-up samples: smooth noise, and tokens. Comes out:
benchmarks/reports/speeds-<date>.json and .md.

The arms are copies of one model in one process, stepped in turn; every ratio is of two steps of one round.
Bounds are those of the allowed noise after the first steps, and stay while steps are timed.
"""

from __future__ import annotations

import argparse
import copy
from dataclasses import asdict, dataclass
from typing import Any

import torch

import squeezebox
from benchmarks import _report, models
from squeezebox.bounds import NoiseBudget
from squeezebox.profiling import PeakMeter
from squeezebox.session import Session

SPEEDS = ("small", "fast")
REFRESHES = 4  # the first steps, which set the bounds; the session's own meter runs on some of them


@dataclass(frozen=True, slots=True)
class _Budget(NoiseBudget):
    """The usual controller, whose bounds stay after the first steps."""

    def due(self, step: int) -> bool:
        return step < REFRESHES


Sample = tuple[torch.Tensor, torch.Tensor]


def images(count: int) -> Sample:
    """Smooth noise at 224 x 224, and classes."""
    coarse = torch.randn(count, 3, 28, 28)
    smooth = torch.nn.functional.interpolate(coarse, size=224, mode="bicubic")
    return smooth + 0.1 * torch.randn_like(smooth), torch.randint(100, (count,))


def passages(count: int) -> Sample:
    """Tokens, each of which goes on to the next of a few."""
    tokens = (torch.randint(4, (count, 257)).cumsum(1)) % 512
    return tokens[:, :-1], tokens[:, 1:]


SAMPLES = {"resnet18": (images, 8, 100), "gpt": (passages, 8, 512), "vit": (images, 8, 100)}


class Arm:
    """A copy of the model with its optimizer."""

    def __init__(self, model: torch.nn.Module, sample: Sample) -> None:
        self.sample, self.model = sample, copy.deepcopy(model)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-4, momentum=0.9)
        self()  # momentum is there from now on

    def __call__(self) -> None:
        self.optimizer.zero_grad()
        self.rest_of_step()

    def rest_of_step(self) -> None:
        """A step's remainder once the gradients are freed."""
        self.backward()
        self.optimizer.step()

    def backward(self) -> None:
        """Forward and backward of the sample."""
        inputs, target = self.sample
        torch.nn.functional.cross_entropy(self.model(inputs).flatten(0, -2), target.flatten()).backward()

    def peak_bytes(self) -> int:
        """Of one step, beyond parameters, gradients and momentum."""
        self.optimizer.zero_grad()
        meter = PeakMeter(torch.device("cpu"))
        if not meter.start():
            raise RuntimeError("Another profiler is active; the peak cannot be measured beside it.")
        self.rest_of_step()
        beside = [each for p in self.model.parameters() if (each := p.grad) is not None]
        beside += [state["momentum_buffer"] for state in self.optimizer.state.values()]
        return meter.stop(beside).activation_bytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("networks", nargs="*", default=list(SAMPLES))
    parser.add_argument("--noise", type=float, default=1e-3, help="allowed, as of squeezebox.attach")
    parser.add_argument("--repeats", type=int, default=5, help="timed rounds, one step of each arm in each")
    arguments = parser.parse_args()
    results = {name: measure(name, arguments.noise, arguments.repeats) for name in arguments.networks}
    payload = {"networks": results, "noise": arguments.noise}
    for path in _report.write("speeds", payload, table(results)):
        print(path)


def measure(name: str, noise: float, repeats: int) -> dict[str, Any]:
    """Seconds, ratios, peaks and packed bytes of one network."""
    torch.manual_seed(0)
    make, count, classes = SAMPLES[name]
    model, sample = models.build(name, num_classes=classes).train(), make(count)
    arms = {way: Arm(model, sample) for way in ("plain", *SPEEDS)}
    sessions: dict[str, Session] = {}
    for way in SPEEDS:
        sessions[way] = squeezebox.attach(arms[way].model, controller=_Budget(noise=noise), speed=way)
        for _ in range(REFRESHES + 2):
            arms[way]()
        sessions[way].report()  # ends the session's own measurement: two peak meters exclude each other
    peaks = {way: arm.peak_bytes() for way, arm in arms.items()}
    result = asdict(_report.interleaved(arms, repeats)) | {"peak_bytes": peaks}
    result["packed_bytes"] = {way: session.report().packed_bytes for way, session in sessions.items()}
    result["noise"] = {way: session.measure_noise(arms[way].backward) for way, session in sessions.items()}
    for session in sessions.values():
        session.detach()
    return result


def table(results: dict[str, Any]) -> str:
    """The Markdown of the report."""
    lines = [
        "A step's time, and its peak beyond parameters, gradients and momentum. Median (lowest to highest). "
        "Noise is that of the step after the timed ones; 1e-3 is allowed unless the command says otherwise.",
        "",
        "| network | small / plain, s | fast / plain, s | plain MiB | small MiB | fast MiB "
        "| peak, fast / small | held, fast / small | noise, small | noise, fast |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name, row in results.items():
        ratios = [row["ratios"][f"{way}/plain"] for way in SPEEDS]
        times = [f"{each['median']:.2f} ({each['minimum']:.2f} to {each['maximum']:.2f})" for each in ratios]
        peaks, held = row["peak_bytes"], row["packed_bytes"]
        sizes = [f"{peaks[way] / 2**20:.1f}" for way in ("plain", *SPEEDS)]
        more = [f"{found['fast'] / found['small']:.3f}" for found in (peaks, held)]
        noises = [f"{row['noise'][way]:.1e}" for way in SPEEDS]
        lines.append(f"| {name} | {' | '.join([*times, *sizes, *more, *noises])} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()

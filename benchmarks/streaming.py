"""Peak and time of a training step in strips, against the whole image's, and how equal the two are.

Goes in: nothing; random pixels, whose values do not matter to bytes and seconds. Comes out:
benchmarks/reports/streaming-<date>.json and .md.

Two U-Nets of large kernels and strides, one without and one with batch normalisation, the latter without
and with ``spool=``, take steps on an image that fits as a whole: by ``height=``, and by ``memory=`` as a
share of the whole image's peak, where heights and what is kept in memory are chosen for it. They do on one
thread: on a machine that others use, threads that wait for one another spin, and the processor's seconds
are mostly theirs. Peaks are sums of live allocations during a step, by torch's memory events; seconds are
medians, every arm in turn, and the processor's seconds (of all threads) are given too. Equality is that of
loss, gradients and running values in float64 over random networks, which are drawn as the tests draw
theirs.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from benchmarks import _report
from squeezebox.cli._gigapixel import Network, loss_fn
from squeezebox.memory import PeakMeter
from squeezebox.reports import human_bytes
from squeezebox.streaming import StreamedStep
from tests.streaming.test_exact import networks, worst

SHARES = (0.5, 0.25, 0.1, 0.05, 0.02)  # of the image's rows
BUDGETS = (0.5, 0.25, 0.1)  # of the whole image's peak


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--height", type=int, default=8192)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--networks", type=int, default=10, help="random ones, for the equality")
    parser.add_argument("--name", default="streaming", help="of the report")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    sizes = arguments.height, arguments.width
    payload = {
        "image": sizes,
        "plain": measure(Network(), sizes, arguments.repeats),
        "batch_norm": measure(with_norms(Network()), sizes, arguments.repeats),
        "spooled": measure(with_norms(Network()), sizes, arguments.repeats, spool=True),
        "errors": equality(arguments.networks),
    }
    for path in _report.write(arguments.name, payload, table(payload)):
        print(path)


def with_norms(model: Network) -> nn.Module:
    """Batch normalisation after each of the first two convolutions."""
    model.down = nn.Sequential(model.down, nn.BatchNorm2d(8))
    model.further = nn.Sequential(model.further, nn.BatchNorm2d(12))
    return model


def measure(
    model: nn.Module, sizes: tuple[int, int], repeats: int, spool: bool | None = None
) -> dict[str, Any]:
    """Peak and seconds, whole, by height of the strips and by memory."""
    torch.manual_seed(0)
    image = torch.randint(0, 256, (1, 3, *sizes), dtype=torch.uint8)
    mask = torch.randint(0, 2, sizes, dtype=torch.uint8)

    def whole() -> None:
        loss_fn(model(image.float() / 255), mask).backward()

    limits = {f"memory {share}": {"memory": round(peak(model, whole) * share)} for share in BUDGETS}
    heights = (max(16, round(sizes[0] * share) // 16 * 16) for share in SHARES)
    limits = {str(height): {"height": height} for height in heights} | limits
    steps = {
        name: StreamedStep(model, loss_fn, axis=-2, spool=spool, **limit) for name, limit in limits.items()
    }
    arms = {"whole": whole}
    arms |= {name: lambda step=step: step(image, mask) for name, step in steps.items()}
    peaks = {name: peak(model, arm) for name, arm in arms.items()}
    spent: dict[str, list[float]] = {name: [] for name in arms}
    clock = _report.interleaved({name: clocked(arm, spent[name]) for name, arm in arms.items()}, repeats, 0)
    processor = {name: statistics.median(seconds) for name, seconds in spent.items()}
    print(peaks, clock.seconds, processor, file=sys.stderr, flush=True)
    plans = {name: asdict(step.plan(image, mask)) for name, step in steps.items()}
    return {"peaks": peaks, "plans": plans, "processor_seconds": processor, **asdict(clock)}


def clocked(arm: Callable[[], object], spent: list[float]) -> Callable[[], None]:
    """The arm, noting the processor's seconds, which other processes on the machine change least."""

    def run() -> None:
        start = time.process_time()
        arm()
        spent.append(time.process_time() - start)

    return run


def peak(model: nn.Module, arm: Any) -> int:
    """Bytes beyond what there was before, gradients included."""
    arm()
    model.zero_grad()
    meter = PeakMeter(torch.device("cpu"))
    meter.start()
    arm()
    return meter.stop(()).total_bytes


def equality(count: int) -> dict[str, Any]:
    """The errors of random networks against the whole image's."""
    found: list[float] = []

    @given(
        model=networks(),
        size=st.tuples(st.integers(9, 40), st.integers(9, 40)),
        height=st.integers(1, 20),
        axis=st.sampled_from([-2, -1]),
        spool=st.booleans(),
    )
    @settings(
        max_examples=count,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=[*HealthCheck],
        derandomize=True,
        database=None,
    )
    def compare(model: nn.Module, size: tuple[int, int], height: int, axis: int, spool: bool) -> None:
        image = torch.randn(2, 2, *size, dtype=torch.float64)
        model, other = model.double(), copy.deepcopy(model.double())
        try:
            loss = objective(model(image), None)
        except (RuntimeError, ValueError):
            return  # too deep for the image
        loss.backward()
        streamed = StreamedStep(other, objective, height=height, axis=axis, spool=spool)(image, None)
        found.append(max(worst(model, other), abs(float(streamed - loss.detach()))))

    compare()
    return {"networks": len(found), "largest": max(found), "median": sorted(found)[len(found) // 2]}


def objective(output: Tensor, _: Any) -> Tensor:
    return output.sin().mean() + (output.square().mean() + 1).log()


def table(payload: dict[str, Any]) -> str:
    """The networks by strips' height and by memory, then the equality."""
    height, width = payload["image"]
    lines = [f"One step on {height} x {width} pixels; shares are of the whole image's step.", ""]
    titles = {
        "plain": "Without batch normalisation",
        "batch_norm": "With two of them",
        "spooled": "With two of them, and spool=True",
    }
    for name, title in titles.items():
        found = payload[name]
        processor = found["processor_seconds"]
        lines += [
            f"{title}:",
            "",
            "| arm | strips | halo | peak | share | kept | on disk | seconds | times the whole's | spread | "
            "processor's |",
        ]
        lines += ["|---|---|---|---|---|---|---|---|---|---|---|"]
        for arm, nbytes in found["peaks"].items():
            ratio = {"median": 1.0, "minimum": 1.0, "maximum": 1.0} | found["ratios"].get(f"{arm}/whole", {})
            plan = found["plans"].get(arm, {"stages": [], "kept_bytes": 0, "disk_bytes": 0})
            strips = ", ".join(str(stage["strips"]) for stage in plan["stages"])
            lines.append(
                f"| {arm} | {strips} | {max((stage['halo'] for stage in plan['stages']), default='')} | "
                f"{human_bytes(nbytes)} | {nbytes / found['peaks']['whole']:.3f} | "
                f"{human_bytes(plan['kept_bytes'])} | {human_bytes(plan['disk_bytes'])} | "
                f"{found['seconds'][arm]['median']:.2f} | "
                f"{ratio['median']:.2f} | {ratio['minimum']:.2f} to {ratio['maximum']:.2f} | "
                f"{processor[arm] / processor['whole']:.2f} |"
            )
        lines.append("")
    errors = payload["errors"]
    lines.append(
        f"{errors['networks']} random networks in float64: loss, gradients (relative to the largest) and "
        f"running values differ by at most {errors['largest']:.1e}, median {errors['median']:.1e}."
    )
    return "\n".join(lines)


if __name__ == "__main__":
    main()

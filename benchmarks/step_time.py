"""Seconds and peak bytes of a whole training step: plain, squeezed, gradient checkpointing.

Goes in: nothing; ResNets from benchmarks/models.py, briefly trained on crops of photographs, then
stepped at 224x224. Comes out: benchmarks/reports/step_time-<date>.json and .md.

A step is zero_grad, forward, loss, backward and the step of SGD with momentum. The arms are three
copies of one model in one process, each with its own optimizer, timed in turn; every ratio is of two
steps of one round. Squeezed steps are regular ones: statistics were gathered before. What gathering
costs (a refresh step, and the regular step after it, which the session runs under its peak meter) is
timed apart and spread over the controller's own schedule. Checkpointing recomputes every residual block.

Memory allocation is part of a step. glibc gives large freed blocks back to the system, and a fresh one
costs a page fault for every 4 KiB touched. All arms pay for that, and not equally: plain for whatever it
saves, checkpointing for what it computes again, squeezed less for what it unpacks, which goes into reused
buffers. How much depends on what the heap kept from the arm before. An allocator that keeps pages
(MALLOC_TOP_PAD_, jemalloc) would change the ratios, so none is set here; the report has every arm's page
faults in a step (median of the timed ones) and the allocator settings that the environment held.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import itertools
import os
import resource
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

import squeezebox
from benchmarks import _report, models, photos, training
from benchmarks.checkpointing import checkpointed
from squeezebox.bounds import Controller, ControllerState, NoiseBudget
from squeezebox.profiling import PeakMeter
from squeezebox.schema import Role, StepStatistics
from squeezebox.session import Session

NETWORKS = ("resnet18", "resnet50")
SIZE = 224
# small, so that bounds stay fit while all arms repeat a few batches
LEARNING_RATE = 1e-4
NUM_BATCHES = 4
# the session's own peak meter runs on the first step and the fourth
LAST_METERED = 3
_ALLOCATOR = ("MALLOC_", "GLIBC_TUNABLES", "LD_PRELOAD")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("networks", nargs="*", default=list(NETWORKS), help="residual networks to measure")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=7, help="timed rounds, one step of each arm in each")
    parser.add_argument("--noise", type=float, default=1e-2)
    parser.add_argument("--speed", choices=("small", "fast"), default="small", help="as of squeezebox.attach")
    parser.add_argument("--train-steps", type=int, default=40, help="of batch 16 at 112x112, before all")
    parser.add_argument("--refreshes", type=int, default=6, help="first squeezed steps, which set the bounds")
    parser.add_argument("--apart", type=int, default=3, help="refresh steps timed apart")
    arguments = parser.parse_args()
    if unknown := set(arguments.networks) - set(NETWORKS):
        parser.error(f"{', '.join(sorted(unknown))}: choose among {', '.join(NETWORKS)}")
    if min(arguments.repeats, arguments.refreshes, arguments.apart) < 1:
        parser.error("--repeats, --refreshes and --apart must be at least 1")
    results = {name: measure(name, arguments) for name in arguments.networks}
    payload = {
        "networks": results,
        "settings": vars(arguments),
        "allocator": {name: value for name, value in os.environ.items() if name.startswith(_ALLOCATOR)},
    }
    title = "step_time" if arguments.speed == "small" else f"step_time_{arguments.speed}"
    for path in _report.write(title, payload, table(results)):
        print(path)


# --- arms ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Arm:
    """A copy of the model with its optimizer and its own turn through the same batches."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    batches: Iterator[tuple[Tensor, Tensor]]

    def __call__(self) -> None:
        """One whole training step."""
        self.optimizer.zero_grad()
        self.rest_of_step()

    def rest_of_step(self) -> None:
        """A step's remainder once the gradients are freed."""
        self.loss().backward()
        self.optimizer.step()

    def loss(self) -> Tensor:
        """Loss of the next batch."""
        images, labels = next(self.batches)
        return training.classification_loss(self.model(images), labels)

    def beside_activations(self) -> list[Tensor]:
        """Gradients and momentum."""
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        momentum = [state.get("momentum_buffer") for state in self.optimizer.state.values()]
        return gradients + [each for each in momentum if each is not None]


@dataclass(frozen=True, slots=True)
class _Schedule:
    """A controller that is due on the first steps, then never, then on every other one from `apart`."""

    controller: Controller
    refreshes: int
    apart: int

    def due(self, step: int) -> bool:
        return step < self.refreshes or (step >= self.apart and (step - self.apart) % 2 == 0)

    def bound(self, state: ControllerState, key: str, role: Role, rms: Callable[[], float]) -> float | None:
        return self.controller.bound(state, key, role, rms)

    def update(self, state: ControllerState, statistics: StepStatistics) -> ControllerState:
        return self.controller.update(state, statistics)


def arm(trained: nn.Module, batches: list[tuple[Tensor, Tensor]]) -> Arm:
    """A fresh copy, its momentum started by one step, so that no timed step allocates it."""
    model = copy.deepcopy(trained)
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=0.9)
    made = Arm(model=model, optimizer=optimizer, batches=itertools.cycle(batches))
    made()
    return made


def trained_model(name: str, steps: int) -> nn.Module:
    torch.manual_seed(0)
    model = models.build(name, num_classes=photos.num_classes()).train()
    rate = training.LEARNING_RATES[name]
    training.train_briefly(model, photos.batches(16, 112, seed=0), steps, rate)
    return model


# --- measuring -----------------------------------------------------------------------------------------


def measure(name: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """All figures of one network."""
    started = time.perf_counter()
    model = trained_model(name, arguments.train_steps)
    batches = list(itertools.islice(photos.batches(arguments.batch, SIZE, seed=1), NUM_BATCHES))
    plain, squeezed, recomputing = (arm(model, batches) for _ in range(3))
    _say(f"{name}: trained, {time.perf_counter() - started:.0f} s")
    budget = NoiseBudget(noise=arguments.noise)
    first = max(arguments.refreshes, LAST_METERED) + 1
    # after the first come the peak's step, one warm-up round and the timed rounds
    apart = first + 2 + arguments.repeats
    schedule = _Schedule(budget, arguments.refreshes, apart)
    with contextlib.ExitStack() as stack:
        stack.enter_context(checkpointed(recomputing.model))
        session = squeezebox.attach(
            squeezed.model, optimizer=squeezed.optimizer, controller=schedule, speed=arguments.speed
        )
        stack.callback(session.detach)
        result = {"peak_bytes": {"plain": peak(plain), "checkpointing": peak(recomputing)}}
        for _ in range(first):
            squeezed()
        session.report()  # ends the session's own measurement: two peak meters exclude each other
        result["peak_bytes"]["squeezed"] = peak(squeezed)
        arms = {"plain": plain, "squeezed": squeezed, "checkpointing": recomputing}
        _say(f"{name}: peaks {result['peak_bytes']}")
        result |= in_turn(arms, arguments.repeats)
        _require_regular(session, apart - 1)
        _say(f"{name}: {result['ratios']}")
        result["refreshing"] = refreshing(session, plain, squeezed, budget, arguments.apart)
        for interval in ("first_interval", "later_interval"):
            result["refreshing"][interval]["squeezed/plain"] = amortised(result, interval)
        result["squeezed"] = held(session, squeezed)
    return result | {"measured_in_seconds": time.perf_counter() - started}


def peak(step: Arm) -> int:
    """Peak bytes of one step beyond parameters, gradients and momentum.

    Gradients are freed before the meter starts, which would count what it never saw allocated.
    """
    step.optimizer.zero_grad()
    meter = PeakMeter(torch.device("cpu"))
    if not meter.start():
        raise RuntimeError("Another profiler is active; the peak cannot be measured beside it.")
    step.rest_of_step()
    return meter.stop(step.beside_activations()).activation_bytes


def in_turn(arms: dict[str, Arm], repeats: int) -> dict[str, Any]:
    """Seconds, ratios and page faults of the arms, each once a round, after a warm-up round."""
    faults: dict[str, list[int]] = {key: [] for key in arms}
    steps = {key: counting(each, faults[key]) for key, each in arms.items()}
    compared = asdict(_report.interleaved(steps, repeats))
    return compared | {"page_faults": {key: statistics.median(each[1:]) for key, each in faults.items()}}


def counting(step: Arm, faults: list[int]) -> Callable[[], None]:
    """The same step, adding to `faults` the minor page faults that the process had in it."""

    def counted() -> None:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        step()
        faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)

    return counted


def refreshing(
    session: Session, plain: Arm, squeezed: Arm, budget: NoiseBudget, repeats: int
) -> dict[str, Any]:
    """Seconds of a refresh step and of the metered step after it, and what they add on average."""

    def close() -> None:
        # statistics become bounds, and the meter is read, when the step is closed
        squeezed()
        session.report()

    # the schedule alternates: the first call refreshes, the second is the metered one after it
    seconds: dict[str, list[float]] = {"plain": [], "refresh": [], "metered": []}
    for _ in range(repeats):
        for key, step in (("plain", plain), ("refresh", close), ("metered", close)):
            seconds[key].append(_report.timed(step, 1, warmup=0).median)
    medians = {key: statistics.median(values) for key, values in seconds.items()}
    return {
        "seconds": seconds,
        "refresh/plain": medians["refresh"] / medians["plain"],
        "metered/plain": medians["metered"] / medians["plain"],
        "interval": budget.interval,
        "first_interval": _extra_steps(budget, range(budget.interval)),
        "later_interval": _extra_steps(budget, range(budget.interval, 2 * budget.interval)),
    }


def _extra_steps(budget: NoiseBudget, steps: range) -> dict[str, float]:
    """How many of the steps refresh, are metered, or both."""
    due = [step for step in steps if budget.due(step)]
    metered = [step for step in steps if step in (0, LAST_METERED) or budget.due(step - 1)]
    return {"steps": len(steps), "refreshes": len(due), "metered": len(metered)}


def amortised(result: dict[str, Any], interval: str) -> float:
    """Mean squeezed / plain over an interval: the regular ratio and the share of what comes on top."""
    regular = result["ratios"]["squeezed/plain"]["median"]
    refreshing, counts = result["refreshing"], result["refreshing"][interval]
    on_top = counts["refreshes"] * (refreshing["refresh/plain"] - regular)
    on_top += counts["metered"] * (refreshing["metered/plain"] - regular)
    return float(regular + on_top / counts["steps"])


def held(session: Session, squeezed: Arm) -> dict[str, Any]:
    """Bytes and noise of the last regular step's bounds."""
    report = session.report()
    return {
        "saved_bytes": report.saved_bytes,
        "packed_bytes": report.packed_bytes,
        "ratio": report.saved_bytes / report.packed_bytes,
        "noise": session.measure_noise(_same_batch(squeezed)),
        "predicted_noise": report.predicted_noise,
        "floor_bytes": report.record.floor_bytes,
    }


def _same_batch(squeezed: Arm) -> Callable[[], object]:
    images, labels = next(squeezed.batches)
    return lambda: training.classification_loss(squeezed.model(images), labels).backward()


def _require_regular(session: Session, step: int) -> None:
    """The timed steps were the ones meant to be timed."""
    record = session.report().record
    if record.step != step:
        raise RuntimeError(f"The last timed step is {record.step}, not {step}; a refresh may be among them.")


# --- report --------------------------------------------------------------------------------------------


def table(results: dict[str, Any]) -> str:
    """The Markdown tables of the report."""
    seconds = [
        "| network | plain s | squeezed s | checkpointing s | squeezed / plain | checkpointing / plain "
        "| squeezed / checkpointing |",
        "|---|---|---|---|---|---|---|",
    ]
    peaks = [
        "| network | plain MiB | squeezed MiB | checkpointing MiB | plain / squeezed | plain / checkpointing "
        "| saved / packed | measured noise | predicted | page faults: plain | squeezed | checkpointing |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    refreshes = [
        "| network | refresh step / plain | regular step under the peak meter / plain | interval "
        "| squeezed / plain over the first interval | over a later one |",
        "|---|---|---|---|---|---|",
    ]
    for name, row in results.items():
        seconds.append(_seconds_line(name, row))
        peaks.append(_peaks_line(name, row))
        apart = row["refreshing"]
        refreshes.append(
            f"| {name} | {apart['refresh/plain']:.2f} | {apart['metered/plain']:.2f} | {apart['interval']} "
            f"| {apart['first_interval']['squeezed/plain']:.3f} "
            f"| {apart['later_interval']['squeezed/plain']:.3f} |"
        )
    titles = (
        "## Seconds of a regular step, median (lowest to highest)",
        "## Peak of one step beyond parameters, gradients and momentum",
        "## Refresh steps, spread over the controller's schedule",
    )
    blocks = zip(titles, (seconds, peaks, refreshes), strict=True)
    return "\n\n".join("\n".join([title, "", *rows]) for title, rows in blocks)


def _seconds_line(name: str, row: dict[str, Any]) -> str:
    cells = [_spread(row["seconds"][key]) for key in ("plain", "squeezed", "checkpointing")]
    pairs = ("squeezed/plain", "checkpointing/plain", "squeezed/checkpointing")
    cells += [_spread(row["ratios"][pair]) for pair in pairs]
    return f"| {name} | {' | '.join(cells)} |"


def _peaks_line(name: str, row: dict[str, Any]) -> str:
    arms = ("plain", "squeezed", "checkpointing")
    peaks, squeezed = row["peak_bytes"], row["squeezed"]
    cells = [f"{peaks[key] / 2**20:.0f}" for key in arms]
    cells += [f"{peaks['plain'] / peaks[key]:.2f}x" for key in ("squeezed", "checkpointing")]
    cells += [f"{squeezed['ratio']:.1f}x", f"{squeezed['noise']:.1e}", f"{squeezed['predicted_noise']:.1e}"]
    cells += [f"{row['page_faults'][key]:.0f}" for key in arms]
    return f"| {name} | {' | '.join(cells)} |"


def _spread(spread: dict[str, float]) -> str:
    return f"{spread['median']:.2f} ({spread['minimum']:.2f} to {spread['maximum']:.2f})"


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()

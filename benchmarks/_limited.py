"""The largest batch within a small device's memory, and how quickly it trains.

Goes in: networks and arms of benchmarks/_trainings.py. Comes out: a row for each that says what batch ran.
May touch: the device's memory limit, which is put back. On a CPU a little more than the plain step's peak
stands for it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

import squeezebox
from benchmarks import _report
from benchmarks._trainings import (
    NETWORKS,
    Arm,
    Clock,
    Training,
    arms,
    attached_to,
    device,
    free,
    loss_of,
    precision,
    training,
)
from squeezebox.reports import MaxBatch

LIMIT_GIB = 8.0
SHARES = (0.95, 0.9, 0.8)  # of the limit for a plan: what the allocator cannot put together is lost
PLANS: Mapping[str, Mapping[str, Any]] = {
    "max_batch, noise 0.01": {"noise": 1e-2},
    "max_batch, noise 0.001": {"noise": 1e-3},
    "max_batch, exact": {"exact": True},
}


def limited(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The largest batch within 8 GiB, and samples a second at it, by network and arm; ResNet-50 first.

    Arms of a plan take the batch that squeezebox.max_batch names; for others it is tried out.
    """
    clock = Clock(arguments.seconds_left())
    plain, *others = (name for name in arms() if not name.startswith("plan"))
    wanted = [arm for arm in (plain, *PLANS, *others) if arguments.arms is None or arm in arguments.arms]
    rows: dict[str, Any] = {}
    with _memory_limit():
        for name in sorted(arguments.networks, key=lambda name: name != "resnet50"):
            for arm in wanted:
                row = _row(name, arm, arguments, clock) if clock.allows() else None
                rows[f"{name}, {arm}"] = row
                print(name, arm, row, file=sys.stderr, flush=True)
                yield rows


@contextmanager
def _memory_limit() -> Iterator[None]:
    """This process's, on a device."""
    if device().type != "cuda":
        yield
        return
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(min(LIMIT_GIB * 2**30 / total, 1.0))
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def _row(name: str, arm: str, arguments: argparse.Namespace, clock: Clock) -> dict[str, Any]:
    found = (
        _largest_planned(name, PLANS[arm], arguments, clock)
        if arm in PLANS
        else _largest(name, arms()[arm], arguments, clock)
    )
    return found or {"batch": 0, "samples_a_second": 0.0}


def _few(name: str, arguments: argparse.Namespace) -> int:
    return 2 if arguments.quick else NETWORKS[name][2] // 4


def _largest_planned(
    name: str, how: Mapping[str, Any], arguments: argparse.Namespace, clock: Clock
) -> dict[str, Any] | None:
    """At the batch that is planned for the limit, or for a little less until it runs."""
    for share in SHARES:
        plan = _planned(name, share, how, arguments)
        if plan is None:  # less memory would not help
            return None
        row = _at_batch(name, attached_to(plan.plan), plan.batch, arguments)
        if row is not None:
            foretold = {"predicted_peak_bytes": plan.predicted_peak_bytes, "plain_batch": plan.plain_batch}
            return row | foretold | {"share": share}
        if clock.is_over():
            break
    return None


def _planned(
    name: str, share: float, how: Mapping[str, Any], arguments: argparse.Namespace
) -> MaxBatch | None:
    """None where no plan fits, or none can be made."""
    free()
    on_device = device().type == "cuda"
    try:
        own = training(name, "tf32", _few(name, arguments), arguments)
        with precision("tf32"):
            return squeezebox.max_batch(
                own.model,
                sample=(own.inputs, own.labels),
                loss_fn=loss_of,
                optimizer=own.optimizer,
                budget=int(share * LIMIT_GIB * 2**30) if on_device else f"{1.2 * share:.0%}",
                **how,
            )
    except Exception as error:  # noqa: BLE001  (one arm's failure does not cost the others')
        print(name, share, type(error).__name__, error, file=sys.stderr)
        return None


def _largest(name: str, entered: Arm, arguments: argparse.Namespace, clock: Clock) -> dict[str, Any] | None:
    """By the line through the peaks at two batches, then downwards by twentieths until one runs."""
    few = _few(name, arguments)
    first, second = (_at_batch(name, entered, batch, arguments) for batch in (few, 2 * few))
    if first is None or second is None or device().type != "cuda":
        return second or first
    slope = (second["peak_bytes"] - first["peak_bytes"]) / few
    batch = int(2 * few + (LIMIT_GIB * 2**30 - second["peak_bytes"]) / max(slope, 1.0))
    while batch > 2 * few and not clock.is_over():
        row = _at_batch(name, entered, batch, arguments)
        if row is not None:
            return row
        batch = int(0.95 * batch)
    return second


def _at_batch(name: str, entered: Arm, batch: int, arguments: argparse.Namespace) -> dict[str, Any] | None:
    """Peak of everything and samples a second; None where it does not fit or fails."""
    free()
    try:
        own = training(name, "tf32", batch, arguments)
        with precision("tf32"), entered(own):
            timing = _report.interleaved({"own": own.step}, arguments.repeats, warmup=2)
            return {
                "batch": batch,
                "samples_a_second": batch / timing.seconds["own"].median,
                "peak_bytes": _peak(own),
            }
    except Exception as error:  # noqa: BLE001  (as above)
        print(name, batch, type(error).__name__, error, file=sys.stderr)
        return None


def _peak(own: Training) -> int:
    own.peak_bytes()
    return torch.cuda.max_memory_allocated() if device().type == "cuda" else 0

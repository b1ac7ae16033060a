"""On which devices a step fits, plain or under a plan, and how long it takes there."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from squeezebox import planner
from squeezebox.memory import free_bytes, within_room
from squeezebox.planning._estimate import BATCH, INPUT_SHAPE, simulated
from squeezebox.planning._find import probe
from squeezebox.planning._kinds import check_noise
from squeezebox.planning._max_batch import Batches
from squeezebox.planning._plans import plannable, size_named
from squeezebox.planning._profiles import without
from squeezebox.profiling import Simulation, measure_speed, optimizer_named, rated
from squeezebox.reports import DeviceFit, Feasibility, exact_bytes
from squeezebox.schema import (
    Action,
    BudgetError,
    CaptureError,
    Device,
    Devices,
    OptionError,
    PlanError,
    UnsupportedModelError,
)
from squeezebox.steps import LossFunction, Progress, TrainingStep, check_sample, random_inputs, stand_in

_HOST, _HERE = torch.device("cpu"), "this machine"
_USUAL = "35% of a CPU's memory, at least 64 MiB, and 10% of others"
_PROFILED, _AMPLE = 16, 4  # samples at most, and their peak's multiple for more: others lie on a line
_PROCESS = 64 << 20  # bytes, of code and of what is no tensor
_NEARLY = 0.03  # of the largest batch under a plan, whose planning takes long
_APART, _NEAR = 4, 16  # times as many samples from one batch that is run to the next, and up to where


def feasibility(
    model: torch.nn.Module | Callable[[], torch.nn.Module],
    *,
    devices: Devices | str | os.PathLike[str] = "all",
    steps: int = 0,
    input_shape: Sequence[int] | None = None,
    batch: int | None = None,
    sample: tuple[Any, Any] | Callable[[], tuple[Any, Any]] | None = None,
    loss_fn: LossFunction | None = None,
    optimizer: str = "sgd-momentum",
    input_dtype: str | None = None,
    noise: float | None = None,
    exact: bool = False,
    plans: bool = True,
    reserve: int | str | None = None,
    on_progress: Progress | None = None,
) -> Feasibility:
    """Say for each device whether a training step fits it, with which plan, and how long it takes there.

    A plain step is run on fake tensors, as :func:`estimate` does. Plans come from small batches that are
    profiled here, in this host's memory. They move no tensor to a file or a host, as nobody knows how fast
    that is there. Seconds are those of a roofline: each operator takes its flops or its bytes at the device's
    rates. What steps of networks take over that is measured on this machine, or was where ``squeezebox
    devices measure`` ran.

    Args:
        model: a module (left alone), or a function or class that makes one.
        devices: "all": this machine, where the system says what memory is free, and many others by their
            data sheets; or what ``squeezebox devices measure`` or a person wrote; or a path to it. One
            without rates has this machine's, by its speed.
        steps: of the training, for its hours.
        input_shape: one sample's shape, without the batch (default: 3, 224, 224).
        batch: samples a step (default: 32).
        sample: instead of these: inputs and target, or a function that makes them.
        loss_fn: what backward starts from (default: a cross-entropy or a mean square that stands for it).
        optimizer: "sgd", "sgd-momentum", "adam" or "adamw".
        input_dtype: of the input, such as "int64" for tokens.
        noise: see :func:`plan`; exact plans are preferred.
        exact: see :func:`plan`.
        plans: whether plans are tried. They take a few steps here.
        reserve: bytes of each memory to leave free, or a share: for the process itself, and what an allocator
            cannot use. None is 10 %, and 35 % where the device's type is "cpu", at least 64 MiB: glibc keeps
            freed blocks, and processes of small steps grew to 1.3 to 1.6 of their peaks.
        on_progress: see :func:`plan`.

    Raises:
        OptionError: an argument is out of range, or the model does not take such an input.
        FormatError: the file of devices is damaged.
    """
    check_noise(noise)
    rows = listed(devices)
    limits = [room_on(each, reserve) for each in rows]
    described: dict[str, Any] = {
        "sample": sample,
        "loss_fn": loss_fn or stand_in,
        "input_shape": input_shape,
        "batch": batch,
        "input_dtype": input_dtype,
    }
    fake = functools.partial(simulated, model, **described, optimizer=optimizer, load="worst")
    once = fake()[0]
    plain = _Plain(once, lambda size: fake(size=size)[0])
    ways: list[_Way] = []
    why = "it was not asked for."
    if plans:
        with torch.random.fork_rng(devices=[]):
            ways, why = _ways(once, plain.peak, model, described, optimizer, exact, noise, on_progress)
    name = getattr(model, "__name__", type(model).__name__)
    plain.ways = ways
    return Feasibility(
        model=name,
        batch=plain.batch,
        reserve=_USUAL if reserve is None else f"{reserve} of each memory",
        steps=steps,
        devices=tuple(
            _fit(given, device, limit, plain, ways)
            for given, device, limit in zip(rows, with_rates(rows), limits, strict=True)
        ),
        why_unplanned=why,
    )


@dataclass(frozen=True)
class _Way:
    """Plans to hold a step by; ``name`` is what a table calls them."""

    name: str
    model: torch.nn.Module
    batches: Batches


class _Plain:
    """Peaks of a plain step at any batch.

    Every moment's bytes lie on a line, so the highest of them lies below the line through the peaks of a
    smaller and a larger batch. Both are run on fake tensors.
    """

    def __init__(self, once: Simulation, run: Callable[[int], Simulation]) -> None:
        self.work, self.batch = once.work, once.input_shapes[0][0]
        self.ways: Sequence[_Way] = ()
        self._run, self._peaks = run, {self.batch: once.trace.peak().nbytes}
        self._profiled: dict[int, int] = {}

    def peak(self, size: int) -> int:
        """Bytes of a step of that batch; the higher one, where profiles predict it too."""
        low, high = self.batch, self.batch
        while high < size:
            low, high = high, high * (_APART if high < _NEAR * self.batch else _APART**2)
        while low > size:
            low, high = max(low // _APART, 1), low
        pairs = zip(self._known(low), self._known(high), strict=True)
        beyond = (size - low) / max(high - low, 1)
        return max(one + math.ceil((two - one) * beyond) for one, two in pairs)

    def _known(self, size: int) -> tuple[int, ...]:
        if size not in self._peaks:
            self._peaks[size] = self._run(size).trace.peak().nbytes
        if self.ways and size not in self._profiled:
            self._profiled[size] = self.ways[0].batches.plain_peak(size)
        return (self._peaks[size], *([self._profiled[size]] if self.ways else []))

    def holds(self, limit: int, size: int) -> bool:
        """Whether such a step takes no more bytes."""
        return self.peak(size) <= limit


def _fit(given: Device, device: Device, limit: int, plain: _Plain, ways: Sequence[_Way]) -> DeviceFit:
    """What a device, given with or without rates, can do within the limit."""
    largest = planner.largest_batch(functools.partial(plain.holds, limit), plain.batch)
    most = max([largest, *(way.batches.largest(limit, max(largest, 1), share=_NEARLY) for way in ways[-1:])])
    fits, peak, ratio = "plain" if plain.holds(limit, plain.batch) else "", plain.peak(plain.batch), 1.0
    for way in ways:
        if not fits:
            with contextlib.suppress(BudgetError):
                plan = way.batches.plan(way.model, plain.batch, limit, predicted=True)
                fits, peak = way.name, plan.predicted_peak_bytes
                ratio = plan.predicted_seconds / plan.plain_seconds
    seconds = ratio * planner.roofline_seconds(plain.work, device)
    least, likely, longest = (over * seconds for over in device.over_roofline)
    return DeviceFit(
        device=device.name,
        memory_bytes=device.memory_bytes,
        fits=fits,
        peak_bytes=peak,
        plain_batch=largest,
        batch=most,
        time_ratio=ratio,
        seconds=(least, likely, longest),
        measured=bool(given.over_roofline),
    )


def _ways(
    once: Simulation,
    plain_peak: Callable[[int], int],
    model: torch.nn.Module | Callable[[], torch.nn.Module],
    described: Mapping[str, Any],
    optimizer: str,
    exact: bool,
    noise: float | None,
    on_progress: Progress | None,
) -> tuple[list[_Way], str]:
    """Exact plans, and those of some noise, from profiles made here; or why there are none."""
    try:
        room = free_bytes(_HOST)
    except OptionError:
        return [], "this system does not say how much memory is free, which plans need. Run this on Linux."
    needed = once.parameter_bytes + once.gradient_bytes + once.optimizer_bytes + once.buffer_bytes
    if needed > room:
        return [], (
            f"parameters, gradients and optimizer state take {exact_bytes(needed)}, and this host has "
            f"{exact_bytes(room)} free. Run this where there is more."
        )
    try:
        with within_room("the small batches by which plans are made"):
            made = model if isinstance(model, torch.nn.Module) else model().train()
            allowed = plannable(made, noise, exact)
            step = _real_step(made, described, optimizer, allowed, on_progress)
            barred = {Action.OFFLOAD}
            limit = min(room, _AMPLE * plain_peak(step.batch))
            known = {size: without(seen, barred) for size, seen in probe(step, limit).items()}
    except (BudgetError, UnsupportedModelError, CaptureError, PlanError) as error:
        return [], str(error)
    first = step.of_size(min(known))
    noises = {"exact plan": 0.0, f"noise {allowed:g} plan": allowed} if allowed else {"exact plan": 0.0}
    return [
        _Way(name, made, Batches(dataclasses.replace(first, noise=each), known, is_run=False))
        for name, each in noises.items()
    ], ""


def _real_step(
    model: torch.nn.Module,
    described: Mapping[str, Any],
    optimizer: str,
    noise: float,
    on_progress: Progress | None,
) -> TrainingStep:
    sample = described["sample"]
    if sample is None:
        shape = (described["batch"] or BATCH, *(described["input_shape"] or INPUT_SHAPE))
        sample = random_inputs(model, shape, described["input_dtype"]), None
    sample, loss_fn = check_sample(sample() if callable(sample) else sample, described["loss_fn"])
    step = TrainingStep(
        model=model,
        sample=sample,
        loss_fn=loss_fn,
        optimizer=optimizer_named(optimizer)(model.parameters()),
        noise=noise,
        on_progress=on_progress,
    )
    return step.of_size(min(step.batch, _PROFILED))


def listed(devices: Devices | str | os.PathLike[str]) -> tuple[Device, ...]:
    """This machine's processor and known devices for "all"; or those given, or those of a file."""
    if devices != "all":
        return devices.devices if isinstance(devices, Devices) else Devices.load(devices).devices
    try:
        nbytes = free_bytes(_HOST)
    except OptionError:  # this system does not say
        return planner.KNOWN_DEVICES
    return _here(nbytes), *planner.KNOWN_DEVICES


def with_rates(devices: Sequence[Device]) -> tuple[Device, ...]:
    """The devices with what is unknown of them as on this machine, where rates go with speeds."""
    if all(each.is_rated and each.over_roofline and each.call_seconds for each in devices):
        return tuple(devices)
    here = next((each for each in devices if each.name == _HERE), None) or _here()
    return tuple(_completed(each, here) for each in devices)


def _completed(device: Device, here: Device) -> Device:
    ratio = device.speed / here.speed
    known = device.is_rated
    return dataclasses.replace(
        device,
        flops_per_second=device.flops_per_second if known else ratio * here.flops_per_second,
        bytes_per_second=device.bytes_per_second if known else ratio * here.bytes_per_second,
        call_seconds=device.call_seconds or here.call_seconds,
        over_roofline=device.over_roofline or here.over_roofline,
    )


def _here(memory_bytes: int = 0) -> Device:
    """This machine's processor."""
    with torch.inference_mode(False), torch.enable_grad():
        plain = Device(name=_HERE, memory_bytes=memory_bytes, speed=measure_speed(_HOST), type="cpu")
        return rated(plain, _HOST)


def room_on(device: Device, reserve: int | str | None = None) -> int:
    """Bytes for a step's tensors.

    Raises:
        OptionError: the reserve is no size, or leaves nothing.
    """
    if reserve is None:
        share, least = (0.35, _PROCESS) if device.type == "cpu" else (0.10, 0)
        return max(device.memory_bytes - max(int(share * device.memory_bytes), least), 1)
    size, is_share = (0.0, False) if reserve in (0, "0", "0%") else size_named(reserve, "reserve")
    left = int(device.memory_bytes - (size * device.memory_bytes if is_share else size))
    if left <= 0:
        raise OptionError(
            f"reserve {reserve!r} leaves nothing of the {device.memory_bytes} bytes of '{device.name}'."
        )
    return left

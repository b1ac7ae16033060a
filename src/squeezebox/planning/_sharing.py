"""Several jobs on one device: whether they fit together, and how well they keep their deadlines."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from squeezebox import planner
from squeezebox.planning._estimate import simulated
from squeezebox.planning._feasibility import listed, room_on, with_rates
from squeezebox.profiling import Simulation
from squeezebox.reports import JobFit, Scenario, SharedDevice
from squeezebox.schema import Device, Devices, Frame, Job, JobKind, JobSpec
from squeezebox.steps import stand_in


@dataclass(frozen=True, kw_only=True, slots=True)
class SharedStep:
    """A job, what makes its model, and arguments of :func:`estimate` for its step."""

    spec: JobSpec
    model: torch.nn.Module | Callable[[], torch.nn.Module]
    described: Mapping[str, Any]


def shared(steps: Sequence[SharedStep], devices: Devices | str | os.PathLike[str] = "all") -> Scenario:
    """Let the jobs share each device by itself, in time and in memory, and score them.

    The device works one step at a time, of those that wait the one that is due first. Parameters and
    optimizer state of all jobs stay in its memory. What a step takes beyond is there while it runs.

    Args:
        steps: of the jobs. They are run on fake tensors.
        devices: see :func:`feasibility`.
    """
    simulations = [_simulated(each) for each in steps]
    return Scenario(devices=tuple(_on(device, steps, simulations) for device in with_rates(listed(devices))))


def _simulated(step: SharedStep) -> Simulation:
    trains = step.spec.kind is JobKind.TRAINING
    described = dict(step.described)
    if trains and described.get("loss_fn") is None:
        described["loss_fn"] = stand_in
    return simulated(step.model, **described, optimizer=step.spec.optimizer, trains=trains)[0]


def _on(device: Device, steps: Sequence[SharedStep], simulations: Sequence[Simulation]) -> SharedDevice:
    jobs = [_job(each.spec, found, device) for each, found in zip(steps, simulations, strict=True)]
    frames = planner.run_jobs(jobs)
    scores = planner.score_jobs(frames, device.memory_bytes)
    return SharedDevice(
        device=device.name,
        memory_bytes=device.memory_bytes,
        room_bytes=room_on(device),
        peak_bytes=planner.jobs_peak(jobs),
        score=sum(scores.values()) / len(scores),
        jobs=tuple(
            _fit(job, each.spec, [frame for frame in frames if frame.job == job.name], scores[job.name])
            for each, job in zip(steps, jobs, strict=True)
        ),
    )


def _job(spec: JobSpec, found: Simulation, device: Device) -> Job:
    return Job(
        name=spec.name,
        every_seconds=spec.every_seconds,
        deadline_seconds=spec.deadline_seconds or spec.every_seconds,
        frames=spec.frames,
        seconds=device.over_roofline[1] * planner.roofline_seconds(found.work, device),
        peak_bytes=found.trace.peak().nbytes,
        resident_bytes=found.parameter_bytes + found.buffer_bytes + found.optimizer_bytes,
    )


def _fit(job: Job, spec: JobSpec, frames: Sequence[Frame], score: float) -> JobFit:
    done = [frame for frame in frames if frame.done_at is not None]
    return JobFit(
        job=job.name,
        kind=spec.kind.value,
        frames=len(frames),
        completed=len(done),
        in_time=sum(frame.done_at is not None and frame.done_at <= frame.due_at for frame in done),
        seconds=job.seconds,
        peak_bytes=job.peak_bytes,
        score=score,
    )

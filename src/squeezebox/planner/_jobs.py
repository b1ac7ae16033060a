"""Several jobs on one device: what runs when, and how well that went."""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Iterator, Sequence

from squeezebox.schema import Frame, Job

_STEEPNESS = 15.0  # of XRBench's score of deadlines, whose times are in milliseconds


def jobs_peak(jobs: Sequence[Job]) -> int:
    """The most bytes that these jobs hold together: what stays of each, and what one of them runs with."""
    return sum(job.resident_bytes for job in jobs) + max(
        (job.peak_bytes - job.resident_bytes for job in jobs), default=0
    )


def run_jobs(jobs: Sequence[Job]) -> tuple[Frame, ...]:
    """What one device does that works one frame at a time, to its end.

    Of the frames that are there, the one that is due first begins. A frame is dropped that has not begun
    when its job's next one comes. All jobs begin at 0.

    Returns:
        The frames in the order of their arrival.
    """
    resident = sum(job.resident_bytes for job in jobs)
    coming = deque(sorted(_arrivals(jobs)))
    ready: list[tuple[float, float, int, int]] = []  # the earliest deadline first
    frames: list[tuple[float, int, Frame]] = []
    now = 0.0
    while coming or ready:
        now = max(now, coming[0][0]) if not ready else now
        while coming and coming[0][0] <= now:
            came, which, number = coming.popleft()
            heapq.heappush(ready, (came + jobs[which].deadline_seconds, came, which, number))
        due, came, which, number = heapq.heappop(ready)
        job = jobs[which]
        dropped = number < job.frames - 1 and now >= came + job.every_seconds
        now += 0.0 if dropped else job.seconds
        frame = Frame(
            job=job.name,
            came_at=came,
            due_at=due,
            done_at=None if dropped else now,
            nbytes=resident - job.resident_bytes + job.peak_bytes,
        )
        frames.append((came, which, frame))
    frames.sort(key=lambda each: each[:2])
    return tuple(frame for *_, frame in frames)


def _arrivals(jobs: Sequence[Job]) -> Iterator[tuple[float, int, int]]:
    for which, job in enumerate(jobs):
        for number in range(job.frames):
            yield number * job.every_seconds, which, number


def score_jobs(frames: Sequence[Frame], capacity_bytes: int) -> dict[str, float]:
    """XRBench's score of each job: from 0 to 1.

    The share of frames that were completed, times the mean over these of

        1 / (1 + exp(15 (done - due))) * (1 - bytes / capacity)

    with times in milliseconds. XRBench has energy where this has memory. Its score of a scenario is the mean
    over jobs.
    """
    names = dict.fromkeys(frame.job for frame in frames)
    return {name: _score([frame for frame in frames if frame.job == name], capacity_bytes) for name in names}


def _score(frames: Sequence[Frame], capacity_bytes: int) -> float:
    parts = [
        _in_time(1e3 * (frame.done_at - frame.due_at)) * max(1.0 - frame.nbytes / capacity_bytes, 0.0)
        for frame in frames
        if frame.done_at is not None
    ]
    return sum(parts) / len(parts) * (len(parts) / len(frames)) if parts else 0.0


def _in_time(late: float) -> float:
    """Of milliseconds past the deadline; written so that nothing overflows."""
    return 0.5 * (1.0 - math.tanh(0.5 * _STEEPNESS * late))

"""What a step's operators compute and move, and what several jobs do on one device."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """Operators that are alike: each computes ``flops``, reads and writes ``moved_bytes``; ``times`` of them.

    A multiplication and an addition are two flops. Only products, convolutions, attention and recurrent
    layers have any: what other operators compute takes no longer than to read and write it.
    """

    flops: int
    moved_bytes: int
    times: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """Something that comes again and again: ``frames`` times, every ``every_seconds``, each with a deadline.

    ``deadline_seconds`` counts from a frame's arrival. A frame takes ``seconds``, and while it runs
    ``peak_bytes``; ``resident_bytes`` of these stay between frames: parameters, state.
    """

    name: str
    every_seconds: float
    deadline_seconds: float
    frames: int
    seconds: float
    peak_bytes: int
    resident_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Frame:
    """One frame of a job: when it came, was due and was done; ``done_at`` is None where it was dropped.

    ``nbytes`` is what the device held while it ran.
    """

    job: str
    came_at: float
    due_at: float
    done_at: float | None
    nbytes: int

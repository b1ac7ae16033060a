"""Buffers of known size and lifetime, and where each of them lies in one block of memory."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Buffer:
    """Bytes that nobody else may touch during [lower, upper), counted in steps of time."""

    name: str
    lower: int
    upper: int
    nbytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """Where buffers lie in an arena of ``nbytes``.

    ``offsets`` are in the order of the buffers, in bytes from the arena's start, each a multiple of
    ``alignment``. No arrangement with that alignment needs fewer than ``lower_bound_bytes``: so much must be
    there at the same time. ``packer`` names the algorithm that found the offsets.
    """

    offsets: tuple[int, ...]
    nbytes: int
    lower_bound_bytes: int
    alignment: int
    packer: str

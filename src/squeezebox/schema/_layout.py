"""Operators and their buffers, and where each of these lies in one block of memory."""

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


@dataclass(frozen=True, kw_only=True, slots=True)
class Operator:
    """What is issued to a stream: the names of the tensors it reads and writes.

    It runs after the operator issued before it to the same stream, after those that first write what it
    reads or writes, and after those called ``waits``, as by an event recorded behind each of these. It may
    run at the same time as any other.
    """

    name: str
    stream: str
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    waits: tuple[str, ...] = ()

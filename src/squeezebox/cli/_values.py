"""Option values: sizes, seconds, lists of them with one for every stage, and files."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

from squeezebox.schema import Link, OptionError, parse_size

Number = TypeVar("Number", int, float)

_LONGEST, _SHORTEST = 1e9, 1e-9  # seconds


def per_stage(option: str, text: str, stages: int, read: Callable[[str, str], Number]) -> tuple[Number, ...]:
    """A value for every stage, from one for all or one each, joined by commas.

    Raises:
        OptionError: there are neither one nor as many as stages, or ``read`` refuses one.
    """
    values = tuple(read(option, each.strip()) for each in text.split(","))
    if len(values) not in (1, stages):
        raise OptionError(
            f"{option} {text} has {len(values)} values for {stages} stages; give one for all, or {stages}."
        )
    return values * stages if len(values) == 1 else values


def parse_seconds(option: str, text: str) -> float:
    """Seconds of something that takes time: a nanosecond or more.

    Raises:
        OptionError: it is no number, or out of range.
    """
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not _SHORTEST <= value <= _LONGEST:
        raise OptionError(
            f"{option} {text or 'nothing'} is no number of seconds from {_SHORTEST:g} to {_LONGEST:g}; write "
            f"{option} 1.5, or one for every stage: {option} 1,1.5,1,1."
        )
    return value


def link_of(bandwidth: str | None, latency: float) -> Link | None:
    """The link of --bandwidth and --latency, if it is given.

    Raises:
        OptionError: one is out of range, or there is a latency alone.
    """
    require_delay("--latency", latency)
    if bandwidth is not None:
        return Link(bytes_per_second=parse_size("--bandwidth", bandwidth), latency_seconds=latency)
    if latency:
        raise OptionError(f"--latency {latency:g} goes with --bandwidth; give that too, or leave it out.")
    return None


def require_delay(option: str, seconds: float) -> float:
    """The same seconds, from 0.

    Raises:
        OptionError: they are out of range.
    """
    if not 0.0 <= seconds <= _LONGEST:
        raise OptionError(
            f"{option} {seconds:g} is no number of seconds from 0 to {_LONGEST:g}; give 0 for none."
        )
    return seconds


def require_apart(written: Mapping[str, Path | None], read: Mapping[str, Path | None] | None = None) -> None:
    """Let no file that a command writes be one that it reads, or another one that it writes.

    Args:
        written: by the option that names it; None where it is not given.
        read: the same.

    Raises:
        OptionError: one would replace another.
    """
    taken: dict[str, str] = {}
    for option, path in {**(read or {}), **written}.items():
        if path is None or (os.path.exists(path) and not os.path.isfile(path)):  # /dev/null takes any number
            continue
        other = taken.setdefault(os.path.realpath(path), option)
        if other != option and option in written:
            raise OptionError(f"{option} {path} would replace the file of {other}; name another.")

"""How far results of operators reach, from how far their arguments do: interval arithmetic on ATen.

An interval holds every element of a tensor. Rules are sound for real numbers; :func:`widened` adds what
rounding does. A rule that is not there is no mistake: the result's own elements stand for it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Interval(NamedTuple):
    """From ``low`` to ``high``, both included."""

    low: float
    high: float

    @property
    def reach(self) -> float:
        """The largest magnitude."""
        return max(abs(self.low), abs(self.high))

    def with_(self, other: Interval) -> Interval:
        """The least interval that holds both."""
        return Interval(min(self.low, other.low), max(self.high, other.high))

    def scaled(self, factor: float) -> Interval:
        """Every element times the factor."""
        return hull(self.low * factor, self.high * factor)


def hull(*values: float) -> Interval:
    """The least interval that holds them; 0 where 0 met infinity."""
    known = [0.0 if math.isnan(value) else value for value in values]  # 0 times infinity
    return Interval(min(known), max(known))


def around(reach: float) -> Interval:
    """All of at most this magnitude."""
    return Interval(-reach, reach)


def widened(found: Interval, terms: int, dtype: torch.dtype) -> Interval:
    """The interval with what rounding of as many terms may add; a cast to integers drops fractions.

    One rounding moves each end by its own share, a sum by a share of what it adds up. None changes a sign.
    A cast to booleans makes 0 or 1 of any number.
    """
    if dtype == torch.bool:
        return Interval(0.0, 1.0)
    if not dtype.is_floating_point:
        return Interval(_truncated(found.low), _truncated(found.high))
    type_ = torch.finfo(dtype)
    low, high = (
        (terms + 4) * type_.eps * (abs(end) if terms == 1 else found.reach) + type_.tiny for end in found
    )
    least, most = found.low - low, found.high + high
    return Interval(
        max(least, 0.0) if found.low >= 0.0 else least, min(most, 0.0) if found.high <= 0.0 else most
    )


def _truncated(x: float) -> float:
    return float(math.trunc(x)) if math.isfinite(x) else x


class Arguments:
    """What a rule gets: an operator's arguments, their intervals, and sums of magnitudes.

    Args:
        args: the operator's, by place.
        kwargs: those by name.
        of: the interval of a tensor or a number.
        sums: the largest sum of magnitudes of a tensor along dims, infinite where its values may change.
    """

    def __init__(
        self,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        of: Callable[[Any], Interval],
        sums: Callable[[Tensor, Sequence[int]], float],
    ) -> None:
        self.args, self.kwargs, self.of, self.sums = args, kwargs, of, sums

    def __getitem__(self, place: int) -> Interval:
        return self.of(self.args[place])

    def given(self, place: int, name: str, default: Any) -> Any:
        """An argument by place or by name."""
        return self.args[place] if len(self.args) > place else self.kwargs.get(name, default)


Rule = Callable[[Arguments], "Interval | tuple[Interval | None, ...]"]


def added(one: Interval, other: Interval) -> Interval:
    """Sums of an element of each."""
    return Interval(one.low + other.low, one.high + other.high)


def times(one: Interval, other: Interval) -> Interval:
    """Products of an element of each."""
    return hull(*(x * y for x in one for y in other))

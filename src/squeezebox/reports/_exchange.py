"""What ways of exchanging gradients take on a link, as text and as JSON."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from squeezebox.reports._saved import Saved
from squeezebox.reports._selection import Selection, select
from squeezebox.schema import human_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class ExchangeArm:
    """One way of exchanging all gradients, in training steps.

    ``step_seconds`` and ``exchange_seconds``, from the end of forward until all gradients are there, are what
    the slowest rank took in each round. ``planned_seconds`` of the latter follow from what "auto" measured;
    None where it knows no such way. ``sent_bytes`` went from a rank in a step. ``noise`` is the squared error
    over the squared gradient that packing caused in the last step.
    """

    name: str
    step_seconds: tuple[float, ...]
    exchange_seconds: tuple[float, ...]
    planned_seconds: float | None
    sent_bytes: int
    noise: float

    def times(self, other: ExchangeArm) -> float:
        """The median ratio of steps in the same round; below 1, this one is faster."""
        pairs = zip(self.step_seconds, other.step_seconds, strict=True)
        return statistics.median(mine / theirs for mine, theirs in pairs)


@dataclass(frozen=True, kw_only=True, slots=True)
class ExchangeWay:
    """What a method takes for a group: seconds for the group itself, and for each element."""

    method: str
    level: float
    noise: float
    pack_seconds: float
    pack_each_seconds: float
    send_seconds: float
    send_each_seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredExchange(Saved):
    """What ``squeezebox gradients measure`` found. ``str()`` is its tables.

    ``alone_seconds`` a step takes whose gradients stay where they are. ``groups`` are what "auto" chose:
    methods and how many parameters.
    """

    KIND, AGAIN = "table of exchanges", "squeezebox.gradients.measure_exchange(...).save(path)"

    ranks: int
    elements: int
    link_bytes_per_second: float
    alone_seconds: float
    groups: tuple[tuple[str, int], ...]
    arms: tuple[ExchangeArm, ...]
    ways: tuple[ExchangeWay, ...]

    def fastest(self) -> Selection | None:
        """The exchange with the fewest seconds a step, and how sure that is; None of one round."""
        seconds = {arm.name: arm.step_seconds for arm in self.arms}
        if len(seconds) < 2 or min(map(len, seconds.values())) < 2:
            return None
        return select(seconds, smaller_is_better=True)

    def __str__(self) -> str:
        head = (
            f"{self.elements:,} gradients between {self.ranks} ranks; the link takes "
            f"{human_bytes(int(self.link_bytes_per_second))} a second. A step without exchange takes "
            f"{_milliseconds(self.alone_seconds)} ms."
        )
        heads = "ms a step", "times plain", "ms to send", "planned", "bytes a step", "noise"
        lines = [head, "", _line("exchange", *heads), *(self._arm_line(arm) for arm in self.arms)]
        groups = ", ".join(f"{count} {method}" for method, count in self.groups)
        last = f'"To send" is from forward\'s end to the last gradient. auto sends in groups: {groups}.'
        return "\n".join([*lines, "", *self._way_lines(), "", last, *self._fastest_line()])

    def _fastest_line(self) -> list[str]:
        found = self.fastest()
        if found is None:
            return []
        if found.clear:
            return [f"{found.best} is the fastest with a chance of {found.chance:.0%}."]
        rounds = "More than 1000" if found.trials_needed is None else f"About {found.trials_needed}"
        return [
            f"{found.best} is the fastest with a chance of {found.chance:.0%}: the best ones differ by less "
            f"than "
            f"these {found.trials} rounds show. {rounds} rounds would say it with {found.wanted:.0%}."
        ]

    def _arm_line(self, arm: ExchangeArm) -> str:
        return _line(
            arm.name,
            _milliseconds(statistics.median(arm.step_seconds)),
            f"{arm.times(self.arms[0]):.2f}",
            _milliseconds(statistics.median(arm.exchange_seconds)),
            "" if arm.planned_seconds is None else _milliseconds(arm.planned_seconds),
            human_bytes(arm.sent_bytes),
            f"{arm.noise:.2g}",
        )

    def _way_lines(self) -> list[str]:
        head = _line("a group's", "pack ms", "+ ns each", "send ms", "+ ns each", "noise")
        return [head] + [
            _line(
                f"{way.method}, {way.level:.2g}" if way.noise and way.method != "fp16" else way.method,
                _milliseconds(way.pack_seconds),
                f"{1e9 * way.pack_each_seconds:.2f}",
                _milliseconds(way.send_seconds),
                f"{1e9 * way.send_each_seconds:.2f}",
                f"{way.noise:.2g}",
            )
            for way in self.ways
        ]


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:.3g}"


def _line(name: str, *columns: str) -> str:
    return f"{name:<20}" + "".join(f"{each:>14}" for each in columns)

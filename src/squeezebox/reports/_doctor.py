"""What the doctor finds in a step and in the environment, as text and as JSON."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from squeezebox.reports._saved import SavedFigures
from squeezebox.schema import (
    CheckedEnvironment,
    CheckedPackage,
    CheckedRanges,
    CheckedStep,
    Overflow,
    Redundancy,
    Waste,
    checked,
    human_bytes,
    plain_fields,
)

_MODULES = 3  # named in text; JSON has all
_MEANINGS = {
    Waste.REPEATED: "the same result was there already",
    Waste.CONSTANT: "could be computed once, before training",
    Waste.DEAD: "freed or overwritten before anything read it",
    Waste.COPY: "the original was there as long, and the same",
    Waste.OVERWRITTEN: "autograd does not see it, as through .data; gradients are wrong",
    Waste.SYNC: "the host waits for the device, and the device then for the host",
}


@dataclass(frozen=True, slots=True)
class StepCheck(SavedFigures):
    """Repeated operators, dead stores, copies, syncs, overwritten tensors of a step. ``str()`` is a table."""

    KIND, AGAIN = "checked step", "squeezebox.check_step(step).save(path)"
    FIGURES = CheckedStep

    figures: CheckedStep

    @property
    def findings(self) -> tuple[Redundancy, ...]:
        """Line by line, the slowest first."""
        return self.figures.findings

    def __str__(self) -> str:
        figures = self.figures
        lines = [
            f"one step on {figures.device}: {figures.operators} operators in {figures.seconds * 1e3:.2f} ms, "
            f"{len(figures.findings)} findings"
        ]
        if figures.repeated_on_purpose:
            lines.append(f"{figures.repeated_on_purpose} operators are repeated by checkpointing, on purpose")
        for waste in Waste:
            lines += self._of(waste)
        return "\n".join(lines)

    def _of(self, waste: Waste) -> Iterator[str]:
        found = [each for each in self.findings if each.waste is waste]
        if not found:
            return
        meaning = _MEANINGS[waste]
        if waste is Waste.SYNC and self.figures.as_device:
            meaning = "would make the host wait, were these tensors on a device"
        yield f"\n{waste.value}: {meaning}"
        for each in found:
            yield (
                f"{each.seconds * 1e3:9.3f} ms  {human_bytes(each.nbytes):>10}  {each.count:>4} x  "
                f"{each.operator}  {_where(each)}"
            )


def _where(found: Redundancy) -> str:
    """``model.py:11, forward of layers.1, layers.2; first at model.py:9 of layers.0``."""
    more = f" and {len(found.modules) - _MODULES} more" if len(found.modules) > _MODULES else ""
    modules = f" of {', '.join(found.modules[:_MODULES])}{more}" if found.modules else ""
    phase = f", {found.phase}{modules}" if found.phase else ""
    first = f"; first at {_short(found.first)}" if found.first else ""
    note = f"; {found.note}" if found.note else ""
    return f"{_short(found.file)}:{found.line}{phase}{first}{note}"


def _short(path: str) -> str:
    """From the current folder where it lies below that, or from where packages are installed."""
    here = os.path.join(os.getcwd(), "")
    return path.removeprefix(here).rpartition("site-packages/")[2]


@dataclass(frozen=True, slots=True)
class RangeCheck(SavedFigures):
    """How far a step's operators reach, and which can leave a type. ``str()`` is some sentences."""

    KIND, AGAIN = "check of ranges", "squeezebox.check_ranges(step).save(path)"
    FIGURES = CheckedRanges

    figures: CheckedRanges

    def __str__(self) -> str:
        found = self.figures
        lines = [
            f"{found.proven} of {found.operators} operators have proven ranges, for inputs and parameters up "
            f"to {found.margin:g} times as large as seen."
        ]
        lines += [_overflow(each) for each in found.overflows]
        if not found.overflows:
            lines.append("None of them can leave fp16 or bf16, nor int32 as sums of int8 products.")
        if found.unproven:
            names = ", ".join(f"{name} ({count})" for name, count in found.unproven.items())
            lines.append(f"Without a rule, and taken as seen: {names}.")
        return "\n".join(lines)


def _overflow(each: Overflow) -> str:
    where = f" of '{each.module}'" if each.module else ""
    return (
        f"{each.type}: operator {each.number}, {each.operator}{where}, is the first that can overflow: it "
        f"may reach {each.reach:.3g}, and {each.most:.3g} is the most. Divide what goes in by "
        f"2^{each.shift}. {each.count} operator{'s' if each.count > 1 else ''} can."
    )


@dataclass(frozen=True, slots=True)
class EnvironmentCheck(SavedFigures):
    """Versions, devices, packages, and what is wrong with them. ``str()`` is a page of text."""

    KIND, AGAIN = "checked environment", "squeezebox.check_environment().save(path)"
    FIGURES = CheckedEnvironment

    figures: CheckedEnvironment

    @property
    def healthy(self) -> bool:
        """Whether nothing is wrong."""
        return not self.figures.faults

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as written by :meth:`save`."""
        return plain_fields(self.figures) | {"healthy": self.healthy}

    @classmethod
    def from_dict(cls, values: Any, where: str = "") -> EnvironmentCheck:
        """The result of such values; FormatError names the field that is wrong."""
        return cls(CheckedEnvironment(**checked(CheckedEnvironment, values, where, besides=["healthy"])))

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        figures = self.figures
        width = max(map(len, figures.facts))
        yield from (f"{name:<{width}}  {fact}" for name, fact in figures.facts.items())
        yield ""
        width = max((len(each.name) for each in figures.packages), default=0)
        yield from (f"{each.name:<{width}}  {_package(each)}" for each in figures.packages)
        if figures.notes:
            yield ""
            yield from figures.notes
        if figures.faults:
            yield ""
        for each in figures.faults:
            detail = f" ({each.detail})" if each.detail else ""
            yield f"{each.package}: {each.subject}: {each.fault.value}{detail}"


def _package(package: CheckedPackage) -> str:
    if package.skipped:
        return f"{package.version}, not checked: {package.skipped}"
    return f"{package.version}, checked {package.files} files, classes of {package.loaded} loaded modules"

"""What parts of a model are computed otherwise, as text and as JSON."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass

from squeezebox.reports._saved import Saved
from squeezebox.schema import human_bytes

_PLACES = 3  # named in text; JSON has all


@dataclass(frozen=True, kw_only=True, slots=True)
class Rewrite:
    """One pattern, and the modules in whose forward it takes another form.

    ``exact``: outputs and gradients are the model's to the bit; otherwise sums are rounded in another order.
    ``before_bytes`` and ``after_bytes`` are estimates of a step's peak without and with it, together with
    those that were applied before. ``error`` is the largest difference of outputs and gradients on the
    sample, over the largest value of each tensor; None where it was not measured. ``refused`` says why it
    was not applied, "" if it was.
    """

    rule: str
    where: tuple[str, ...]
    exact: bool
    before_bytes: int
    after_bytes: int
    error: float | None = None
    refused: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rewrites(Saved):
    """What :func:`squeezebox.rewrite` found for a model and a sample. ``str()`` is a table.

    ``plain_bytes`` and ``peak_bytes`` are estimates of the step's peak before and after what is applied.
    """

    KIND, AGAIN = "table of rewrites", "squeezebox.rewrite(...).rewrites.save(path)"

    plain_bytes: int
    peak_bytes: int
    rows: tuple[Rewrite, ...]

    @property
    def applied(self) -> tuple[Rewrite, ...]:
        """Those that are in force."""
        return tuple(row for row in self.rows if not row.refused)

    @property
    def proposal(self) -> str:
        """In a sentence, what they would do before a plan."""
        rows = ", ".join(f"{row.rule} to {human_bytes(row.after_bytes)}" for row in self.applied)
        return (
            "squeezebox.rewrite(model, sample=..., loss_fn=...) before the plan, or attach(rewrite=True), "
            f"would lower a plain step's peak, by estimate: {rows}."
        )

    def __str__(self) -> str:
        if not self.rows:
            return f"No rewrite fits; the peak of a step stays {human_bytes(self.plain_bytes)}."
        lines = [_line("rewrite", "where", "rounding", "peak before", "after", "error")]
        lines += [_row(row) for row in self.rows]
        share = self.peak_bytes / self.plain_bytes if self.plain_bytes else 1.0
        lines.append(
            f"Predicted peak of a step: {human_bytes(self.plain_bytes)} before, "
            f"{human_bytes(self.peak_bytes)} after ({share:.2f} of it)."
        )
        return "\n".join(lines)


def load_rewrites(path: str | os.PathLike[str]) -> Rewrites:
    """What ``squeezebox.rewrite(...).rewrites.save(path)`` wrote.

    Raises:
        FormatError: the file is missing, damaged, or of another kind or version.
    """
    return Rewrites.load(path)


def _row(row: Rewrite) -> str:
    line = _line(
        row.rule,
        _places(row.where),
        "exact" if row.exact else "reassociates",
        human_bytes(row.before_bytes),
        human_bytes(row.after_bytes),
        "" if row.error is None else f"{row.error:.1e}",
    )
    return f"{line}  not applied: {row.refused}" if row.refused else line


def _line(rule: str, where: str, rounding: str, before: str, after: str, error: str) -> str:
    return f"{rule:<14}  {where:<28}  {rounding:<12}  {before:>11}  {after:>10}  {error:>7}".rstrip()


def _places(where: Iterable[str]) -> str:
    names = [name or "the model" for name in where]
    more = f" and {len(names) - _PLACES} more" if len(names) > _PLACES else ""
    return ", ".join(names[:_PLACES]) + more

"""An audit as a page of text."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence

from squeezebox.reports._audit import ArmComparison, Audit, AuditedOperator
from squeezebox.reports._audit_statistics import LEVEL, Figure, PartChange

_TOOLING = {
    True: "; changes more predictions than the tooling does",
    False: "; changes fewer predictions than the tooling does",
    None: "",
}
_OPERATORS = 12  # that text shows the costs of; JSON has all


def audit_text(audit: Audit) -> str:
    """The findings, the most asked for first."""
    parts = [
        *(_comparison(audit, each) for each in audit.comparisons),
        _controls(audit),
        _series(audit),
        _shares(audit.factor_shares),
        _operators(audit.operators),
        _cost(audit),
        list(audit.notes),
    ]
    return "\n\n".join("\n".join(lines) for lines in parts if lines)


def _comparison(audit: Audit, found: ArmComparison) -> list[str]:
    test, plain = found.test, audit.series[0].arm
    return [
        f"{found.arm} against {plain}: {found.verdict}{_TOOLING[found.exceeds_tooling]}",
        f"  top line      {_change(test.mean)} points, 90 % interval {_change(test.low)} to "
        f"{_change(test.high)} (bootstrap 95 %: {_change(found.difference.low)} to "
        f"{_change(found.difference.high)}), {test.count} seeds",
        f"  margin        {_points(test.margin)} points, {audit.facts['margin']:g} times the deviation "
        f"between seeds of {plain}",
        f"  tests         equivalence p = {test.p_value:.3f}, difference p = {test.p_different:.3f}",
        f"  power         {test.power:.0%} if there were no difference; " + _needed(found, plain),
        f"  churn         {_percent(found.churn)}{_beside(audit, found, 'churn')}",
        f"  weights       {_plain(found.distance)}{_beside(audit, found, 'distance')}",
        f"  variation     {', '.join(f'{name} {share:.1%}' for name, share in found.shares.items())}",
        *_parts("class", found.classes),
        *_parts("group", found.groups),
    ]


def _needed(found: ArmComparison, plain: str) -> str:
    if found.test.margin == 0.0:
        return f"the score of {plain} does not vary between seeds, so there is no margin"
    if found.seeds_needed is None:
        return "80 % needs more than 1000 seeds"
    return f"80 % needs {found.seeds_needed} seeds"


def _beside(audit: Audit, found: ArmComparison, name: str) -> str:
    """The arm's figure as a multiple of what other factors do to the first arm."""
    own, plain = getattr(found, name).value, audit.series[0].arm
    others = {each.varied: getattr(each, name).value for each in audit.series if each.arm == plain}
    wanted = {"implementation": "the tooling's", "everything": "all factors'"}
    ratios = {word: own / others[key] for key, word in wanted.items() if others.get(key)}
    told = [f"{ratio:.2f} times {word}" for word, ratio in ratios.items() if not math.isnan(ratio)]
    return f"; {', '.join(told)}" if told else ""


def _parts(kind: str, parts: Sequence[PartChange]) -> Iterator[str]:
    """The part that changed most, and all that changed significantly."""
    if not parts:
        return
    changed = [part for part in parts if part.adjusted_p < LEVEL]
    largest = max(parts, key=lambda part: abs(part.arm - part.plain))
    yield (
        f"  by {kind:<11}{len(changed)} of {len(parts)} changed (Holm, 5 %); largest: {largest.name}, "
        f"{_change(largest.arm - largest.plain)} points (deviation between seeds "
        f"{_points(largest.plain_deviation)})"
    )
    for part in changed:
        yield f"    {kind} {part.name}: {part.plain:.2%} to {part.arm:.2%}, p = {part.adjusted_p:.3f}"


def _controls(audit: Audit) -> list[str]:
    lines = []
    for control in audit.controls:
        if control.equal:
            lines.append(f"control, {control.arm} twice: equal to the bit")
            continue
        blame = f"; {control.first_unequal}" if control.first_unequal else ""
        lines.append(
            f"control, {control.arm} twice: NOT equal (churn {control.churn:.2%}, weights "
            f"{control.distance:.2g} apart){blame}. Differences below are not of the factors alone."
        )
    return lines


def _series(audit: Audit) -> list[str]:
    header = ("varied", "arm", "runs", "distinct", "top line", "deviation, points", "churn", "weights")
    rows = [
        (
            each.varied,
            each.arm,
            str(each.runs),
            str(each.distinct),
            f"{each.score:.2%}",
            _within(each.deviation, _points),
            _percent(each.churn),
            _plain(each.distance),
        )
        for each in audit.series
    ]
    return _table([header, *rows])


def _shares(shares: Mapping[str, float]) -> list[str]:
    told = ", ".join(f"{name} {share:.0%}" for name, share in shares.items())
    return [f"variance of the top line, each factor varied alone: {told}"] if shares else []


def _operators(operators: Sequence[AuditedOperator]) -> list[str]:
    if not operators:
        return []
    ways = list(operators[0].unequal)
    broken = [each for each in operators if any(each.unequal.values())]
    costly = sorted(operators, key=lambda each: -each.calls * each.deterministic_seconds)[:_OPERATORS]
    ledger = [("operator", "calls", *(f"unequal, {way}" for way in ways))]
    ledger += [(each.name, str(each.calls), *(str(each.unequal[way]) for way in ways)) for each in broken]
    costs = [("operator", "calls", "deterministic, us", "free, us", "ratio")]
    costs += [
        (
            each.name,
            str(each.calls),
            f"{1e6 * each.deterministic_seconds:.1f}",
            f"{1e6 * each.seconds:.1f}",
            f"{each.deterministic_seconds / max(each.seconds, 1e-9):.2f}",
        )
        for each in costly
    ]
    heading = f"{len(broken)} of {len(operators)} operators broke bitwise equality on the same inputs"
    return [
        heading,
        *(_table(ledger) if broken else []),
        "",
        "what determinism costs: medians of a call",
        *_table(costs),
    ]


def _cost(audit: Audit) -> list[str]:
    if audit.cost is None:
        return []
    ratio = audit.cost.deterministic_seconds / audit.cost.seconds
    return [
        f"a step with deterministic algorithms: {audit.cost.deterministic_seconds:.4g} s, without: "
        f"{audit.cost.seconds:.4g} s ({ratio:.2f}x, medians of {audit.cost.steps} steps)"
    ]


def _table(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]


def _points(share: float) -> str:
    return f"{100 * share:.3f}"


def _change(share: float) -> str:
    return f"{100 * share:+.3f}"


def _percent(figure: Figure) -> str:
    return _within(figure, "{:.2%}".format)


def _plain(figure: Figure) -> str:
    return _within(figure, "{:.3g}".format)


def _within(figure: Figure, shown: Callable[[float], str]) -> str:
    if math.isnan(figure.value):
        return "not a number"
    return f"{shown(figure.value)} ({shown(figure.low)} to {shown(figure.high)})"

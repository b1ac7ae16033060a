"""The Markdown of the budget report: what is claimed, network by network, then every measurement.

Goes in: the results of benchmarks/budget.py. Comes out: tables.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

Results = Mapping[str, Any]
PEAK_SLACK = 1.001  # of a rival's peak: as good as equal
KINDS = ("checkpointing", "offload")


def render(networks: Mapping[str, Results]) -> str:
    """All tables."""
    parts = [
        "## Summary",
        _SUMMARY,
        _table(_summary_columns(), [_summary(name, result) for name, result in networks.items()]),
        "## Budgets",
        _BUDGETS,
        _table(_BUDGET_COLUMNS, [row for name in networks for row in _budgets(name, networks[name])]),
        "## Rivals",
        _RIVALS,
        _table(_RIVAL_COLUMNS, [row for name in networks for row in _rivals(name, networks[name])]),
        "## Exact plans",
        _table(_EXACT_COLUMNS, [_exact(name, result) for name, result in networks.items()]),
        "## The greedy planner and the optimum",
        _PLANNER,
        _table(_PLANNER_COLUMNS, [row for name in networks for row in _planner(name, networks[name])]),
        "## Planning deeper networks",
        _DEEP,
        _table(_DEEP_COLUMNS, [_deep(name, result["deep"]) for name, result in networks.items()]),
    ]
    return "\n\n".join(parts)


_SUMMARY = """Peaks are of the whole step. "Beyond" is what they have beyond parameters, gradients, optimizer
state and batch; "activations" is the peak of all but these and the gradients there are at the time. Errors
are measured over predicted. "Below" counts the rival's points at which our plan has no higher peak and takes
no more seconds. Greedy over MILP is the largest, of the plan's seconds beyond a plain step and of the whole
step's."""
_BUDGETS = """Where a budget is refused, the least plan is measured. Ratios are medians (and ranges) over the
rounds. "x less" is plain over measured."""
_RIVALS = """Ours is planned for the rival's measured peak and a thousandth, or is the least plan where
that is refused; all three are timed in alternation."""
_DEEP = """The profile repeated until it has about a thousand saved tensors, planned at three budgets."""
_PLANNER = """On the profile that the budgets were planned from; seconds are beyond a plain step's."""


def _summary_columns() -> list[str]:
    return [
        "network",
        "least peak, x less",
        "beyond, x less",
        "activations, x less",
        "over budget",
        "rises as it falls",
        "peak error",
        "of beyond",
        "time error",
        *(f"below {kind}" for kind in KINDS),
        "noise / allowed",
        "saved / held at least",
        "saved / packed, all packed",
        "greedy / MILP",
        "of the step",
        "exact to the bit",
        "s",
    ]


def _summary(name: str, result: Results) -> list[str]:
    plain, rows = result["plain"], result["budgets"]
    least, allowed = rows[-1], result["settings"]["noise"]
    limited = [row["peak_bytes"] / row["budget_bytes"] for row in rows if row["budget_bytes"]]
    rises = [after["peak_bytes"] / before["peak_bytes"] for before, after in pairwise(rows)]
    packed = result["all_packed"]
    return [
        name,
        f"{plain['peak_bytes'] / least['peak_bytes']:.2f}",
        *_beyond(plain, least).split(", "),
        _above_one(limited),
        _above_one(rises),
        _percent(_farthest(row["peak_bytes"] / row["predicted_peak_bytes"] for row in rows)),
        _percent(_farthest(1.0 + _of_beyond(plain, row) for row in rows)),
        _percent(_farthest(_time_error(row) for row in rows)),
        *(_below(result["rivals"], kind) for kind in KINDS),
        f"{max(row['noise'] for row in rows) / allowed:.2f}",
        f"{least['saved_bytes'] / max(least['packed_bytes'], 1):.1f}",
        f"{packed['saved_bytes'] / packed['packed_bytes']:.1f} at noise {packed['noise']:.1e}",
        *_worst_greedy(result["planner"]),
        _yes(result["exact"]["equal"]),
        f"{result['seconds']:.0f}",
    ]


def _below(rivals: Mapping[str, Results], kind: str) -> str:
    found = [rival for name, rival in rivals.items() if name.startswith(kind)]
    return f"{sum(map(_is_below, found))} of {len(found)}" if found else ""


def _is_below(rival: Results) -> bool:
    ours = rival["ours"]
    lower = ours["peak_bytes"] <= PEAK_SLACK * rival["peak_bytes"]
    return bool(lower and ours["ratios"]["ours/theirs"]["median"] <= 1.0)


def _worst_greedy(rows: Sequence[Results]) -> tuple[str, str]:
    solved = [row for row in rows if row["milp_extra_seconds"] is not None]
    extra = [_over(row["greedy_extra_seconds"], row["milp_extra_seconds"]) for row in solved]
    steps = [_greedy_step(row) for row in solved]
    finished = "" if all(row["milp_finished"] for row in rows) else " (out of time)"
    return (f"{max(extra):.3f}{finished}", f"{max(steps):.4f}") if solved else ("none found", "")


_BUDGET_COLUMNS = [
    "network",
    "budget MiB",
    "peak MiB",
    "predicted",
    "beyond, activations: x less",
    "time / plain",
    "predicted",
    "error",
    "noise",
    "predicted",
    "saved / held",
    "kept, packed, moved, made again",
    "planning s",
]


def _budgets(name: str, result: Results) -> list[list[str]]:
    plain = result["plain"]
    first = [f"{name}, batch {result['batch']} of {result['size']}: plain", "", _mib(plain["peak_bytes"])]
    return [first, *(_budget(name, plain, row) for row in result["budgets"])]


def _budget(name: str, plain: Results, row: Results) -> list[str]:
    return [
        name,
        _budget_mib(row) + _refused(row),
        _mib(row["peak_bytes"]),
        _percent(row["peak_bytes"] / row["predicted_peak_bytes"], 2),
        _beyond(plain, row),
        _spread(row["ratios"]["ours/plain"]),
        f"{row['predicted_over_plain']:.2f}",
        _percent(_time_error(row)),
        f"{row['noise']:.1e}",
        f"{row['predicted_noise']:.1e}",
        f"{row['saved_bytes'] / max(row['packed_bytes'], 1):.1f}",
        _actions(row["by_action"]),
        f"{row['planning_seconds']:.1f}",
    ]


_RIVAL_COLUMNS = [
    "network",
    "rival",
    "peak MiB",
    "beyond, activations: x less",
    "rival / plain",
    "ours / plain",
    "ours / rival",
    "our peak MiB",
    "our noise",
    "below",
]


def _rivals(name: str, result: Results) -> list[list[str]]:
    return [_rival(name, rival, result["plain"], row) for rival, row in result["rivals"].items()]


def _rival(name: str, rival: str, plain: Results, row: Results) -> list[str]:
    ours = row["ours"]
    ratios = ours["ratios"]
    return [
        name,
        rival,
        _mib(row["peak_bytes"]),
        _beyond(plain, row),
        _spread(ratios["theirs/plain"]),
        _spread(ratios["ours/plain"]),
        _spread(ratios["ours/theirs"]),
        _mib(ours["peak_bytes"]),
        f"{ours['noise']:.1e}",
        _yes(_is_below(row)) + _refused(ours),
    ]


_EXACT_COLUMNS = [
    "network",
    "budget MiB",
    "peak MiB",
    "kept, packed, moved, made again",
    "equal to the bit",
    "plain repeats",
]


def _exact(name: str, result: Results) -> list[str]:
    row = result["exact"]
    return [
        name,
        _budget_mib(row),
        _mib(row["peak_bytes"]),
        _actions(row["by_action"]),
        _yes(row["equal"]) + "".join(f", {key}" for key in row["unequal"][:3]),
        _yes(row["repeats"]),
    ]


_DEEP_COLUMNS = ["network", "tensors", "options each, at most", "positions", "greedy s"]


def _deep(name: str, row: Results) -> list[str]:
    seconds = ", ".join(f"{each:.2f}" for each in row["seconds"])
    return [name, str(row["tensors"]), str(row["options"]), str(row["positions"]), seconds]


_PLANNER_COLUMNS = ["network", "budget MiB", "greedy s", "MILP s", "greedy / MILP", "of the step", "took s"]


def _planner(name: str, result: Results) -> list[list[str]]:
    return [_solved(name, row) for row in result["planner"]]


def _solved(name: str, row: Results) -> list[str]:
    greedy, best = row["greedy_extra_seconds"], row["milp_extra_seconds"]
    took = f"{row['greedy_took_seconds']:.2f}, {row['milp_took_seconds']:.1f}"
    columns = [name, _mib(row["budget_bytes"]), f"{greedy:.4f}"]
    if best is None:
        return [*columns, "none found", "", "", took]
    finished = "" if row["milp_finished"] else " (out of time)"
    ratios = [f"{_over(greedy, best):.3f}", f"{_greedy_step(row):.4f}"]
    return [*columns, f"{best:.4f}{finished}", *ratios, took]


def _greedy_step(row: Results) -> float:
    plain = row["plain_seconds"]
    return float((plain + row["greedy_extra_seconds"]) / (plain + row["milp_extra_seconds"]))


def _over(greedy: float, best: float) -> float:
    """Their ratio; 1 where both are no time at all."""
    return greedy / best if best > 0.0 else 1.0 if greedy <= best else float("inf")


def _time_error(row: Results) -> float:
    return float(row["ratios"]["ours/plain"]["median"] / row["predicted_over_plain"])


def _of_beyond(plain: Results, row: Results) -> float:
    beyond = max(row["peak_bytes"] - plain["fixed_bytes"], 1)
    return float((row["peak_bytes"] - row["predicted_peak_bytes"]) / beyond)


def _beyond(plain: Results, row: Results) -> str:
    """How many times less than plain: the peak beyond what no plan changes, and that of activations."""
    most, least = (max(peaks["peak_bytes"] - plain["fixed_bytes"], 1) for peaks in (plain, row))
    return f"{most / least:.2f}, {plain['activation_peak_bytes'] / row['activation_peak_bytes']:.2f}"


def _above_one(ratios: Sequence[float]) -> str:
    """How many are above 1, and the largest of these."""
    above = [ratio for ratio in ratios if ratio > 1.0]
    return f"{len(above)} of {len(ratios)}" + (f" (by {_percent(max(above), 3)})" if above else "")


def _farthest(ratios: Iterable[float]) -> float:
    """The ratio farthest from 1."""
    return max(ratios, key=lambda ratio: abs(ratio - 1.0))


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    filled = ([*row, *[""] * (len(columns) - len(row))] for row in rows)
    lines = [columns, ["---"] * len(columns), *filled]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _actions(totals: Mapping[str, Mapping[str, int]]) -> str:
    kinds = (("keep",), ("compress",), ("offload",), ("recompute", "regenerate"))
    counts = (sum(totals.get(action, {}).get("tensors", 0) for action in kind) for kind in kinds)
    return ", ".join(map(str, counts))


def _spread(row: Mapping[str, float]) -> str:
    return f"{row['median']:.2f} ({row['minimum']:.2f}..{row['maximum']:.2f})"


def _percent(ratio: float, digits: int = 1) -> str:
    return f"{100 * (ratio - 1):+.{digits}f} %"


def _budget_mib(row: Results) -> str:
    return "least" if row["budget_bytes"] is None else _mib(row["budget_bytes"])


def _refused(row: Results) -> str:
    return " (refused: least plan)" if row.get("refused") else ""


def _mib(nbytes: int) -> str:
    return f"{nbytes / 2**20:.1f}"


def _yes(value: bool) -> str:
    return "yes" if value else "NO"

"""Are the chances that `squeezebox.reports.select` states right? Simulated measurements whose truth is known.

Goes in: nothing. Comes out: benchmarks/reports/selection-<date>.json and .md.

2 to 8 settings are measured 3 to 12 times each. Their true means spread by 0.1 to 5, trials by 2, and a
measurement about them by 1, with normal, heavy or skewed tails. Of the settings that are chosen with a stated
chance, as large a share should be best.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks import _report
from squeezebox.reports import select

BINS = ((0.0, 0.5), (0.5, 0.7), (0.7, 0.9), (0.9, 1.01), (0.0, 1.01))
Draw = Callable[[np.random.Generator, tuple[int, int]], NDArray[np.float64]]


def _skewed(generator: np.random.Generator, shape: tuple[int, int]) -> NDArray[np.float64]:
    return (generator.lognormal(0, 0.8, shape) - np.exp(0.32)) / np.sqrt(np.exp(1.28) - np.exp(0.64))


TAILS: dict[str, Draw] = {
    "normal": lambda generator, shape: generator.normal(size=shape),
    "Student's, 3": lambda generator, shape: generator.standard_t(3, shape) / 3**0.5,
    "lognormal, 0.8": _skewed,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--worlds", type=int, default=3000, help="of each kind of tails")
    arguments = parser.parse_args()
    rows = [row for tails in TAILS for row in rows_of(tails, arguments.worlds)]
    print(
        *_report.write("selection", {"settings": vars(arguments), "rows": rows}, table(rows)), file=sys.stderr
    )


def rows_of(tails: str, worlds: int) -> Iterator[dict[str, Any]]:
    """By bins of the stated chance."""
    found = list(stated(tails, worlds))
    for low, high in BINS:
        within = [each for each in found if low <= each[0] < high]
        chance, right, regret, lost = np.mean(within, axis=0)
        yield {
            "tails": tails,
            "from": low,
            "to": min(high, 1.0),
            "worlds": len(within),
            "stated": float(chance),
            "right": float(right),
            "error": float(np.sqrt(right * (1 - right) / len(within))),
            "stated_regret": float(regret),
            "regret": float(lost),
        }


def stated(tails: str, worlds: int) -> Iterator[tuple[float, bool, float, float]]:
    """(stated chance, is the chosen one best, stated regret, regret)."""
    generator = np.random.default_rng(0)
    for _ in range(worlds):
        shape = int(generator.choice([2, 3, 5, 8])), int(generator.choice([3, 4, 5, 8, 12]))
        true = generator.normal(0, 10 ** generator.uniform(-1, 0.7), shape[0])
        trials = 2 * generator.normal(size=shape[1]) + TAILS[tails](generator, shape)
        found = select({str(row): list(values) for row, values in enumerate(true[:, None] + trials)})
        best = int(found.best)
        yield found.chance, best == true.argmax(), found.regret, float(true.max() - true[best])


def table(rows: list[dict[str, Any]]) -> str:
    head = (
        "| trials' noise | stated chance | worlds | mean stated | right (standard error) "
        "| mean stated regret | regret |\n"
        "|---|---|---|---|---|---|---|\n"
    )
    return head + "\n".join(
        f"| {row['tails']} | {row['from']:.0%} to {row['to']:.0%} | {row['worlds']} | {row['stated']:.1%} | "
        f"{row['right']:.1%} ({row['error']:.1%}) | {row['stated_regret']:.3f} | {row['regret']:.3f} |"
        for row in rows
    )


if __name__ == "__main__":
    main()

"""Is what compression changes in a training below the noise? An audit of a small CNN on handwritten digits.

Goes in: scikit-learn's 1797 digits and examples/audit_digits.py. Comes out:
benchmarks/reports/audit-<date>.json and .md.
May touch: that folder, and .partial/audit within it, which keeps every finished training.

Beside the audit: how often its test errs on trainings that are the same but for their seeds, the plain arm's
split into two arms at random again and again; and simulated, where arms differ by just the margin.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import numpy as np

import squeezebox
from benchmarks import _report
from examples.audit_digits import EPOCHS, train
from squeezebox.reports import LEVEL, Audit, AuditRecord, deviation_uncertainty, equivalence

ARMS = {"plain": None, "noise 1e-3": {"noise": 1e-3}, "noise 1e-2": {"noise": 1e-2}}
SPLITS = 1000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--margin", type=float, default=1.0, help="in deviations between plain's seeds")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--alike", type=int, default=60, help="plain trainings for the rate of false alarms")
    arguments = parser.parse_args()
    folder = _report.partial("audit")
    found = squeezebox.audit(
        train,
        out=folder,
        arms=ARMS,
        seeds=arguments.seeds,
        margin=arguments.margin,
        threads=arguments.threads,
        on_progress=say,
    )
    alarms = false_alarms(arguments.alike, arguments.seeds, arguments.threads, folder)
    passes = [margin_passes(count, drift) for count in (5, 10, 20) for drift in (0.3, 1.4)]
    results = {
        "settings": vars(arguments),
        "epochs": EPOCHS,
        "false_alarms": alarms,
        "margin_passes": passes,
        "audit": found.to_dict(),
    }
    for path in _report.write("audit", results, table(found, alarms, passes)):
        print(path)


def false_alarms(alike: int, seeds: int, threads: int, folder: Path) -> dict[str, Any]:
    """How often the difference test calls two arms different that are both plain."""
    options: dict[str, Any] = {"arms": {"plain": None}, "factors": (), "threads": threads, "steps": 0}
    squeezebox.audit(train, out=folder, seeds=alike, on_progress=say, **options)
    paths = sorted(folder.glob("plain-*-everything-*.npz"))
    scores = np.array([AuditRecord.load(path).score for path in paths])
    generator = np.random.default_rng(0)
    different = 0
    for _ in range(SPLITS):
        chosen = generator.permutation(len(scores))[: 2 * seeds]
        differences = scores[chosen[:seeds]] - scores[chosen[seeds:]]
        different += equivalence(differences.tolist(), 1.0).different
    return {"trainings": len(scores), "splits": SPLITS, "seeds": seeds, "different": different / SPLITS}


def margin_passes(count: int, drift: float) -> dict[str, float]:
    """How often arms that differ by just the margin, one deviation between seeds, are found equivalent.

    Normal seeds of deviation 1, and normal drift between the arms of a seed.
    """
    generator = np.random.default_rng(0)
    known = estimated = 0
    for _ in range(SPLITS):
        spread = float(generator.standard_normal(count).std(ddof=1))
        differences = (1 + drift * generator.standard_normal(count)).tolist()
        known += equivalence(differences, spread).equivalent
        uncertainty = deviation_uncertainty(spread, count)
        estimated += equivalence(differences, spread, margin_uncertainty=uncertainty).equivalent
    return {"seeds": count, "drift": drift, "known": known / SPLITS, "estimated": estimated / SPLITS}


def table(found: Audit, alarms: dict[str, Any], passes: list[dict[str, float]]) -> str:
    lines = [
        f"| {row['seeds']} | {row['drift']} | {row['known']:.1%} | {row['estimated']:.1%} |" for row in passes
    ]
    rows = "\n".join(lines)
    return (
        f"{EPOCHS} epochs on 1200 images, 597 held out.\n\n```text\n{found}\n```\n\n"
        f"False alarms: of {alarms['splits']} random splits of {alarms['trainings']} plain trainings into "
        f"two arms of {alarms['seeds']}, {alarms['different']:.1%} were called different at the level "
        f"{LEVEL:.0%}.\n\n"
        f"Arms that differ by just the margin, found equivalent in {SPLITS} simulated audits, with the "
        f"margin taken as known and, as in an audit, as the estimate that it is (level {LEVEL:.0%}):\n\n"
        "| seeds | drift between arms, in deviations between seeds | margin known | margin estimated |\n"
        f"|---|---|---|---|\n{rows}"
    )


def say(done: int, total: int, note: str) -> None:
    print(f"{done}/{total} {note}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()

"""The loosest noise that a small character GPT bears: a calibration, and other seeds that check its level.

Goes in: the King James Bible of Debian's `bible-kjv`. Comes out:
benchmarks/reports/calibrate_text-<date>.json and .md.
May touch: that folder, and .partial/calibrate_text within it, which keeps every finished training.
"""

from __future__ import annotations

import argparse
import functools
import sys
from itertools import islice
from pathlib import Path

import squeezebox
from benchmarks import _report
from benchmarks._tasks import TASKS, loss_fn
from squeezebox.auditing import AuditRun, Outcome
from squeezebox.reports import AuditRecord, equivalence

SHOWN = 64  # passages whose predicted characters are kept
CALIBRATED = 7  # seeds that a calibration of 14 trainings may use, from 1 on


def train(run: AuditRun, steps: int) -> Outcome:
    """The first steps of the text task's training; its score is the validation loss, below 0."""
    task = TASKS["text"]
    with run.initialising():
        model = task.model()
    optimizer = task.optimizer(model)
    batches = task.batches(run.seed("order"))
    inputs, targets = next(task.batches(0))
    with run.attach(model, optimizer):
        for shown, following in islice(batches, steps):
            optimizer.zero_grad()
            with run.step():
                loss = loss_fn(model(shown), following)
            loss.backward()
            optimizer.step()
    score = -task.evaluate(model)
    outputs = model(inputs).detach().flatten(0, -2)
    return run.finish(model, outputs, targets.flatten(), score=score)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--margin", type=float, default=0.02, help="nats a character")
    parser.add_argument("--others", type=int, default=4, help="other seeds that check the level")
    arguments = parser.parse_args()
    folder = _report.partial("calibrate_text")
    call = functools.partial(train, steps=arguments.steps)
    found = squeezebox.calibrate(
        call, metric="score", margin=arguments.margin, out=folder, threads=1, on_progress=say
    )
    text = f"```text\n{found}\n```"
    results: dict[str, object] = {"settings": vars(arguments), "calibration": found.to_dict()}
    if found.options is not None and arguments.others > 1:
        losses = other_losses(call, found.options, arguments.others, folder)
        test = equivalence(losses, arguments.margin)
        results["others"] = losses
        text += (
            f"\n\nOver {test.count} other seeds the level loses {test.mean:+.4f} nats (90 % interval "
            f"{test.low:+.4f} to {test.high:+.4f})."
        )
    about = f"{TASKS['text'].about}; its first {arguments.steps} steps. Losses in nats a character."
    for path in _report.write("calibrate_text", results, f"{about}\n\n{text}"):
        print(path)


def other_losses(call: functools.partial[Outcome], options: object, others: int, folder: Path) -> list[float]:
    """Plain's score less the level's, of seeds after the calibration's."""
    seeds = CALIBRATED + 1 + others
    arms = {"plain": None, "level": options}
    squeezebox.audit(
        call, out=folder, arms=arms, seeds=seeds, factors=(), threads=1, steps=0, on_progress=say
    )
    records = [AuditRecord.load(path) for path in folder.glob("*-everything-*.npz")]
    scores = {(record.arm, record.seed): record.score for record in records}
    return [scores["plain", seed] - scores["level", seed] for seed in range(CALIBRATED + 1, seeds)]


def say(done: int, total: int, note: str) -> None:
    print(f"{done}/{total} {note}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()

"""Any nn.Module: exactness to the bit, and the noise that is measured where a noise was allowed.

Goes in: nothing; small networks of many architectures (benchmarks/_architectures.py, needs squeezebox[hf];
with --timm those of benchmarks/_timm.py, needs timm) and random batches. Comes out:
benchmarks/reports/architectures-<date>.json and .md.

Each network trains three steps plainly, with attach(exact=True), and under the exact plan of least peak:
losses and last gradients must be equal to the bit. Then it trains with noise=0.01, and after 16, 32 and 64
steps the noise of the next five batches is measured, without calibrating.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sys
from collections.abc import Callable
from typing import Any

import torch

import squeezebox
from benchmarks import _report, _timm
from benchmarks._architectures import ARCHITECTURES, Batch, Made
from squeezebox.session import Session

NOISE = 1e-2
STEPS = (16, 32, 64)
_EXACT_STEPS, _BATCHES = 3, 5


class Loss(torch.nn.Module):
    """The first of what a model returns for a batch."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: Batch) -> torch.Tensor:
        """Its loss."""
        loss: torch.Tensor = self.model(**batch)[0]
        return loss


Attach = Callable[[Loss, torch.optim.Optimizer], Session]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("networks", nargs="*", metavar="network")
    parser.add_argument("--timm", action="store_true", help="timm's networks instead of transformers'")
    parser.add_argument("--name", default="architectures", help="of the report")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    networks = _timm.NETWORKS if arguments.timm else ARCHITECTURES
    rows = []
    for name in arguments.networks or networks:
        rows.append(measure(name, networks[name]))
        print(*rows[-1].values(), file=sys.stderr, flush=True)
    print(*_report.write(arguments.name, {"noise": NOISE, "rows": rows}, render(rows)), file=sys.stderr)


def measure(name: str, make: Callable[[], Made]) -> dict[str, Any]:
    """One network's equalities and noises."""
    torch.manual_seed(0)
    made, draw = make()
    model = Loss(made).train()
    batch = draw()

    def planned(model: Loss, optimizer: torch.optim.Optimizer) -> Session:
        sample, loss_fn = (batch, None), lambda output, _: output
        plan = squeezebox.plan(model, optimizer=optimizer, exact=True, sample=sample, loss_fn=loss_fn)
        return squeezebox.attach(model, optimizer=optimizer, plan=plan)

    plain = exact_steps(model, batch, None)
    attached = exact_steps(model, batch, lambda model, _: squeezebox.attach(model, exact=True))
    return {
        "network": name,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "exact_is_equal": same(plain, attached),
        "plan_is_equal": same(plain, exact_steps(model, batch, planned)),
        **noises(model, draw),
    }


def exact_steps(model: Loss, batch: Batch, attach: Attach | None) -> list[torch.Tensor]:
    """Losses of a few steps of a copy, and the last gradients."""
    model = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    session = attach(model, optimizer) if attach is not None else None
    found = []
    for number in range(_EXACT_STEPS):
        torch.manual_seed(number)
        optimizer.zero_grad()
        loss = model(batch)
        loss.backward()
        optimizer.step()
        found.append(loss.detach())
    if session is not None:
        session.detach()
    return [*found, *(each.grad for each in model.parameters() if each.grad is not None)]


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    """Whether all are equal to the bit."""
    return len(one) == len(other) and all(map(torch.equal, one, other))


def noises(model: Loss, draw: Callable[[], Batch]) -> dict[str, Any]:
    """Medians and extremes of a few batches' noise, at a few times of a training, and bytes at its end."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    session = squeezebox.attach(model, optimizer=optimizer, noise=NOISE)
    found = {}
    for number in range(STEPS[-1]):
        optimizer.zero_grad()
        model(draw()).backward()
        optimizer.step()
        if number + 1 in STEPS:
            batches = [draw() for _ in range(_BATCHES)]
            found[number + 1] = sorted(noise_of(session, model, batch) for batch in batches)
    record = session.report().record
    session.detach()
    return {
        "noise": {str(step): statistics.median(values) for step, values in found.items()},
        "least": min(values[0] for values in found.values()),
        "most": max(values[-1] for values in found.values()),
        "saved_bytes": record.saved_bytes,
        "packed_bytes": record.packed_bytes,
    }


def noise_of(session: Session, model: Loss, batch: Batch) -> float:
    """As the session measures it, the same dropout in both runs."""
    return session.measure_noise(lambda: model(batch).backward())


def render(rows: list[dict[str, Any]]) -> str:
    """The table in Markdown."""
    steps = [str(step) for step in STEPS]
    lines = [
        f"Noise allowed: {NOISE}. Medians of {_BATCHES} batches after so many steps; least and most of all.",
        "",
        f"| network | exact | exact plan | {' | '.join(f'after {step}' for step in steps)} | least | most |",
        "| --- | --- | --- |" + " --- |" * (len(steps) + 2),
    ]
    for row in rows:
        medians = " | ".join(f"{row['noise'][step]:.4f}" for step in steps)
        equal = ["equal" if row[key] else "DIFFERS" for key in ("exact_is_equal", "plan_is_equal")]
        lines.append(
            f"| {row['network']} | {' | '.join(equal)} | {medians} | {row['least']:.5f} | {row['most']:.4f} |"
        )
    medians = [row["noise"][step] for row in rows for step in steps]
    within = [sum(value <= share * NOISE for value in medians) for share in (1, 1.5, 2)]
    equal = sum(row["exact_is_equal"] and row["plan_is_equal"] for row in rows)
    return "\n".join(
        [
            *lines,
            "",
            f"Equal to the bit: {equal} of {len(rows)}. Of {len(medians)} medians {within[0]} are at most "
            f"what was allowed, {within[1]} at most 1.5 times, {within[2]} at most twice; the highest is "
            f"{max(medians):.4f}.",
        ]
    )


if __name__ == "__main__":
    main()

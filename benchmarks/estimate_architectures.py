"""Peaks of many architectures' steps: as squeezebox.estimate foretells them, and as recorded.

Goes in: nothing; small networks of many architectures (benchmarks/_architectures.py, needs squeezebox[hf])
and random batches. Comes out: benchmarks/reports/estimate_architectures-<date>.json and .md.

Each takes two steps of SGD, in float32 and under bfloat16 autocast that every forward enters; the second is
recorded from the allocator's events. What cannot be estimated, or trained here, is listed with its reason.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import torch

import squeezebox
from benchmarks import _report
from benchmarks._architectures import ARCHITECTURES, Batch
from benchmarks.architectures import Loss
from squeezebox.profiling import record_step
from squeezebox.schema import OptionError


class Autocast(Loss):
    """The same under autocast."""

    def forward(self, batch: Batch) -> torch.Tensor:
        """Its loss."""
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(batch)


KINDS = {"float32": Loss, "autocast": Autocast}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("networks", nargs="*", default=list(ARCHITECTURES), metavar="network")
    parser.add_argument("--name", default="estimate_architectures", help="of the report")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = [measure(name, kind) for name in arguments.networks for kind in KINDS]
    print(*_report.write(arguments.name, {"rows": rows}, render(rows)), file=sys.stderr)


def measure(name: str, kind: str) -> dict[str, Any]:
    """One network."""
    torch.manual_seed(0)
    network, draw = ARCHITECTURES[name]()
    model = KINDS[kind](network)
    options: dict[str, Any] = {
        "sample": (draw(), None),
        "loss_fn": lambda loss, _: loss,
        "optimizer": torch.optim.SGD(model.parameters(), lr=1e-4),
    }
    row: dict[str, Any] = {"network": name, "precision": kind, "measured_bytes": 0}
    try:
        for _ in range(2):
            row["measured_bytes"] = measured = record_step(model, **options).peak().nbytes
    except RuntimeError as error:  # oneDNN has no LSTM in bfloat16 for a CPU without AVX-512
        return row | {"refused": f"plain PyTorch fails: {str(error).split('.')[0]}"}
    try:
        row["foretold_bytes"] = squeezebox.estimate(model, **options).peak_bytes
        row["error"] = row["foretold_bytes"] / measured - 1.0
    except OptionError as error:
        row["refused"] = str(error).split(": ", 1)[-1].split(". Check the input", 1)[0]
    print(*row.values(), file=sys.stderr, flush=True)
    return row


def render(rows: list[dict[str, Any]]) -> str:
    """The table in Markdown."""
    lines = ["| network | precision | foretold | measured | error |", "| --- | --- | --- | --- | --- |"]
    for row in rows:
        foretold = f"{row['foretold_bytes'] / 2**20:.3f} MiB" if "error" in row else row["refused"]
        error = f"{row['error']:+.2%}" if "error" in row else "-"
        measured = f"{row['measured_bytes'] / 2**20:.3f} MiB"
        lines.append(f"| {row['network']} | {row['precision']} | {foretold} | {measured} | {error} |")
    errors = [abs(row["error"]) for row in rows if "error" in row]
    within, refused = sum(error <= 0.03 for error in errors), len(rows) - len(errors)
    worst = f"the largest error {max(errors, default=0.0):.2%}"
    return "\n".join([*lines, "", f"{within} of {len(errors)} within 3 %, {worst}; {refused} refused."])


if __name__ == "__main__":
    main()

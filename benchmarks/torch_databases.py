"""Every sample of torch's own databases of operators and modules, under sessions and in plain PyTorch.

Goes in: `op_db` and `module_db` of the installed torch. Comes out: how many samples are equal to the bit, or
under noise have equal outputs and finite gradients; how many plain PyTorch itself does not compute, or not
twice alike; how many are refused. benchmarks/reports/torch_databases-<date>.json and .md.
May touch: that folder.
"""

from __future__ import annotations

import argparse
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch

import squeezebox
from benchmarks import _report
from tests.torch_db import databases
from tests.torch_db.comparing import Outcome, compared

MODES: dict[str, dict[str, Any]] = {"exact": {"exact": True}, "noise 1e-2": {"noise": 1e-2}}
DATABASES: dict[str, tuple[Callable[..., Any], Callable[..., Iterator[Any]]]] = {
    "operators": (databases.operators, databases.operator_samples),
    "modules": (databases.modules, databases.module_samples),
}


def outcome_of(sample: Any, second: bool, options: dict[str, Any]) -> Outcome:
    try:
        return compared(sample, second=second and "exact" in options, **options)
    except Exception as error:  # noqa: BLE001  (whatever it is, the report names it)
        return Outcome("failed", f"{type(error).__name__}: {str(error).splitlines()[0]}")


def counted(database: str, dtype: torch.dtype, options: dict[str, Any], most: int | None) -> dict[str, Any]:
    """How many samples came out how, and what those are that were not equal."""
    list_entries, samples_of = DATABASES[database]
    kinds: Counter[str] = Counter()
    others: Counter[str] = Counter()
    entries = list_entries(dtype)
    for entry in entries:
        second = getattr(entry, "supports_gradgrad", True)
        for sample in samples_of(entry, dtype, most):
            outcome = outcome_of(sample, second, options)
            kinds[outcome.kind] += 1
            if outcome.kind != "equal":
                others[f"{databases.name_of(entry)}: {outcome.kind}, {outcome.why}"] += 1
    return {"entries": len(entries), "samples": kinds.total(), **kinds, "others": dict(others)}


def row(names: tuple[str, str, str], found: dict[str, Any]) -> str:
    counts = (found.get(kind, 0) for kind in ("entries", "samples", "equal", "skipped", "refused", "failed"))
    return f"| {' | '.join(names)} | {' | '.join(f'{count:,}' for count in counts)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--most", type=int, help="samples of each operator and module (default: all)")
    most = parser.parse_args().most
    torch.set_num_threads(1)  # small tensors
    warnings.simplefilter("ignore")  # torch warns of what its samples try on purpose
    squeezebox.compile_kernels(float64=True)  # until then sessions would hold tensors exactly
    results: dict[str, dict[str, Any]] = {}
    rows = []
    for database in DATABASES:
        for dtype in databases.DTYPES:
            for mode, options in MODES.items():
                names = (database, str(dtype).removeprefix("torch."), mode)
                found = results[", ".join(names)] = counted(database, dtype, options, most)
                rows.append(row(names, found))
                print(rows[-1], flush=True)
    skipped = sorted({other for found in results.values() for other in found["others"]})
    table = [
        "| of | dtype | mode | entries | samples | equal | skipped | refused | failed |",
        "|---|---|---|---|---|---|---|---|---|",
        *rows,
        "",
        "Equal: outputs, gradients and second gradients are plain PyTorch's to the bit; under noise outputs "
        "are, and gradients are finite where plain's are. Skipped: plain PyTorch raises, or differs from "
        "run to run. Tensors of any size are packed. Not equal:",
        "",
        *(f"- {other}" for other in skipped),
    ]
    _report.write("torch_databases", results, "\n".join(table))


if __name__ == "__main__":
    main()

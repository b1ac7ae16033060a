"""The first training on a machine: how long it waits while kernels are not compiled yet.

Goes in: nothing; a small convolutional network, an empty folder for numba. Comes out:
benchmarks/reports/first_use-<date>.json and .md, medians over fresh processes, taken in turn.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from typing import Any

from benchmarks import _report

_STEP = """
import json, time, torch, squeezebox
from torch import nn
torch.manual_seed(0)
model = nn.Sequential(nn.Conv2d(3, 32, 3), nn.ReLU(), nn.Conv2d(32, 32, 3), nn.ReLU(), nn.Flatten())
x = torch.randn(16, 3, 32, 32)
begun = time.perf_counter()
{attach}
model(x).square().mean().backward()
print(json.dumps(time.perf_counter() - begun))
"""
_COMPILE = "import json, squeezebox; squeezebox.compile_kernels(); print(json.dumps(0))"
_IMPORT = "import squeezebox, torch; from squeezebox.codecs._cpu import _entropy_loops; print(0)"
_VALUES = "from squeezebox import codecs; import torch; codecs.require(torch.float32); print(0)"
WAYS = {
    "plain first step": (_STEP.format(attach=""), False),
    "attach and first step, kernels on disk": (_STEP.format(attach="squeezebox.attach(model)"), False),
    "attach and first step, no kernels": (_STEP.format(attach="squeezebox.attach(model)"), True),
    "importing torch, squeezebox and numba": (_IMPORT, True),
    "compiling what float32 needs": (_VALUES, True),
    "compiling all (squeezebox compile-kernels)": (_COMPILE, True),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    repeats = parser.parse_args().repeats
    found: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    with tempfile.TemporaryDirectory() as filled:
        run(_COMPILE, filled)
        for _ in range(repeats):
            for way, (program, empty) in WAYS.items():
                with tempfile.TemporaryDirectory() as folder:
                    found[way].append(run(program, folder if empty else filled))
    lines = [
        "Seconds from attach to the end of the first step; for processes that only import or compile, their "
        "processor time, imports included. Median (least to most).",
        "",
        "| | first step, s | processor time, s |",
        "| --- | --- | --- |",
    ]
    for way, rows in found.items():
        cells = [_ranged([row[name] for row in rows]) for name in ("step", "processor")]
        lines.append(
            f"| {way} | {cells[0] if 'step' in way else ''} | {cells[1] if 'step' not in way else ''} |"
        )
    for path in _report.write("first_use", {"ways": found}, "\n".join(lines)):
        print(path)


def run(program: str, folder: str) -> dict[str, Any]:
    """Seconds that the program says, and its processor time."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    said = subprocess.run(
        [sys.executable, "-c", program],
        check=True,
        capture_output=True,
        text=True,
        env={**os.environ, "NUMBA_CACHE_DIR": folder},
    ).stdout
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    processor = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"step": json.loads(said.splitlines()[-1]), "processor": processor}


def _ranged(values: list[float]) -> str:
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


if __name__ == "__main__":
    main()

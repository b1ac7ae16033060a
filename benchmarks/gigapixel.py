"""A training step on a whole 16000 x 64000 image: seconds and peak, as the command shows them.

Goes in: nothing; the photographs that come with the package. Comes out:
benchmarks/reports/gigapixel-<date>.json and .md.

Runs ``squeezebox demo --gigapixel`` in a process of its own and adds what the system says of that one. The
peak is the kernel's (VmHWM), beyond what was there before the step, torch.export included.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks import _report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--size", default="16000x64000")
    parser.add_argument("--memory", default="512MiB")
    parser.add_argument("--quick", action="store_true", help="a small image")
    if "--quick" in sys.argv[1:]:
        parser.set_defaults(size="320x1280", memory="64MiB")
    arguments = parser.parse_args()
    result = demonstrated(arguments.size, arguments.memory)
    for path in _report.write("gigapixel", result, table(result)):
        print(path)


def demonstrated(size: str, memory: str) -> dict[str, Any]:
    """What the command wrote, and the seconds of all processors."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "demo.json"
        options = ["--size", size, "--memory", memory, "--out", str(out)]
        subprocess.run([sys.executable, "-m", "squeezebox.cli", "demo", "--gigapixel", *options], check=True)
        result: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return result | {"processor_seconds": used.ru_utime + used.ru_stime}


def table(result: dict[str, Any]) -> str:
    (stage,) = result["plan"]["stages"]
    rows = [
        ("image", f"{result['settings']['size']}, {result['image']['bytes'] / 2**30:.2f} GiB, memory-mapped"),
        ("parameters", str(result["parameters"])),
        ("strips", f"{stage['strips']} of {stage['height']}, with a halo of {stage['halo']}"),
        ("memory asked for", result["settings"]["memory"]),
        ("peak foretold", f"{stage['peak_bytes'] / 2**20:.0f} MiB"),
        ("peak of the process beyond the image", f"{(result['peak_bytes'] or 0) / 2**20:.0f} MiB"),
        ("seconds of the step", f"{result['step_seconds']:.0f}"),
        ("processor seconds of the whole command", f"{result['processor_seconds']:.0f}"),
        ("loss", f"{result['losses'][0]:.6f}"),
    ]
    return "\n".join(["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows)])


if __name__ == "__main__":
    main()

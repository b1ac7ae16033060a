"""What Squeezebox adds to starting Python: `import squeezebox` beside `import torch`, and the command's help.

Goes in: nothing. Comes out: a dated report with medians over fresh interpreters, taken in turn.
May touch: subprocesses of this interpreter; no network.
"""

import argparse
import dataclasses
import subprocess
import sys

from benchmarks import _report

PROGRAMS = {
    "python": "pass",
    "import torch": "import torch",
    "import torch, squeezebox": "import torch, squeezebox",
    "squeezebox --help": "import sys; from squeezebox.cli import main; sys.argv[1:] = ['--help']; main()",
}


def run(program):
    subprocess.run([sys.executable, "-c", program], check=True, stdout=subprocess.DEVNULL)


def traced():
    """Milliseconds that `python -X importtime` counts for squeezebox, after torch."""
    command = [sys.executable, "-X", "importtime", "-c", "import torch, squeezebox"]
    lines = subprocess.run(command, check=True, capture_output=True, text=True).stderr.splitlines()
    return next(int(line.split("|")[1]) / 1000 for line in lines if line.endswith("| squeezebox"))


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=15)
    repeats = parser.parse_args().repeats
    arms = {name: (lambda program=program: run(program)) for name, program in PROGRAMS.items()}
    timed = _report.interleaved(arms, repeats)
    milliseconds = sorted(traced() for _ in range(repeats))
    rows = [
        f"| `{name}` | {spread.median:.3f} | {spread.minimum:.3f} to {spread.maximum:.3f} |"
        for name, spread in timed.seconds.items()
    ]
    table = [
        "| program | seconds, median | spread |",
        "|---|---|---|",
        *rows,
        "",
        f"`python -X importtime` counts {milliseconds[repeats // 2]:.1f} ms for `import squeezebox` after "
        f"`import torch` (median; {milliseconds[0]:.1f} to {milliseconds[-1]:.1f}).",
    ]
    payload = {"importtime_milliseconds": milliseconds, **dataclasses.asdict(timed)}
    _report.write("start_up", payload, "\n".join(table))


if __name__ == "__main__":
    main()

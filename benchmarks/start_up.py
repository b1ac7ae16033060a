"""What Squeezebox adds to starting Python: `import squeezebox` beside `import torch`, and the command's help.

Goes in: nothing. Comes out: a dated report with medians over fresh interpreters, taken in turn. Byte code is
there, as from the second start on.
May touch: subprocesses of this interpreter, a folder of their byte code; no network.
"""

import argparse
import dataclasses
import os
import resource
import statistics
import subprocess
import sys
import tempfile

from benchmarks import _report

PROGRAMS = {
    "python": "pass",
    "import torch": "import torch",
    "import torch, squeezebox": "import torch, squeezebox",
    "squeezebox --help": "import sys; from squeezebox.cli import main; sys.argv[1:] = ['--help']; main()",
}


def run(program):
    subprocess.run([sys.executable, "-c", program], check=True, stdout=subprocess.DEVNULL)


def import_cpu():
    """Milliseconds of processor time that `import squeezebox` takes after `import torch`."""
    program = (
        "import time, torch; begun = time.process_time(); import squeezebox; "
        "print(time.process_time() - begun)"
    )
    command = [sys.executable, "-c", program]
    return 1000 * float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def help_cpu():
    """Milliseconds of processor time of `squeezebox --help`, interpreter included."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    run(PROGRAMS["squeezebox --help"])
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return 1000 * (after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)


def ranged(values):
    return f"{statistics.median(values):.0f} ms ({min(values):.0f} to {max(values):.0f})"


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=15)
    repeats = parser.parse_args().repeats
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["PYTHONPYCACHEPREFIX"] = folder
        measure(repeats)


def measure(repeats):
    for program in PROGRAMS.values():
        run(program)
    arms = {name: (lambda program=program: run(program)) for name, program in PROGRAMS.items()}
    timed = _report.interleaved(arms, repeats)
    cpu = {
        "import squeezebox": [import_cpu() for _ in range(repeats)],
        "squeezebox --help": [help_cpu() for _ in range(repeats)],
    }
    rows = [
        f"| `{name}` | {spread.median:.3f} | {spread.minimum:.3f} to {spread.maximum:.3f} |"
        for name, spread in timed.seconds.items()
    ]
    table = [
        "| program | seconds, median | spread |",
        "|---|---|---|",
        *rows,
        "",
        "Processor time, which a busy machine does not stretch as it does seconds: `import squeezebox` after "
        f"`import torch` {ranged(cpu['import squeezebox'])}, `squeezebox --help` "
        f"{ranged(cpu['squeezebox --help'])}.",
    ]
    payload = {"cpu_milliseconds": cpu, **dataclasses.asdict(timed)}
    _report.write("start_up", payload, "\n".join(table))


if __name__ == "__main__":
    main()

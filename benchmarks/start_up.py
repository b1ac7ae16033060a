"""What Squeezebox adds to starting Python: `import squeezebox` beside `import torch`, and the command's help.

Goes in: nothing. Comes out: a dated report with medians over fresh interpreters, taken in turn.
May touch: subprocesses of this interpreter; no network.
"""

import statistics
import subprocess
import sys
import time

from benchmarks import _report

REPEATS = 15
PROGRAMS = {
    "python": "pass",
    "import torch": "import torch",
    "import torch, squeezebox": "import torch, squeezebox",
    "squeezebox --help": "import sys; from squeezebox.cli import main; sys.argv[1:] = ['--help']; main()",
}


def seconds(program):
    begun = time.perf_counter()
    subprocess.run([sys.executable, "-c", program], check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - begun


def measured(repeats):
    """Seconds of each program, all of them in every round so that a busy machine is busy for all."""
    rounds = [{name: seconds(program) for name, program in PROGRAMS.items()} for _ in range(repeats + 1)]
    return {name: [each[name] for each in rounds[1:]] for name in PROGRAMS}  # the first fills caches


def added(figures):
    pairs = zip(figures["import torch, squeezebox"], figures["import torch"], strict=True)
    return [both - alone for both, alone in pairs]

"""Every claim's measurement, one after the other, and on from where it ended.

    make bench
    make bench BENCHMARKS="codecs step_time"

Goes in: names of reports, or none for all. Comes out: those reports. One is made again if a file changed that
its benchmark reaches by imports, so a second call does what was interrupted or failed. All take half a day.
May touch: what the benchmarks touch, `git`, and a file in .partial for each that has not ended well.
"""

import os
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from ctypes.util import find_library
from pathlib import Path

import squeezebox
from benchmarks import _figures

COMMANDS = {  # what follows `python -m benchmarks.`, by the report's name
    "accuracy": "accuracy --workers 1",
    "architectures": "architectures",
    "architectures_timm": "architectures --timm --name architectures_timm",
    "arena": "arena --steps 27 --kinds 'noise 1e-2' 'noise 1e-2, a plan'",
    "audit": "audit --threads 1",
    "balance": "balance",
    "balance_exchange": "balance_exchange --steps 30",
    "bayesian": "bayesian",
    "budget": "budget --budgets 6 --milp-seconds 30 --seconds 2",
    "calibrate": "calibrate --worlds 200",
    "calibrate_text": "calibrate_text --steps 300 --others 0",
    "codecs": "codecs",
    "comet_table": "comet_table vgg16 resnet18 alexnet efficientnet_b0 resnet50 --checks 12 --refreshes 8",
    "compiled": "compiled",
    "compiled_equal": "compiled_equal",
    "compiled_budget": "compiled_budget efficientnet_b0 resnet50 unet vit gpt resnet18",
    "doctor": "doctor",
    "estimate": "estimate",
    "estimate_architectures": "estimate_architectures",
    "estimate_layers": "estimate_layers",
    "experts": "experts",
    "experts_ranks": "experts_ranks",
    "feasibility": "feasibility",
    "first_use": "first_use --repeats 3",
    "gigapixel": "gigapixel",
    "gigapixel_reach": "gigapixel_reach --memory 480MiB",
    "gpu": "gpu --all",
    "gradients_accuracy": "gradients accuracy --seeds 10",
    "gradients_links": "gradients links --rounds 15",
    "gradients_own": "gradients own --rounds 15",
    "embeddings": "embeddings",
    "graph_overlap": "graph_overlap",
    "graph_ranks": "graph_ranks",
    "larger_than_memory": "larger_than_memory --repeats 9",
    "made_again": "made_again --repeats 9",
    "neighbour": "neighbour",
    "offload": "offload --steps 5 --rounds 3 --mib 128 --threads 1",
    "packed_state": "packed_state",
    "pagerank": "pagerank",
    "parity": "parity",
    "parity_own": "parity_own",
    "pipeline_devices": "pipeline_devices",
    "pipeline_faults": "pipeline_faults",
    "pipeline_memory": "pipeline_memory",
    "pipeline_paper": "pipeline_paper",
    "pipeline_replicas": "pipeline_replicas --rounds 2",
    "pipeline_schedules": "pipeline_schedules --microbatches 16 --forward 0.06 --rounds 1 --batches 5",
    "pipeline_start": "pipeline_start",
    "pipeline_torch": "pipeline_torch",
    "pipeline_training": "pipeline_training",
    "pipeline_wire": "pipeline_wire",
    "planning": "planning --repeats 2",
    "prune": "prune",
    "ranges": "ranges",
    "rewrites": "rewrites --repeats 7",
    "selection": "selection",
    "sequence": "sequence --rounds 12",
    "speeds": "speeds --repeats 3",
    "start_up": "start_up",
    "static_allocation": "static_allocation --seconds 59.5",
    "step_time": "step_time --repeats 5 --apart 2",
    "step_time_fast": "step_time --speed fast --train-steps 20 --apart 2",
    "streaming": "streaming",
    "streaming_choice": "streaming_choice --side 256 --memory 12 24 48",
    "streaming_autocast": "streaming_models --autocast --name streaming_autocast",
    "streaming_models": "streaming_models",
    "streaming_rival": "streaming_rival",
    "streaming_tiles": "streaming_tiles --side 1024 --memory 24 48 --repeats 2",
    "streaming_narrow": "streaming --width 128 --networks 1 --name streaming_narrow",
    "torch_databases": "torch_databases",
    "traces": "traces",
    "ways": "ways",
    "ways_whole": "whole_step --repeats 7 --name ways_whole --ways plain checkpointing save_on_cpu "
    "'compiled, memory budget 0.5' 'torchao 8 bit' 'checkpointing, torchao 8 bit' 'states, 40%' "
    "'states, 45%' 'states, 55%' 'compiled, states, 40%' 'compiled, states, 45%' 'compiled, states, 55%'",
    "whole_step": "whole_step --repeats 5 --ways plain 'states, 40%' 'states, 45%' 'states, 55%'",
}

ONE_THREAD = (  # made with one thread, whatever the machine has
    "arena balance bayesian calibrate calibrate_text doctor experts experts_ranks "
    "made_again pipeline_devices pipeline_start rewrites speeds"
).split()
JEMALLOC = ["ways_whole"]  # made with jemalloc in place of the C library's allocator


def main(names: Sequence[str]) -> int:
    """Make them; how many failed, at most 1."""
    unknown = [name for name in names if name not in COMMANDS]
    if unknown:
        print(f"no report {', '.join(unknown)}; there are {', '.join(COMMANDS)}.", file=sys.stderr)
        return 2
    wanted, known = [name for name in names or COMMANDS if _is_possible(name)], _figures.newest()
    left = [
        name
        for name in wanted
        if name not in known or _unfinished(name).exists() or not _figures.is_current(known[name].header)
    ]
    print(f"{len(wanted) - len(left)} of {len(wanted)} reports are of this code already.", flush=True)
    if left:
        squeezebox.compile_kernels()  # until then sessions would hold tensors exactly
    failed = []
    for number, name in enumerate(left, 1):
        print(f"{number} of {len(left)}: {name}: {COMMANDS[name]}", flush=True)
        begun = time.monotonic()
        _unfinished(name).parent.mkdir(parents=True, exist_ok=True)
        _unfinished(name).touch()
        command = [sys.executable, "-m", *shlex.split(f"benchmarks.{COMMANDS[name]}")]
        made = subprocess.run(command, env=os.environ | _variables(name), check=False)
        print(
            f"{name}: {'failed' if made.returncode else 'made'} in {_shown(time.monotonic() - begun)}",
            flush=True,
        )
        if made.returncode:
            failed.append(name)
        else:
            _unfinished(name).unlink()
    if failed:
        print(f"failed: make bench BENCHMARKS={shlex.quote(' '.join(failed))}", file=sys.stderr)
    return int(bool(failed))


def _is_possible(name: str) -> bool:
    """Whether what a report is made with is here; says so if not."""
    import torch

    if name == "gpu" and not torch.cuda.is_available():
        print("gpu is left out: torch sees no CUDA device.", flush=True)
    elif name in JEMALLOC and find_library("jemalloc") is None:
        print(f"{name} is left out: jemalloc (Debian's libjemalloc2) is not installed.", flush=True)
    else:
        return True
    return False


def _variables(name: str) -> dict[str, str]:
    """What gives a benchmark and its processes one thread, or another allocator."""
    if name in JEMALLOC:
        return {"LD_PRELOAD": str(find_library("jemalloc"))}
    return {"OMP_NUM_THREADS": "1"} if name in ONE_THREAD else {}


def _unfinished(name: str) -> Path:
    """A file that is there until a report is whole: some are written network by network."""
    return _figures.PARTIAL / f"{name}.unfinished"


def _shown(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    return f"{minutes // 60} h {minutes % 60} min" if minutes >= 60 else f"{minutes} min {seconds} s"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

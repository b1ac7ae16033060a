"""How long the other ranks of a pipeline go on after one of them is stopped, and what they say of it.

Goes in: nothing. Comes out: benchmarks/reports/pipeline_faults-<date>.json and .md.

One of some gloo processes gets SIGKILL or SIGSTOP, or no room for a file: as the runner connects, in a
step, or while it saves. Each of the others notes when its error comes, on the same clock.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import resource
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from benchmarks import _ranks, _report
from squeezebox.pipeline import Runner, _runner
from squeezebox.schema import InputForm, PipelineError

CASES = [
    ("start", "SIGKILL"),
    ("start", "SIGSTOP"),
    ("step", "SIGKILL"),
    ("step", "SIGSTOP"),
    ("save", "SIGKILL"),
    ("save", "SIGSTOP"),
    ("save", "full disk"),
]
WIDTH = 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--patience", type=float, default=5.0)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="three ranks, less patience, once")
    if "--quick" in sys.argv[1:]:
        parser.set_defaults(ranks=3, patience=3.0, repeats=1)
    arguments = parser.parse_args()
    rows = [row(when, what, arguments) for when, what in CASES]
    results = {"rows": rows, "settings": vars(arguments)}
    for path in _report.write("pipeline_faults", results, table(rows, arguments.patience)):
        print(path)


def row(when: str, what: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Seconds of all survivors in all repeats, and what the last of them said."""
    seconds, message = list[float](), ""
    for _ in range(arguments.repeats):
        with tempfile.TemporaryDirectory() as folder:
            found = survivors(when, what, arguments, folder)
            happened = float(Path(folder, "happened").read_text())
        seconds += [at - happened for at, _ in found]
        message = found[-1][1].replace(folder, "checkpoints")
        print(when, what, *(f"{each:.1f}" for each in seconds), file=sys.stderr, flush=True)
    return {"when": when, "what": what, "seconds": sorted(seconds), "message": message}


def survivors(when: str, what: str, arguments: argparse.Namespace, folder: str) -> list[tuple[float, str]]:
    """When each of the other ranks raised, and what."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "squeezebox.pipeline"])
    results, ended, port = context.Queue(), context.Event(), _ranks.free_port()
    options = (arguments.ranks, port, when, what, arguments.patience, folder, results, ended)
    processes = [context.Process(target=_play, args=(rank, *options)) for rank in range(arguments.ranks)]
    for process in processes:
        process.start()
    found = [results.get(timeout=20.0 * arguments.patience) for _ in range(arguments.ranks - 1)]
    ended.set()
    for process in processes:
        process.join(1.0)
        process.kill()
    return found


def _play(
    rank: int,
    world: int,
    port: int,
    when: str,
    what: str,
    patience: float,
    folder: str,
    results: Any,
    ended: Any,
) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(world)))
    if rank == 1:
        _arrange(model, when, lambda: _happen(what, Path(folder)))
    form = InputForm(shape=(WIDTH,), dtype="float32")
    try:
        runner = Runner(
            model,
            _ranks.plan(world, world, "1f1b", world, inputs=(form,)),
            optimizer=torch.optim.AdamW(model.parameters()),
            loss_fn=nn.functional.mse_loss,
            patience=patience,
            clip=1.0,
        )
        for _ in range(4):
            runner.step(torch.zeros(world, WIDTH), torch.zeros(world, WIDTH))
            runner.save(folder)
    except PipelineError as error:
        results.put((time.time(), str(error)))
    except OSError:  # of the one whose disk is full
        pass
    ended.wait(10.0 * patience)  # the first rank has the store


def _arrange(model: nn.Sequential, when: str, happen: Callable[[], None]) -> None:
    """Let it happen as this rank connects, in its third batch, or as it saves."""
    calls = 0

    def count(*_: object) -> None:
        nonlocal calls
        calls += 1
        if calls > 2 * len(model):
            happen()

    if when == "start":
        connect = _runner.groups_of
        _runner.groups_of = lambda *given, **named: (happen(), connect(*given, **named))[1]
    elif when == "step":
        model[1].register_forward_pre_hook(count)
    else:
        model.register_state_dict_pre_hook(lambda *_: happen())


def _happen(what: str, folder: Path) -> None:
    (folder / "happened").write_text(str(time.time()))
    if what == "full disk":  # no file grows beyond
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
    else:
        os.kill(os.getpid(), getattr(signal, what))


def table(rows: list[dict[str, Any]], patience: float) -> str:
    lines = [
        f"Patience is {patience:g} s.",
        "",
        "| when | what | seconds until the others raise, median (least..most) | what they say |",
        "|---|---|---|---|",
    ]
    for each in rows:
        seconds = each["seconds"]
        spread = f"{seconds[len(seconds) // 2]:.1f} ({seconds[0]:.1f}..{seconds[-1]:.1f})"
        lines.append(f"| {each['when']} | {each['what']} | {spread} | {each['message'].split(';')[0]} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()

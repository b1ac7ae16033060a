"""How long the other ranks of a pipeline go on after one of them is stopped, and what they say of it.

Goes in: nothing. Comes out: benchmarks/reports/pipeline_faults-<date>.json and .md.

One of some gloo processes gets SIGKILL or SIGSTOP, or no room for a file: as the runner connects, in a
step, or while it saves. Each of the others notes when its error comes, on the same clock. Steps are also
those of zero-bubble schedules, and of 2BW in which the rank is one of a stage's two replicas. Rank 0 has
the store.
"""

from __future__ import annotations

import argparse
import dataclasses
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
from squeezebox.schema import InputForm, PipelineError, PipelinePlan

SIGNALS = ("SIGKILL", "SIGSTOP")
CASES = [
    ("start", "SIGKILL", "1f1b", 1),
    ("start", "SIGSTOP", "1f1b", 1),
    *(("step", what, schedule, 1) for schedule in ("1f1b", "zb-v", "zb-h2", "2bw") for what in SIGNALS),
    ("step", "SIGSTOP", "1f1b", 0),
    ("save", "SIGKILL", "1f1b", 1),
    ("save", "SIGSTOP", "1f1b", 1),
    ("save", "SIGSTOP", "1f1b", 0),
    ("save", "full disk", "1f1b", 1),
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
    rows = [row(*case, arguments) for case in CASES]
    results = {"rows": rows, "settings": vars(arguments)}
    for path in _report.write("pipeline_faults", results, table(rows, arguments.patience)):
        print(path)


def row(when: str, what: str, schedule: str, stopped: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """Seconds of all survivors in all repeats, and what the last of them said."""
    seconds, message = list[float](), ""
    for _ in range(arguments.repeats):
        with tempfile.TemporaryDirectory() as folder:
            found = survivors(
                when, what, stopped, planned(schedule, arguments.ranks), arguments.patience, folder
            )
            happened = float(Path(folder, "happened").read_text())
        seconds += [at - happened for at, _ in found]
        message = found[-1][1].replace(folder, "checkpoints")
        print(when, what, schedule, *(f"{each:.1f}" for each in seconds), file=sys.stderr, flush=True)
    case = {"when": when, "what": what, "schedule": schedule, "rank": stopped}
    return {**case, "seconds": sorted(seconds), "message": message}


def planned(schedule: str, ranks: int) -> PipelinePlan:
    """A block a stage; in 2bw the second stage has two replicas."""
    form, stages = InputForm(shape=(WIDTH,), dtype="float32"), ranks - (schedule == "2bw")
    loops = 2 if schedule == "zb-v" else 1
    plan = _ranks.plan(loops * stages, stages, schedule, 2 * ranks, loops=loops, inputs=(form,))
    if schedule != "2bw":
        return plan
    first, second, *others = plan.stages
    several = dataclasses.replace(second, replicas=2)
    return dataclasses.replace(plan, ranks=ranks, stages=(first, several, *others))


def survivors(
    when: str, what: str, stopped: int, plan: PipelinePlan, patience: float, folder: str
) -> list[tuple[float, str]]:
    """When each of the other ranks raised, and what."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "squeezebox.pipeline"])
    results, ended, port = context.Queue(), context.Event(), _ranks.free_port()
    options = (plan, port, when, what, stopped, patience, folder, results, ended)
    processes = [context.Process(target=_play, args=(rank, *options)) for rank in range(plan.ranks)]
    for process in processes:
        process.start()
    found = [results.get(timeout=20.0 * patience) for _ in range(plan.ranks - 1)]
    ended.set()
    for process in processes:
        process.join(1.0)
        process.kill()
    return found


def _play(
    rank: int,
    plan: PipelinePlan,
    port: int,
    when: str,
    what: str,
    stopped: int,
    patience: float,
    folder: str,
    results: Any,
    ended: Any,
) -> None:
    torch.set_num_threads(1)
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=plan.ranks)
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in plan.stages))
    if rank == stopped:
        _arrange(model, when, model[stopped], lambda: _happen(what, Path(folder)))
    given = torch.zeros(plan.microbatches * plan.microbatch, WIDTH)
    try:
        runner = Runner(
            model,
            plan,
            optimizer=torch.optim.AdamW(model.parameters()),
            loss_fn=nn.functional.mse_loss,
            patience=patience,
            clip=1.0,
        )
        for _ in range(4):
            runner.step(given, given)
            runner.save(folder)
    except PipelineError as error:
        results.put((time.time(), str(error)))
    except OSError:  # of the one whose disk is full
        pass
    ended.wait(10.0 * patience)  # the first rank has the store


def _arrange(model: nn.Module, when: str, own: nn.Module, happen: Callable[[], None]) -> None:
    """Let it happen as this rank connects, in its sixth forward of its first stage, or as it saves."""
    calls = 0

    def count(*_: object) -> None:
        nonlocal calls
        calls += 1
        if calls > 5:
            happen()

    if when == "start":
        connect = _runner.groups_of
        _runner.groups_of = lambda *given, **named: (happen(), connect(*given, **named))[1]
    elif when == "step":
        own.register_forward_pre_hook(count)
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
        "| when | what | schedule | rank | seconds to others' error, median (least..most) | what they say |",
        "|---|---|---|---|---|---|",
    ]
    for each in rows:
        seconds = each["seconds"]
        spread = f"{seconds[len(seconds) // 2]:.1f} ({seconds[0]:.1f}..{seconds[-1]:.1f})"
        case = " | ".join(str(each[name]) for name in ("when", "what", "schedule", "rank"))
        lines.append(f"| {case} | {spread} | {each['message'].split(';')[0]} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()

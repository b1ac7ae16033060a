"""What squeezebox.feasibility says fits a device, and steps of processes that may take no more.

Goes in: nothing; networks of benchmarks/tasks.py. Comes out: benchmarks/reports/feasibility-<date>.json, .md.

Devices of several memories are asked about for each network. Every row is then tried by processes of their
own. Such a process imports and compiles what training needs, takes a step of a small network, and makes the
model and a batch. From there on the system lets it take as many bytes as the device has, less those of the
model and the batch: it ends the process that would take more (a control group of its own, which needs root).
All that libraries take and keep counts. It trains twenty steps: of the batch that was asked about, plain or
under a plan for the same limit, or of the largest plain batch. "no" is tried with a plain step. Seconds of
plain steps without a limit stand next to the band that was foretold for this machine. The last table is how
far such processes grew over forty steps without a limit, as glibc is by default and with its option that
returns freed blocks of 64 KiB and more.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

import squeezebox
from benchmarks import _report
from benchmarks._steps import Step, step_of
from squeezebox.planning._feasibility import room_on, with_rates
from squeezebox.profiling import measure_speed, rated
from squeezebox.schema import BudgetError, Device, Devices

CASES = (("gpt", 4), ("gpt", 8), ("vit", 2), ("unet", 2), ("unet", 3), ("vit", 4))
SHARES = (0.8, 1.1, 1.4, 1.8, 3.0)  # of the plain step's peak
NOISE = 1e-3
STEPS = 20
GROUPS = Path("/sys/fs/cgroup")
RETURNING = {"MALLOC_MMAP_THRESHOLD_": "65536"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--cases", type=int, default=len(CASES), help="as many as there is time for")
    parser.add_argument("--plain", action="store_true", help="no plans, which take minutes")
    parser.add_argument("--child", nargs=4, metavar=("NETWORK", "BATCH", "BYTES", "PLAN"))
    parser.add_argument("--growth", nargs=2, metavar=("NETWORK", "BATCH"))
    arguments = parser.parse_args()
    if arguments.growth:
        print(json.dumps(grown(arguments.growth[0], int(arguments.growth[1]))))
        return
    if arguments.child:
        name, batch, nbytes, plan = arguments.child
        print(json.dumps(limited(name, int(batch), int(nbytes), plan)))
        return
    squeezebox.compile_kernels()
    here = torch.device("cpu")
    plain = Device(name="this machine", memory_bytes=1 << 34, speed=measure_speed(here), type="cpu")
    machine = rated(plain, here)
    rows, growth = [], []
    for name, batch in CASES[: arguments.cases]:
        rows += measure(name, batch, machine, plans=not arguments.plain)
        growth.append(growth_of(name, batch))
    results = {"rows": rows, "growth": growth, "machine": list(machine.over_roofline)}
    print(*_report.write("feasibility", results, render(results)), file=sys.stderr)


def measure(name: str, batch: int, machine: Device, *, plans: bool) -> list[dict[str, Any]]:
    """The rows of one network, tried."""
    step = step_of(name, batch=batch)
    options = {"sample": step.sample, "loss_fn": step.loss, "noise": NOISE, "plans": plans}
    peak = squeezebox.estimate(step.model, sample=step.sample, loss_fn=step.loss).peak_bytes
    sized = [
        Device(name=f"{share:g}", memory_bytes=int(share * peak), speed=1.0, type="cpu") for share in SHARES
    ]
    listed = Devices(devices=(machine, *with_rates([machine, *sized])[1:]), links=())
    found = squeezebox.feasibility(step.model, devices=listed, **options)
    own, *others = found.devices
    seconds = plain_seconds(step)
    rows = []
    for row, device in zip(others, sized, strict=True):
        plan = planned(step, row.fits, room_on(device))
        tried = "" if plan is None else tried_with(name, batch, row.memory_bytes, plan)
        largest = tried_with(name, row.plain_batch, row.memory_bytes) if row.plain_batch > 1 else "-"
        rows.append(
            {
                "network": f"{name}, batch {batch}",
                "peak_bytes": peak,
                "memory_bytes": row.memory_bytes,
                "fits": row.fits,
                "tried": tried or "no plan",
                "plain_batch": row.plain_batch,
                "largest_tried": largest,
                "batch": row.batch,
                "seconds": seconds,
                "foretold": list(own.seconds),
            }
        )
        print(*rows[-1].values(), file=sys.stderr, flush=True)
    return rows


def planned(step: Step, fits: str, limit: int) -> str | None:
    """The file of a plan for the limit, "" where none is needed; None where there is none."""
    if fits in ("", "plain"):
        return ""
    how: dict[str, Any] = {"exact": True} if fits == "exact plan" else {"noise": NOISE}
    optimizer = optimizer_of(step)
    try:
        plan = squeezebox.plan(
            step.model,
            sample=step.sample,
            loss_fn=step.loss,
            optimizer=optimizer,
            budget=limit,
            offload=False,
            **how,
        )
    except BudgetError:
        return None
    path = Path(tempfile.mkdtemp()) / "plan.json"
    plan.save(path)
    return str(path)


def optimizer_of(step: Step) -> torch.optim.Optimizer:
    """That of the table's default."""
    return torch.optim.SGD(step.model.parameters(), lr=1e-6, momentum=0.9)


def plain_seconds(step: Step) -> float:
    """Of a plain step, without a limit."""
    optimizer, times = optimizer_of(step), []
    for _ in range(6):
        begun = time.perf_counter()
        train(step, optimizer)
        times.append(time.perf_counter() - begun)
    return statistics.median(times[1:])


def train(step: Step, optimizer: torch.optim.Optimizer) -> None:
    """One step."""
    optimizer.zero_grad()
    step.loss(step.model(step.sample[0]), step.sample[1]).backward()
    optimizer.step()


def tried_with(name: str, batch: int, nbytes: int, plan: str = "") -> str:
    """What a process of its own says that may take so much: "trained", or that memory lacked."""
    command = [sys.executable, "-m", "benchmarks.feasibility", "--child", name, str(batch), str(nbytes), plan]
    group, _ = group_of(os.getpid())
    try:
        group.mkdir(exist_ok=True)
    except OSError as error:
        raise SystemExit(f"cannot make the control group {group} ({error.strerror}); be root.") from error
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ)
    finally:
        group.rmdir()
    if done.returncode == -signal.SIGKILL:
        return "memory lacked"
    if done.returncode == 0:
        return str(json.loads(done.stdout))
    return f"ended with {done.returncode}: {done.stderr.strip()[-200:]}"


def limited(name: str, batch: int, nbytes: int, plan: str) -> str:
    """Train in a process that may take so many bytes more than it has."""
    step = made(name, batch, squeezes=bool(plan))
    group, limit = group_of(os.getppid())
    (group / limit).write_text(str(nbytes - held_bytes(step)))
    (group / "cgroup.procs").write_text(str(os.getpid()))
    optimizer = optimizer_of(step)
    if plan:
        squeezebox.attach(step.model, optimizer=optimizer, plan=squeezebox.load_plan(plan))
    for _ in range(STEPS):
        train(step, optimizer)
    return "trained"


def group_of(process: int) -> tuple[Path, str]:
    """The folder of a process's children's control group, and the file of its limit: of version 1 or 2."""
    older = GROUPS / "memory"
    folder, limit = (older, "memory.limit_in_bytes") if older.exists() else (GROUPS, "memory.max")
    return folder / f"squeezebox-{process}", limit


def grown(name: str, batch: int) -> int:
    """Bytes by which this process's memory grows over forty steps, with what the step held before."""
    step = made(name, batch)
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins anew
    before, optimizer = status("VmRSS") - held_bytes(step), optimizer_of(step)
    for _ in range(2 * STEPS):
        train(step, optimizer)
    return status("VmHWM") - before


def growth_of(name: str, batch: int) -> dict[str, Any]:
    """Bytes of the peak, and by how many a process grows, by how glibc is set."""
    step = step_of(name, batch=batch)
    command = [sys.executable, "-m", "benchmarks.feasibility", "--growth", name, str(batch)]
    found = [
        json.loads(subprocess.run(command, capture_output=True, check=True, env=os.environ | more).stdout)
        for more in ({}, RETURNING)
    ]
    peak = squeezebox.estimate(step.model, sample=step.sample, loss_fn=step.loss).peak_bytes
    return {"network": f"{name}, batch {batch}", "peak_bytes": peak, "kept": found[0], "returned": found[1]}


def made(name: str, batch: int, *, squeezes: bool = False) -> Step:
    """A step, in a process that has all else that it needs."""
    warm_up(squeezes)
    step = step_of(name, batch=batch)
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return step


def held_bytes(step: Step) -> int:
    """Of the model and the batch."""
    return sum(each.nbytes for each in (*step.model.parameters(), *step.model.buffers(), *step.sample))


def status(key: str) -> int:
    """Bytes of this process that /proc calls so."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(f"{key}:"))


def warm_up(squeezes: bool) -> None:
    """Import and compile what a training needs, and start its threads."""
    layers = [torch.nn.Conv2d(16, 16, 3, padding=1), torch.nn.BatchNorm2d(16), torch.nn.GELU()] * 2
    model, inputs = torch.nn.Sequential(*layers), torch.randn(8, 16, 96, 96)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6, momentum=0.9)
    session = squeezebox.attach(model, optimizer=optimizer, noise=NOISE) if squeezes else None
    for _ in range(2):
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()
    if session is not None:
        session.detach()


def render(results: dict[str, Any]) -> str:
    rows = results["rows"]
    claims = [row["tried"] for row in rows if row["fits"]] + [
        row["largest_tried"] for row in rows if row["largest_tried"] != "-"
    ]
    denied = [row["tried"] for row in rows if not row["fits"]]
    times = {row["network"]: (row["seconds"], row["foretold"]) for row in rows}
    within = sum(least <= seconds <= most for seconds, (least, _, most) in times.values())
    lines = [
        f"{len(claims)} processes tried what was said to fit: {claims.count('trained')} trained.",
        f"Of {len(denied)} that were said not to, {denied.count('trained')} trained plain.",
        f"Seconds of {within} of {len(times)} networks were within the band foretold.",
        "",
        "| network | memory of the peak | said | tried | largest plain batch | tried | at most |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    lines += [
        f"| {row['network']} | {row['memory_bytes'] / row['peak_bytes']:.0%} of "
        f"{row['peak_bytes'] / 2**20:.0f} MiB | {row['fits'] or 'no'} | {row['tried']} | "
        f"{row['plain_batch']} | {row['largest_tried']} | {row['batch']} |"
        for row in rows
    ]
    lines += ["", "| network | s a step | foretold: least, likeliest, most |", "| --- | --- | --- |"]
    lines += [
        f"| {name} | {seconds:.3f} | {', '.join(f'{each:.3f}' for each in foretold)} |"
        for name, (seconds, foretold) in times.items()
    ]
    lines += [
        "",
        "| network | peak, MiB | process grew by | returning freed blocks |",
        "| --- | --- | --- | --- |",
    ]
    lines += [
        f"| {row['network']} | {row['peak_bytes'] / 2**20:.0f} | {row['kept'] / row['peak_bytes']:.0%} | "
        f"{row['returned'] / row['peak_bytes']:.0%} |"
        for row in results["growth"]
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()

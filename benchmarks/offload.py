"""Offload to a disk: seconds a GiB foretold and measured, what stays in memory, and steps beside plain ones.

Goes in: nothing; a folder on a disk. Comes out: benchmarks/reports/offload-<date>.json and .md.

The same bytes go there and back in four ways: through the system's page cache as ordinary files do; with
`sync_file_range`, read-ahead and `posix_fadvise`; through the cache with a wait for the disk after every
write; and past the cache. Residue is asked of the system (`mincore`). Then steps of a network, plain, under a
plan that moves whatever it does not pack, and under the same plan through an ordinary file. Each is in a
process of its own, whose memory the system counts, page cache included, where it lets us (control groups).
"""

from __future__ import annotations

import argparse
import ctypes
import json
import mmap
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

import squeezebox
from benchmarks import _report, models
from squeezebox.memory import BUFFER_BYTES, DiskFile, Slot, Spill, disk_folder, disk_speed
from squeezebox.reports import StepPlan
from squeezebox.schema import Action, Option

MIB, GIB = 1 << 20, 1 << 30
WAYS = ("ordinary file", "sync_file_range, fadvise", "fdatasync, fadvise", "past the cache")
ARMS = ("plain", "offload", "ordinary file")
_CHUNK = 4 * MIB
_WRITE, _WAIT = 2, 7  # flags of sync_file_range: begin; wait before, write, wait after
_LEAST = MIB // 4  # bytes of a tensor that is moved
_LIBC = ctypes.CDLL(None, use_errno=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--network", choices=("narrow", "resnet18"), default="narrow")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--size", type=int, default=128, help="side of the images")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--mib", type=int, default=256, help="moved there and back")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--name", default="offload", help="of the report")
    parser.add_argument("--arm", choices=ARMS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    if arguments.arm:
        print(json.dumps(steps(arguments)))
        return
    results = {"moving": moving(arguments.mib * MIB, arguments.rounds), **trained(arguments)}
    print(*_report.write(arguments.name, results, render(results)), file=sys.stderr)


def moving(nbytes: int, rounds: int) -> dict[str, Any]:
    """Seconds and the processor's seconds a GiB, and MiB left in the cache, by way: the median round's."""
    folder = disk_folder()
    disk_speed(folder)
    measures: dict[str, list[dict[str, float]]] = {way: [] for way in (*WAYS, "spill")}
    for _ in range(rounds):
        for way in WAYS:
            measures[way].append(_through(way, folder.path, nbytes))
        measures["spill"].append(_spilled(nbytes))
    medians = {way: sorted(found, key=lambda each: each["read"]) for way, found in measures.items()}
    speed = disk_speed(folder)
    foretold = {"write": speed.writing * GIB, "read": speed.reading * GIB, "copy": speed.leaving * GIB}
    return {
        "filesystem": folder.filesystem,
        "foretold": foretold,
        "ways": {way: found[len(found) // 2] for way, found in medians.items()},
    }


def _through(way: str, folder: str, nbytes: int) -> dict[str, float]:
    """One way, without tensors: the second time that the bytes are written, and then read."""
    page, starts = mmap.mmap(-1, _CHUNK), range(0, nbytes, _CHUNK)
    page.write(os.urandom(_CHUNK))
    if way in WAYS[2:]:
        file = DiskFile(folder, direct=way == WAYS[3])
        return _timed(
            nbytes,
            file.fileno(),
            lambda: [file.write(memoryview(page), start) for start in starts],
            lambda: [file.read(memoryview(page), start) for start in starts],
        )
    with tempfile.TemporaryFile(dir=folder, buffering=0) as plain:
        descriptor, drops = plain.fileno(), way == WAYS[1]
        return _timed(
            nbytes,
            descriptor,
            lambda: _cached_write(descriptor, page, starts, drops=drops),
            lambda: _cached_read(descriptor, page, starts, drops=drops),
        )


def _cached_write(descriptor: int, page: mmap.mmap, starts: range, *, drops: bool) -> None:
    """Chunks are begun at once, and waited for and dropped when four more have been."""
    for start in starts:
        os.pwritev(descriptor, [page], start)
        if drops:
            _sync(descriptor, start, _WRITE)
            if start >= 4 * _CHUNK:
                _drop(descriptor, start - 4 * _CHUNK)
    for start in starts[-4:] if drops else ():
        _drop(descriptor, start)


def _cached_read(descriptor: int, page: mmap.mmap, starts: range, *, drops: bool) -> None:
    for start in starts:
        if drops:
            os.posix_fadvise(descriptor, start + _CHUNK, 3 * _CHUNK, os.POSIX_FADV_WILLNEED)
        os.preadv(descriptor, [page], start)
        if drops:
            os.posix_fadvise(descriptor, start, _CHUNK, os.POSIX_FADV_DONTNEED)


def _drop(descriptor: int, start: int) -> None:
    _sync(descriptor, start, _WAIT)
    os.posix_fadvise(descriptor, start, _CHUNK, os.POSIX_FADV_DONTNEED)


def _sync(descriptor: int, start: int, flags: int) -> None:
    _LIBC.sync_file_range(descriptor, ctypes.c_int64(start), ctypes.c_int64(_CHUNK), flags)


def _spilled(nbytes: int) -> dict[str, float]:
    """Tensors of 16 MiB."""
    spill, data = Spill(), torch.randn(4 * MIB)
    out, count = torch.empty_like(data), nbytes // data.nbytes

    def write() -> None:
        slots.extend(spill.write(data) for _ in range(count))
        spill.settle()

    def read() -> None:
        while slots:
            spill.read(slots.pop(), out)

    slots: list[Any] = []
    write()
    read()
    return _timed(nbytes, spill._file.fileno(), write, read)


def _timed(nbytes: int, descriptor: int, *moves: Callable[[], object]) -> dict[str, float]:
    """The second time: on the first, the disk finds a place."""
    moves[0]()
    result: dict[str, float] = {}
    for name, move in zip(("write", "read"), moves, strict=True):
        begun, used = time.perf_counter(), time.process_time()
        move()
        result[name] = (time.perf_counter() - begun) * GIB / nbytes
        result[f"{name}_processor"] = (time.process_time() - used) * GIB / nbytes
        result[f"{name}_residue"] = cached_bytes(descriptor) / MIB
    return result


def cached_bytes(descriptor: int) -> int:
    """Of a file, in the system's page cache."""
    size = os.fstat(descriptor).st_size
    with mmap.mmap(descriptor, size) as mapped:
        pages = (ctypes.c_ubyte * -(-size // mmap.PAGESIZE))()
        start = ctypes.c_char.from_buffer(mapped)
        _LIBC.mincore(ctypes.c_void_p(ctypes.addressof(start)), ctypes.c_size_t(size), pages)
        del start
    return bytes(pages).count(1) * mmap.PAGESIZE


def trained(arguments: argparse.Namespace) -> dict[str, Any]:
    """The plan, and steps of each arm in a process of its own."""
    model, sample = network(arguments)
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "plan.json")
        plan = squeezebox.plan(
            model, sample=sample, loss_fn=functional.cross_entropy, exact=True, recompute=False
        )
        plan = moving_all(plan)
        plan.save(path)
        arms = {arm: _process(arm, path) for arm in ARMS}
    moved = sum(each.saved_bytes for each in plan.tensors if each.option.action is Action.OFFLOAD)
    digests = {row["digest"] for row in arms.values()}
    return {
        "arms": arms,
        "moved_bytes": moved,
        "network": arguments.network,
        "plain_peak_bytes": plan.plain_peak_bytes,
        "predicted_ratio": plan.predicted_seconds / plan.plain_seconds,
        "equal": len(digests) == 1,
        "buffer_bytes": BUFFER_BYTES,
    }


def moving_all(plan: StepPlan) -> StepPlan:
    """The plan with every tensor moved that it keeps, at the price of those that it moves."""
    known = [each for each in plan.tensors if each.option.action is Action.OFFLOAD]
    price = sum(each.option.seconds for each in known) / sum(each.saved_bytes for each in known)
    kept = [t for t in plan.tensors if t.option.action is Action.KEEP and t.saved_bytes >= _LEAST]
    more = {
        each.key: Option(
            action=Action.OFFLOAD,
            codec="file",
            held_bytes=0,
            working_bytes=each.saved_bytes,
            seconds=price * each.saved_bytes,
            serves=True,
        )
        for each in kept
    }
    tensors = tuple(replace(each, option=more.get(each.key, each.option)) for each in plan.tensors)
    seconds = plan.predicted_seconds + sum(option.seconds for option in more.values())
    return replace(plan, tensors=tensors, predicted_seconds=seconds)


def _process(arm: str, plan: str) -> dict[str, Any]:
    environment = {**os.environ, "SQUEEZEBOX_PLAN": plan}
    with _counted() as group:
        if group is not None:
            environment["SQUEEZEBOX_GROUP"] = str(group)
        command = [sys.executable, "-m", "benchmarks.offload", *sys.argv[1:], "--arm", arm]
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    row: dict[str, Any] = json.loads(done.stdout)
    print(arm, row, file=sys.stderr, flush=True)
    return row


@contextmanager
def _counted() -> Iterator[Path | None]:
    """A control group of our own (version 1) within the one that we are in; None without the right to it."""
    root = Path("/sys/fs/cgroup/memory")
    try:
        lines = Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines()
        own = next(line.split(":", 2)[2] for line in lines if line.split(":", 2)[1] == "memory")
        group = root / own.lstrip("/") / f"squeezebox-{os.getpid()}"
        group.mkdir()
    except (OSError, StopIteration):
        yield None
        return
    try:
        yield group
    finally:
        group.rmdir()


def network(arguments: argparse.Namespace) -> tuple[torch.nn.Module, tuple[Tensor, Tensor]]:
    """A network and a batch of noise."""
    torch.manual_seed(0)
    model = (narrow() if arguments.network == "narrow" else models.build(arguments.network, 100)).train()
    shape = (arguments.batch, 3, arguments.size, arguments.size)
    return model, (torch.randn(shape), torch.randint(100, (arguments.batch,)))


def narrow() -> torch.nn.Module:
    """Few parameters, and much to save: eight residual blocks of 16 channels at full size."""
    width = 16
    blocks = [models._basic(width, width, 1) for _ in range(8)]
    head = [torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(width, 100)]
    return torch.nn.Sequential(torch.nn.Conv2d(3, width, 3, padding=1), *blocks, *head)


def steps(arguments: argparse.Namespace) -> dict[str, Any]:
    """Steps of one arm: seconds, plain and its own in turn, residue, and what the system counts."""
    group = os.environ.get("SQUEEZEBOX_GROUP")
    if group is not None:
        (Path(group) / "cgroup.procs").write_text(str(os.getpid()))
    model, (inputs, target) = network(arguments)
    bare, session = network(arguments)[0], None
    if arguments.arm != "plain":
        plan = squeezebox.load_plan(os.environ["SQUEEZEBOX_PLAN"])
        session = squeezebox.attach(model, plan=plan)
        if arguments.arm == "ordinary file":
            session.engine.store.spill = Ordinary()

    def step(network: torch.nn.Module) -> Tensor:
        network.zero_grad(set_to_none=True)
        loss = functional.cross_entropy(network(inputs), target)
        residues.append(_residue(session))
        loss.backward()
        residues.append(_residue(session))
        return loss

    residues: list[float] = []
    before = _usage(group, reset=True)
    for _ in range(2):
        step(model)
    most = _usage(group, most=True)
    fns = {"own": lambda: step(model), "plain": lambda: step(bare)}
    compared = _report.interleaved(fns, arguments.steps, warmup=0)
    ratio = compared.ratios["own/plain"]
    digest = sum(float(parameter.grad.double().abs().sum()) for parameter in model.parameters())
    return {
        "digest": digest.hex(),
        "seconds": compared.seconds["own"].minimum,
        "ratio": compared.seconds["own"].minimum / compared.seconds["plain"].minimum,
        "ratio_median": [ratio.median, ratio.minimum, ratio.maximum],
        "residue_mib": max(residues) / MIB,
        "counted_mib": None if before is None else {"before": before / MIB, "most": most / MIB},
    }


class Ordinary:
    """As Spill, through the page cache: what offload must not be."""

    record = None

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile(dir=disk_folder().path, buffering=0)
        self._end, self.fileno = 0, self._file.fileno

    def write(self, flat: Tensor) -> Slot:
        offset, self._end = self._end, self._end + flat.nbytes
        os.pwritev(self._file.fileno(), [flat.view(torch.uint8).numpy()], offset)
        return Slot(offset, flat.nbytes, 0)

    def read(self, slot: Slot, out: Tensor) -> None:
        os.preadv(self._file.fileno(), [out.view(torch.uint8).numpy()], slot.offset)
        if slot.offset == 0:
            self._end = 0  # backward has asked for the first


def _residue(session: Any) -> int:
    spill = session.engine.store.spill if session is not None else None
    file = spill._file if spill is not None else None
    return cached_bytes(file.fileno()) if file is not None and os.fstat(file.fileno()).st_size else 0


def _usage(group: str | None, *, most: bool = False, reset: bool = False) -> int | None:
    """Bytes that the system counts for this process, page cache included; ``most`` since the last reset."""
    if group is None:
        return None
    if reset:
        (Path(group) / "memory.max_usage_in_bytes").write_text("0")
    name = "memory.max_usage_in_bytes" if most else "memory.usage_in_bytes"
    return int((Path(group) / name).read_text())


def render(results: dict[str, Any]) -> str:
    """The tables in Markdown."""
    found, arms = results["moving"], results["arms"]
    foretold = found["foretold"]
    lines = [
        f"Seconds a GiB on {found['filesystem'] or 'a disk'}, the processor's in brackets. Foretold by a plan"
        f": {foretold['write']:.2f} to write, {foretold['read']:.2f} to read, "
        f"{foretold['copy']:.2f} to copy.",
        "",
        "| way | write | read | MiB in the page cache after writing | after reading |",
        "| --- | --- | --- | --- | --- |",
        *(
            f"| {way} | {row['write']:.2f} ({row['write_processor']:.2f}) "
            f"| {row['read']:.2f} ({row['read_processor']:.2f}) "
            f"| {row['write_residue']:.1f} | {row['read_residue']:.1f} |"
            for way, row in found["ways"].items()
        ),
        "",
        f"Steps of {results['network']}, of which the plan moves {results['moved_bytes'] / MIB:.0f} MiB, "
        f"through {results['buffer_bytes'] / MIB:.0f} MiB of buffers. "
        f"Time foretold: {results['predicted_ratio']:.2f} of the plain step's. Gradients are "
        f"{'equal to the bit' if results['equal'] else 'NOT equal'}.",
        "",
        "| steps | time / plain, least of each | ratio in a round: median (range) | MiB of the file in the "
        "page cache, at most | MiB the system counts for the process, page cache included: before the steps, "
        "at most |",
        "| --- | --- | --- | --- | --- |",
    ]
    for arm, row in arms.items():
        median, low, high = row["ratio_median"]
        counted = row["counted_mib"]
        shown = "" if counted is None else f"{counted['before']:.0f}, {counted['most']:.0f}"
        lines.append(
            f"| {arm} | {row['ratio']:.2f} | {median:.2f} ({low:.2f} to {high:.2f}) "
            f"| {row['residue_mib']:.1f} | {shown} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()

"""Codecs, training steps, largest batches and waiting, on a CUDA device.

Goes in: nothing; networks of benchmarks/models.py on crops of photographs (of Fashion-MNIST's images where
scikit-image is not installed) or on the text of this package. Comes out: benchmarks/reports/gpu-<date>.json
and .md. Parts are codecs, networks and limited; --all is all of them. On a CPU --quick shows that it runs.

It takes about as many --minutes as it is given. Networks get equal shares of what is there for them, and the
limited memory a third; what would no longer fit is named in the report as not run, the least telling last.
In the limited memory, arms of a plan take the batch that squeezebox.max_batch names for it. The report is
written anew with every network, arm there and size of codecs that is done.

Bytes moved by a codec are those of the tensor and of the packed one, each once; the bandwidth they are
compared with is that of copying the tensor, measured in the same round, all of them as often as moves a
gibibyte. A training step is zero_grad (to zero: gradients stay allocated),
forward, loss, backward and the optimizer's step, and is timed in turn with the compiled plain one. Peaks
are the allocator's, beyond parameters, gradients, optimizer state and batch; what lies idle in parts of its
blocks ("split") is how far these are fragmented. Noise is the squared error of
all gradients over their squared norm, on the same batch and against eager in the same dtype.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from benchmarks import _report, compiled
from benchmarks._gpu_tables import tables
from benchmarks._limited import limited
from benchmarks._trainings import (
    NETWORKS,
    Arm,
    Clock,
    Training,
    arms,
    compiled_whole,
    device,
    free,
    precision,
    training,
)
from squeezebox import codecs
from squeezebox.schema import Role
from squeezebox.session import Session

PARTS = ("codecs", "networks", "limited")
SPEEDS = (
    *(f"{family}{bits}" for family in ("zero", "minmax") for bits in (8, 4, 3, 2)),
    *("zero4-stochastic", "minmax4-stochastic", "sign", "mask", "blocks"),
)
BOUND = 0.3  # of the standard deviation
MOVED_BYTES = 1 << 30  # by a codec, each time it is timed
QUICK = ["resnet50"]  # of the networks
CODECS_SHARE = 0.15  # of the time, and
LIMITED_SHARE = 1 / 3  # of what is left then


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], help="default: all")
    parser.add_argument("--all", action="store_true", help="every part")
    parser.add_argument("--networks", nargs="*", choices=list(NETWORKS))
    parser.add_argument("--dtypes", nargs="*", choices=["fp32", "tf32", "bf16"])
    parser.add_argument("--arms", nargs="*", help="only these")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--minutes", type=float, default=8.0, help="for everything together")
    parser.add_argument("--train-steps", type=int, default=20)
    parser.add_argument("--quick", action="store_true", help="small, and no report")
    arguments = parser.parse_args()
    if not torch.cuda.is_available() and not arguments.quick:
        sys.exit(
            "benchmarks.gpu measures a CUDA device, and torch sees none here. --quick shows that it runs."
        )
    arguments.parts = PARTS if arguments.all or not arguments.parts else arguments.parts
    arguments.networks = arguments.networks or (QUICK if arguments.quick else list(NETWORKS))
    arguments.dtypes = arguments.dtypes or (["tf32"] if arguments.quick else ["tf32", "bf16"])
    arguments.repeats = 1 if arguments.quick else arguments.repeats
    ends = time.monotonic() + 60.0 * arguments.minutes
    arguments.seconds_left = lambda: ends - time.monotonic()
    torch.manual_seed(0)
    torch._dynamo.config.recompile_limit = 64  # every arm is the same code
    torch._inductor.config.fallback_random = True  # the same random numbers compiled and not
    results: dict[str, Any] = {}
    measures = {"codecs": codec_speeds, "networks": all_networks, "limited": limited}
    for part in arguments.parts:
        for found in measures[part](arguments):  # more and more of it
            results[part] = found
            _save(results, arguments)
    print(tables(results), file=sys.stderr, flush=True)


def _save(results: dict[str, Any], arguments: argparse.Namespace) -> None:
    """What there is so far: a machine may be taken away at any time."""
    settings = {name: value for name, value in vars(arguments).items() if not callable(value)}
    if not arguments.quick:
        _report.write("gpu", {**results, "settings": settings}, tables(results))


def codec_speeds(arguments: argparse.Namespace) -> Iterator[list[dict[str, Any]]]:
    """Share of the copy bandwidth, packing and unpacking, by codec, dtype and size."""
    rows: list[dict[str, Any]] = []
    clock = Clock(CODECS_SHARE * arguments.seconds_left())
    for mebibytes in (1,) if arguments.quick else (64, 256, 1024):
        for dtype in (torch.float32, torch.bfloat16):
            if not clock.allows():
                return
            x = torch.randn(mebibytes * 2**20 // dtype.itemsize, device=device()).to(dtype)
            x[torch.rand_like(x, dtype=torch.float32) < 0.5] = 0.0  # as after a ReLU
            rows += [_codec_speed(name, x, arguments) for name in SPEEDS]
            yield rows


def _codec_speed(name: str, x: Tensor, arguments: argparse.Namespace) -> dict[str, Any]:
    codec, other = codecs.get(name), torch.empty_like(x)
    times = 1 if arguments.quick else max(1, MOVED_BYTES // x.nbytes)
    bound = BOUND * float(x.float().std()) if name == "blocks" else None
    arena = codecs.Arena(2 * x.nbytes, x.device, tensors=8) if name == "blocks" else None
    source = x > 0 if name == "mask" else x
    whole = torch.empty_like(source)
    packed = codec.pack(source, bound, codecs.Hints(arena=arena))
    held = packed.nbytes
    if arena is not None:
        held = packed.payload[2].nbytes + codecs.ArenaUse.of(arena.counters).nbytes
        arena = codecs.Arena(2 * x.nbytes, x.device, tensors=8)  # the first one is unpacked from
    hints = codecs.Hints(arena=arena)

    def pack() -> None:
        if hints.arena is not None:
            hints.arena.reset()
        codec.pack(source, bound, hints)

    def often(work: Callable[[], object]) -> Callable[[], None]:
        def repeated() -> None:
            for _ in range(times):
                work()

        return repeated

    arms = {
        "copy": often(lambda: other.copy_(x)),
        "pack": often(pack),
        "unpack": often(lambda: codec.unpack(packed, out=whole)),
    }
    timing = _report.interleaved(arms, arguments.repeats, warmup=3)
    copying = times * 2 * x.nbytes / timing.seconds["copy"].median
    moved = times * (source.nbytes + held)
    return {
        "codec": name,
        "dtype": str(x.dtype).removeprefix("torch."),
        "mebibytes": x.nbytes // 2**20,
        "bits": 8 * held / x.numel(),
        "copy_bytes_a_second": copying,
        **{f"{way}_share": moved / timing.seconds[way].median / copying for way in ("pack", "unpack")},
        **{
            f"{way}_input_bytes_a_second": times * source.nbytes / timing.seconds[way].median
            for way in ("pack", "unpack")
        },
    }


def all_networks(arguments: argparse.Namespace) -> Iterator[dict[str, dict[str, Any]]]:
    results: dict[str, dict[str, Any]] = {}
    pairs = [(name, dtype) for dtype in arguments.dtypes for name in arguments.networks]
    kept = LIMITED_SHARE * arguments.seconds_left() if "limited" in arguments.parts else 0.0
    for number, (name, dtype) in enumerate(pairs):
        clock = Clock((arguments.seconds_left() - kept) / (len(pairs) - number))
        with precision(dtype):
            results[f"{name} {dtype}"] = _network_or_why(name, dtype, arguments, clock)
        free()
        yield results


def _network_or_why(name: str, dtype: str, arguments: argparse.Namespace, clock: Clock) -> dict[str, Any]:
    """What was measured, or why nothing was."""
    if clock.is_over():
        return {"plain": {"error": "not run: out of time"}}
    try:
        return network(name, dtype, arguments, clock)
    except Exception as error:  # noqa: BLE001  (one network's failure does not cost the others')
        return {"plain": {"error": _first_line(error)}}


def network(name: str, dtype: str, arguments: argparse.Namespace, clock: Clock) -> dict[str, Any]:
    """Every arm on one network, timed in turn with the compiled plain one."""
    batch = 2 if arguments.quick else NETWORKS[name][2]
    given = training(name, dtype, batch, arguments)
    exact = given.copied().gradients()
    rival = given.copied()
    rival.forward = compiled_whole(rival.model)
    rival.step()  # compiles
    clock.begin()
    rows: dict[str, Any] = {"batch": batch}
    for arm, entered in arms().items():
        if arguments.arms is None or arm in arguments.arms:
            if not clock.allows():
                rows[arm] = {"error": "not run: out of time"}
                continue
            rows[arm] = _tried(entered, given, rival, exact, arguments.repeats)
            print(name, dtype, arm, rows[arm], file=sys.stderr, flush=True)
    return rows


def _tried(
    entered: Arm, given: Training, rival: Training, exact: list[Tensor], repeats: int
) -> dict[str, Any]:
    """What was measured, or why nothing was: one arm's failure does not cost the others'."""
    free()
    try:
        own = given.copied()
        own.settle()
        with entered(own) as session:
            return _measured(own, rival, exact, repeats) | {"conv_input_bits": _bits(session)}
    except Exception as error:  # noqa: BLE001
        return {"error": _first_line(error)}


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0][:200]


def _measured(own: Training, rival: Training, exact: list[Tensor], repeats: int) -> dict[str, Any]:
    timing = _report.interleaved({"own": own.step, "rival": rival.step}, repeats, warmup=2)
    return {
        "peak_bytes": own.peak_bytes(),
        "split_bytes": own.split_bytes(),
        "ratio": asdict(timing.ratios["own/rival"]),
        "seconds": timing.seconds["own"].median,
        "host_waits": host_waits(own),
        "noise": _finite(compiled.noise(own.gradients(), exact)),
    }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _bits(session: Session | None) -> float | None:
    """Of an element of the convolutions' inputs, as packed in the session's last step."""
    rows = session.report().tensors if isinstance(session, Session) else ()
    inputs = [row for row in rows if Role.CONV_INPUT in row.roles and row.bound > 0.0]
    elements = sum(math.prod(row.shape) for row in inputs)
    return 8 * sum(row.packed_bytes for row in inputs) / elements if elements else None


def host_waits(own: Training) -> int | None:
    """How often a step in the steady state waits for the device; None where there is none."""
    if own.inputs.device.type != "cuda":
        return None
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            own.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return sum("synchroniz" in str(each.message) for each in caught)


if __name__ == "__main__":
    main()

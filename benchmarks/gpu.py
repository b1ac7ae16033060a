"""Codecs, training steps, largest batches and waiting, on a CUDA device.

Goes in: nothing; networks of benchmarks/models.py on crops of photographs (of Fashion-MNIST's images where
scikit-image is not installed) or on the text of this package. Comes out: benchmarks/reports/gpu-<date>.json
and .md. Parts are codecs, networks and limited; --all is all of them. On a CPU --quick shows that it runs.

It takes about as many --minutes as it is given. Networks get equal shares of what is there for them, and the
limited memory a third; what would no longer fit is named in the report as not run, the least telling last.

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
import copy
import gc
import math
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import squeezebox
from benchmarks import _report, checkpointing, compiled, models
from squeezebox import codecs
from squeezebox.schema import Role
from squeezebox.session import Session

PARTS = ("codecs", "networks", "limited")
SPEEDS = (
    *(f"{family}{bits}" for family in ("zero", "minmax") for bits in (8, 4, 3, 2)),
    *("zero4-stochastic", "minmax4-stochastic", "sign", "mask", "blocks"),
)
BOUND = 0.3  # of the standard deviation
BUDGETS = (0.75, 0.5, 0.25)
NOISES = (1e-2, 1e-3, 1e-1)
LIMIT_GIB = 8.0
LIMITED_SHARE = 1 / 3  # of the time for trainings
MOVED_BYTES = 1 << 30  # by a codec, each time it is timed
SETTLED = 40  # steps after which no more are measured for a while
_GPT = {"width": 1024, "depth": 24, "heads": 16, "context": 1024}
_VIT = {"width": 768, "depth": 12, "heads": 12}
# name -> (network, its sizes, batch)
NETWORKS: Mapping[str, tuple[str, Mapping[str, int], int]] = {
    "resnet50": ("resnet50", {}, 64),
    "vgg16": ("vgg16", {}, 64),
    "efficientnet_b0": ("efficientnet_b0", {}, 64),
    "vit_b16": ("vit", _VIT, 64),
    "gpt": ("gpt", _GPT, 8),
}
Step = Callable[[Tensor], Tensor]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], help="default: all")
    parser.add_argument("--all", action="store_true", help="every part")
    parser.add_argument("--networks", nargs="*", default=list(NETWORKS), choices=list(NETWORKS))
    parser.add_argument("--dtypes", nargs="*", default=["tf32", "bf16"], choices=["fp32", "tf32", "bf16"])
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
    parts = PARTS if arguments.all or not arguments.parts else arguments.parts
    arguments.ends = time.monotonic() + 60.0 * arguments.minutes
    torch.manual_seed(0)
    torch._dynamo.config.recompile_limit = 64  # every arm is the same code
    torch._inductor.config.fallback_random = True  # the same random numbers compiled and not
    results: dict[str, Any] = {}
    measures = {"codecs": codec_speeds, "networks": all_networks, "limited": limited}
    for part in parts:
        for found in measures[part](arguments):  # more and more of it
            results[part] = found
            _save(results, arguments)
    print(tables(results), file=sys.stderr, flush=True)


def _save(results: dict[str, Any], arguments: argparse.Namespace) -> None:
    """What there is so far: a machine may be taken away at any time."""
    settings = {name: value for name, value in vars(arguments).items() if name != "ends"}
    if not arguments.quick:
        _report.write("gpu", {**results, "settings": settings}, tables(results))


class Clock:
    """Seconds for a row of trials, each of which is taken to last as long as the longest before it."""

    def __init__(self, seconds: float) -> None:
        self._begun = time.monotonic()
        self._ends = self._begun + seconds
        self._longest = 0.0

    def allows(self) -> bool:
        """Whether another one would end in time; to be asked before each."""
        now = time.monotonic()
        self._longest, self._begun = max(self._longest, now - self._begun), now
        return now + self._longest <= self._ends


def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


# --- codecs


def codec_speeds(arguments: argparse.Namespace) -> Iterator[list[dict[str, Any]]]:
    """Share of the copy bandwidth, packing and unpacking, by codec, dtype and size."""
    rows: list[dict[str, Any]] = []
    for mebibytes in (1,) if arguments.quick else (64, 256, 1024):
        for dtype in (torch.float32, torch.bfloat16):
            x = torch.randn(mebibytes * 2**20 // dtype.itemsize, device=device()).to(dtype)
            x[torch.rand_like(x, dtype=torch.float32) < 0.5] = 0.0  # as after a ReLU
            rows += [_codec_speed(name, x, arguments) for name in SPEEDS]
            yield rows


def _codec_speed(name: str, x: Tensor, arguments: argparse.Namespace) -> dict[str, Any]:
    codec, other = codecs.get(name), torch.empty_like(x)
    times = 1 if arguments.quick else max(1, MOVED_BYTES // x.nbytes)
    bound = BOUND * float(x.float().std()) if name == "blocks" else None
    options: dict[str, Any] = {}
    if name == "blocks":
        options["arena"] = codecs.Arena(2 * x.nbytes, x.device, tensors=8)
    source = x > 0 if name == "mask" else x
    whole = torch.empty_like(source)
    packed = codec.pack(source, bound, **options)
    held = packed.nbytes
    if "arena" in options:
        held = packed.payload[2].nbytes + codecs.ArenaUse.of(options["arena"].counters).nbytes
        options["arena"] = codecs.Arena(2 * x.nbytes, x.device, tensors=8)  # the first one is unpacked from

    def pack() -> None:
        if "arena" in options:
            options["arena"].reset()
        codec.pack(source, bound, **options)

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


# --- networks


@dataclass(eq=False)
class Training:
    """A network in training, and a batch of it. Measured with a rate of 0, so that its weights stay."""

    model: nn.Module
    inputs: Tensor
    labels: Tensor
    bf16: bool
    lr: float = 0.0
    fixed_bytes: int = 0  # of the device, before an arm begins

    def __post_init__(self) -> None:
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=self.lr, momentum=0.9)
        self.forward: Step = self.model

    def cast(self) -> AbstractContextManager[Any]:
        return torch.autocast(self.inputs.device.type, torch.bfloat16) if self.bf16 else nullcontext()

    def backward(self) -> None:
        with self.cast():
            output = self.forward(self.inputs)
            loss = F.cross_entropy(output.flatten(0, -2), self.labels.flatten())
        loss.backward()

    def step(self) -> None:
        self.optimizer.zero_grad(set_to_none=False)
        self.backward()
        self.optimizer.step()

    def gradients(self) -> list[Tensor]:
        """On the batch, with the same random numbers each time."""
        torch.manual_seed(1)
        self.optimizer.zero_grad()
        self.backward()
        return [p.grad.clone() for p in self.model.parameters() if p.grad is not None]

    def copied(self) -> Training:
        return Training(copy.deepcopy(self.model), self.inputs, self.labels, self.bf16)

    def peak_bytes(self) -> int:
        """The allocator's, of one step, beyond what lived after :meth:`settle`."""
        if self.inputs.device.type != "cuda":
            return 0
        self.step()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        self.step()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - self.fixed_bytes

    def settle(self) -> None:
        """Have everything that stays between steps."""
        self.step()
        _free()
        self.fixed_bytes = torch.cuda.memory_allocated() if self.inputs.device.type == "cuda" else 0

    def split_bytes(self) -> int:
        """The most that lay idle in parts of the allocator's blocks since the last :meth:`peak_bytes`."""
        if self.inputs.device.type != "cuda":
            return 0
        return int(torch.cuda.memory_stats()["inactive_split_bytes.all.peak"])


def images(batch: int, size: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Photographs, or else clothes."""
    try:
        from benchmarks import photos

        yield from photos.batches(batch, size, seed=0)
    except ImportError:
        pass
    from squeezebox.cli import _data

    data = _data.fashion_mnist(subset=True)
    grey, labels = torch.from_numpy(data.train_images), torch.from_numpy(data.train_labels).long()
    generator = torch.Generator().manual_seed(0)
    while True:
        chosen = torch.randint(len(grey), (batch,), generator=generator)
        pictures = (grey[chosen].float()[:, None] / 255 - 0.3) / 0.35
        sides = (size, size)
        yield (
            F.interpolate(pictures, sides, mode="bilinear").expand(-1, 3, -1, -1).contiguous(),
            labels[chosen],
        )


def training(name: str, dtype: str, batch: int, arguments: argparse.Namespace) -> Training:
    """The network after a few steps."""
    kind, sizes, _ = NETWORKS[name]
    size = 32 if arguments.quick else 224
    if arguments.quick:
        sizes = {key: 32 if key in ("width", "context") else 2 for key in sizes}
    if kind == "gpt":
        model = models.build(kind, 256, **sizes)
        batches = compiled.text(batch, sizes["context"])
    else:
        model = models.build(kind, 1000, **sizes, **({"image": size} if kind == "vit" else {}))
        batches = images(batch, size)
    model = model.to(device())
    if kind not in ("gpt", "vit"):
        model = model.to(memory_format=torch.channels_last)
    inputs, labels = (part.to(device()) for part in next(batches))
    if inputs.dim() == 4:
        inputs = inputs.contiguous(memory_format=torch.channels_last)
    made = Training(model, inputs, labels, dtype == "bf16", lr=1e-3)
    for _ in range(1 if arguments.quick else arguments.train_steps):
        made.step()
    return made.copied()


@contextmanager
def precision(dtype: str) -> Iterator[None]:
    """TF32 or full float32 in matrix products and convolutions."""
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = dtype != "fp32"
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


Arm = Callable[[Training], AbstractContextManager[Any]]


def arms() -> dict[str, Arm]:
    """Each makes a copy of a training its own for as long as the context lasts; the most telling first."""
    noises = {f"noise {noise:g}": _attached(noise) for noise in NOISES}
    plans = {f"plan {share:.0%}": _planned(share) for share in BUDGETS}
    bits = {
        f"{bits} bit compiled": _forward(lambda model, bits=bits: squeezebox.compile(model, bits=bits))
        for bits in (4, 8)
    }
    return {
        "plain": lambda own: nullcontext(),
        "compiled": _forward(lambda model: torch.compile(model, dynamic=False)),
        **noises,
        "checkpointed": lambda own: checkpointing.checkpointed(own.model),
        **plans,
        **bits,
        **{f"budget {share}": _forward(compiled.budgeted(share)) for share in BUDGETS},
        "fp8 e4m3": _forward(compiled.fp8(compiled.FP8["e4m3"])),
    }


def _forward(made: Callable[[nn.Module], Step]) -> Arm:
    @contextmanager
    def arm(own: Training) -> Iterator[None]:
        own.forward = made(own.model)
        try:
            yield
        finally:
            own.forward = own.model

    return arm


def _attached(noise: float) -> Arm:
    @contextmanager
    def arm(own: Training) -> Iterator[Any]:
        session = squeezebox.attach(own.model, optimizer=own.optimizer, noise=noise)
        try:
            for _ in range(SETTLED):
                own.step()
            yield session
        finally:
            session.detach()

    return arm


def _planned(share: float) -> Arm:
    """Within a share of the plain step's peak, at noise 1e-2."""

    @contextmanager
    def arm(own: Training) -> Iterator[Any]:
        with own.cast():
            session = squeezebox.attach(
                own.model,
                optimizer=own.optimizer,
                budget=f"{share:.0%}",
                noise=1e-2,
                sample=(own.inputs, own.labels),
                loss_fn=lambda output, labels: F.cross_entropy(output.flatten(0, -2), labels.flatten()),
            )
        try:
            yield session
        finally:
            session.detach()

    return arm


def all_networks(arguments: argparse.Namespace) -> Iterator[dict[str, dict[str, Any]]]:
    results: dict[str, dict[str, Any]] = {}
    pairs = [(name, dtype) for dtype in arguments.dtypes for name in arguments.networks]
    for number, (name, dtype) in enumerate(pairs):
        left = (1.0 - LIMITED_SHARE) * (arguments.ends - time.monotonic())
        with precision(dtype):
            clock = Clock(left / (len(pairs) - number))
            results[f"{name} {dtype}"] = network(name, dtype, arguments, clock)
        _free()
        yield results


def network(name: str, dtype: str, arguments: argparse.Namespace, clock: Clock) -> dict[str, Any]:
    """Every arm on one network, timed in turn with the compiled plain one."""
    batch = 2 if arguments.quick else NETWORKS[name][2]
    given = training(name, dtype, batch, arguments)
    exact = given.copied().gradients()
    rival = given.copied()
    rival.forward = torch.compile(rival.model, dynamic=False)
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
    _free()
    try:
        own = given.copied()
        own.settle()
        with entered(own) as session:
            return _measured(own, rival, exact, repeats) | {"conv_input_bits": _bits(session)}
    except Exception as error:  # noqa: BLE001
        return {"error": f"{type(error).__name__}: {error}".splitlines()[0][:200]}


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


# --- in a limited memory


def limited(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The largest batch within 8 GiB, and samples a second at it, by network and arm; ResNet-50 first."""
    if device().type != "cuda":
        return
    names = sorted(arguments.networks, key=lambda name: name != "resnet50")
    clock = Clock(arguments.ends - time.monotonic())
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(min(LIMIT_GIB * 2**30 / total, 1.0))
    try:
        rows: dict[str, Any] = {}
        for name in names:
            for arm, entered in arms().items():
                if (arguments.arms is None or arm in arguments.arms) and not arm.startswith("plan"):
                    row = _largest(name, entered, arguments) if clock.allows() else None
                    rows[f"{name}, {arm}"] = row
                    yield rows
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def _largest(name: str, entered: Arm, arguments: argparse.Namespace) -> dict[str, Any]:
    """By the line through the peaks at two batches, then downwards by twentieths until one runs."""
    few = NETWORKS[name][2] // 4
    found = [_at_batch(name, entered, batch, arguments) for batch in (few, 2 * few)]
    if None in found:
        return {"batch": 0, "samples_a_second": 0.0}
    peaks = [row["peak_bytes"] for row in found if row is not None]
    batch = int(2 * few + (LIMIT_GIB * 2**30 - peaks[1]) * few / (peaks[1] - peaks[0]))
    while batch > 2 * few:
        row = _at_batch(name, entered, batch, arguments)
        if row is not None:
            return row
        batch = int(0.95 * batch)
    return found[1] or {}


def _at_batch(name: str, entered: Arm, batch: int, arguments: argparse.Namespace) -> dict[str, Any] | None:
    """Peak of everything and samples a second; None where it does not fit or fails."""
    _free()
    try:
        own = training(name, "tf32", batch, arguments)
        with precision("tf32"), entered(own):
            timing = _report.interleaved({"own": own.step}, arguments.repeats, warmup=2)
            own.peak_bytes()
            peak = torch.cuda.max_memory_allocated()
        return {
            "batch": batch,
            "samples_a_second": batch / timing.seconds["own"].median,
            "peak_bytes": peak,
        }
    except Exception as error:  # noqa: BLE001  (as in _tried)
        print(name, batch, type(error).__name__, error, file=sys.stderr)
        return None


# --- the report


def tables(results: Mapping[str, Any]) -> str:
    """The Markdown tables of the report."""
    parts = []
    if "codecs" in results:
        parts += [
            "| codec | dtype | MiB | bits | pack / copy | unpack / copy | pack GB/s of input |",
            "|---|---|---|---|---|---|---|",
            *(
                f"| {row['codec']} | {row['dtype']} | {row['mebibytes']} | {row['bits']:.2f} "
                f"| {row['pack_share']:.2f} | {row['unpack_share']:.2f} "
                f"| {row['pack_input_bytes_a_second'] / 1e9:.0f} |"
                for row in results["codecs"]
            ),
            "",
        ]
    if "networks" in results:
        parts += [
            "| network | arm | peak MiB | x less | split MiB | time / compiled | noise | conv bits | waits |",
            "|---|---|---|---|---|---|---|---|---|",
        ]
        for name, rows in results["networks"].items():
            for arm, row in rows.items():
                if arm == "batch":
                    continue
                if "error" in row:
                    parts.append(f"| {name} | {arm} | {row['error']} | | | | | | |")
                    continue
                plain = rows.get("plain", row).get("peak_bytes", 0)
                ratio, bits = row["ratio"], row["conv_input_bits"]
                parts.append(
                    f"| {name} | {arm} | {row['peak_bytes'] / 2**20:.0f} "
                    f"| {plain / max(row['peak_bytes'], 1):.2f} | {row['split_bytes'] / 2**20:.0f} "
                    f"| {ratio['median']:.2f} ({ratio['minimum']:.2f}..{ratio['maximum']:.2f}) "
                    f"| {_figure(row['noise'], '.1e')} | {_figure(bits, '.2f')} | {row['host_waits']} |"
                )
        parts.append("")
    if results.get("limited"):
        parts += [
            f"| in {LIMIT_GIB:g} GiB | batch | samples a second |",
            "|---|---|---|",
            *(
                f"| {arm} | {row['batch']} | {row['samples_a_second']:.0f} |"
                if row
                else f"| {arm} | not run: out of time | |"
                for arm, row in results["limited"].items()
            ),
        ]
    return "\n".join(parts)


def _figure(value: float | None, figures: str) -> str:
    return "" if value is None else f"{value:{figures}}"


def _free() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()

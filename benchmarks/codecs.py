"""Codecs against memcpy, SZ3 and zfp: speed, and bits an element at equal weight-gradient noise.

Goes in: nothing (photographs and a short training). Comes out: benchmarks/reports/codecs-<date>.json, .md.
May touch: that folder; two to three minutes of the cores.
"""

import ctypes
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
import zfpy
from pysz import sz, szAlgorithm, szConfig, szErrorBoundMode
from torch import Tensor, nn

from benchmarks import _report, models, photos, training
from squeezebox import codecs

NUMEL = 1 << 24
REPEATS = 5
NOISES = (1e-2, 1e-3, 1e-4)
SPEEDS = (
    *(f"{family}{bits}" for family in ("zero", "minmax") for bits in (8, 4, 3, 2)),
    *("zero4-stochastic", "minmax4-stochastic", "bf16", "fp8-e4m3", "sign", "mask", "keep", "lossless"),
    *("planes", "planes-sign", "entropy", "entropy-sign"),
)
# share of the standard deviation that the variable-size codecs are timed at
BOUND = 0.3
# convolution inputs smaller than this are left out of the comparison
SMALLEST = 200_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """A convolution's or a BatchNorm's input, and what its weight gradient needs besides."""

    kind: str
    x: Tensor
    grad: Tensor
    conv: nn.Conv2d | None

    def weight_gradient(self, x: Tensor) -> Tensor:
        """The gradient of the weight (or of BatchNorm's gamma) with ``x`` in place of what was saved."""
        if self.conv is not None:
            conv = self.conv
            shape = list(conv.weight.shape)
            return nn.grad.conv2d_weight(x, shape, self.grad, conv.stride, conv.padding, conv.dilation)
        dims = (0, 2, 3)
        mean, std = self.x.mean(dims, keepdim=True), self.x.std(dims, keepdim=True) + 1e-5
        return (self.grad * (x - mean) / std).sum(dims)


Trial = Callable[[Tensor, float], tuple[Tensor, float]]


def ours(name: str, lag: int) -> Trial:
    def trial(x: Tensor, bound: float) -> tuple[Tensor, float]:
        packed = codecs.get(name).pack(x, bound, codecs.Hints(lag=lag))
        return codecs.get(name).unpack(packed), 8 * packed.nbytes / x.numel()

    return trial


def sz3(algorithm: szAlgorithm) -> Trial:
    def trial(x: Tensor, bound: float) -> tuple[Tensor, float]:
        config = szConfig()
        config.errorBoundMode, config.absErrorBound = szErrorBoundMode.ABS, bound
        config.cmprAlgo = algorithm
        data = np.ascontiguousarray(x.numpy())
        packed, _ = sz.compress(data, config)
        back, _ = sz.decompress(packed, data.dtype, data.shape)
        return torch.from_numpy(back), 8 * packed.nbytes / x.numel()

    return trial


def zfp(x: Tensor, bound: float) -> tuple[Tensor, float]:
    packed = zfpy.compress_numpy(np.ascontiguousarray(x.numpy()), tolerance=bound)
    return torch.from_numpy(zfpy.decompress_numpy(packed)), 8 * len(packed) / x.numel()


FAMILIES: Mapping[str, Trial] = {
    "planes": ours("planes", 0),
    "planes-sign": ours("planes-sign", 0),
    "entropy": ours("entropy", 0),
    "entropy, chosen lag": ours("entropy", -1),
    "entropy-sign": ours("entropy-sign", 0),
    "entropy-sign, chosen lag": ours("entropy-sign", -1),
    "SZ3 default": sz3(szAlgorithm.INTERP_LORENZO),
    "SZ3 without prediction": sz3(szAlgorithm.NOPRED),
    "zfp": zfp,
}


def noise(sample: Sample, back: Tensor, exact: Tensor) -> float:
    return float((sample.weight_gradient(back) - exact).square().sum() / exact.square().sum())


def bits_at(sample: Sample, trial: Trial, wanted: float, exact: Tensor) -> float:
    """Bits an element at this noise: log-linear between the two bounds that enclose it."""
    bound = 0.3 * float(sample.x.std()) * math.sqrt(wanted / 1e-3)
    points: list[tuple[float, float]] = []
    for _ in range(6):
        back, bits = trial(sample.x, bound)
        points.append((math.log(max(noise(sample, back, exact), 1e-12)), bits))
        step = math.log(wanted) - points[-1][0]
        if abs(step) < 0.1:
            break
        bound *= math.exp(max(-1.5, min(1.5, 0.5 * step)))
    points.sort(key=lambda point: abs(point[0] - math.log(wanted)))
    (near, near_bits), (far, far_bits) = points[0], points[min(1, len(points) - 1)]
    slope = (far_bits - near_bits) / (far - near) if abs(far - near) > 0.05 else -0.5 / math.log(2)
    return near_bits + slope * (math.log(wanted) - near)


def samples() -> list[Sample]:
    """Inputs of a briefly trained ResNet-18's larger layers, on one batch of photographs."""
    torch.manual_seed(0)
    model = models.build("resnet18", photos.num_classes())
    batches = photos.batches(16, 112, 0)
    training.train_briefly(model, batches, 30, training.LEARNING_RATES["resnet18"])
    found: list[Sample] = []

    def watch(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        x = inputs[0].detach().clone()
        conv = module if isinstance(module, nn.Conv2d) else None
        kind = "BatchNorm inputs" if conv is None else "convolution inputs"
        if x.numel() >= SMALLEST and x.shape[1] > 3:
            output.register_hook(
                lambda grad: found.append(Sample(kind=kind, x=x, grad=grad.clone(), conv=conv))
            )

    for module in model.modules():
        if isinstance(module, (nn.Conv2d, nn.BatchNorm2d)):
            module.register_forward_hook(watch)
    images, labels = next(batches)
    training.classification_loss(model(images), labels).backward()
    return found


def noise_table(found: list[Sample]) -> dict[str, dict[str, dict[str, float]]]:
    """Kind -> family -> noise -> bits an element, weighted by size."""
    table: dict[str, dict[str, dict[str, float]]] = {}
    for kind in sorted({sample.kind for sample in found}):
        chosen = [sample for sample in found if sample.kind == kind]
        exact = [sample.weight_gradient(sample.x) for sample in chosen]
        total = sum(sample.x.numel() for sample in chosen)
        for family, trial in FAMILIES.items():
            row = table.setdefault(kind, {}).setdefault(family, {})
            for wanted in NOISES:
                weighted = (
                    bits_at(sample, trial, wanted, gradient) * sample.x.numel()
                    for sample, gradient in zip(chosen, exact, strict=True)
                )
                row[f"{wanted:g}"] = sum(weighted) / total
    return table


def speed_row(name: str, x: Tensor, lag: int = 0) -> dict[str, Any]:
    """GB/s of input, and ratios to a copy of the same size in the same rounds; outputs warm."""
    codec, target = codecs.get(name), torch.empty_like(x)
    source = (x > 0).float() if name == "mask" else x
    bound = BOUND * float(x.std()) if name.startswith(("entropy", "planes")) else None
    packed = codec.pack(source, bound, codecs.Hints(lag=lag))
    timed = _report.interleaved(
        {
            "copy": lambda: target.copy_(x),
            "pack": lambda: codec.pack(source, bound, codecs.Hints(lag=lag)),
            "unpack": lambda: codec.unpack(packed, out=target),
        },
        REPEATS,
    )
    size = x.numel() * x.element_size() / 1e9
    return {
        "bits": 8 * packed.nbytes / x.numel(),
        "gigabytes_per_second": {arm: size / spread.median for arm, spread in timed.seconds.items()},
        "pack_speed_over_copy": asdict(timed.ratios["copy/pack"]),
        "unpack_speed_over_copy": asdict(timed.ratios["copy/unpack"]),
    }


def against_sz3(x: Tensor) -> dict[str, Any]:
    """Compress and decompress times of SZ3 and ours on real inputs at one bound."""
    bound, flat = BOUND * float(x.std()), x.reshape(-1)
    target = torch.empty_like(flat)
    codec = codecs.get("entropy-sign")
    packed = codec.pack(flat, bound, codecs.Hints(lag=0))
    config = szConfig()
    config.errorBoundMode, config.absErrorBound = szErrorBoundMode.ABS, bound
    data = flat.numpy()
    theirs, _ = sz.compress(data, config)
    timed = _report.interleaved(
        {
            "pack": lambda: codec.pack(flat, bound, codecs.Hints(lag=0)),
            "unpack": lambda: codec.unpack(packed, out=target),
            "SZ3 compress": lambda: sz.compress(data, config),
            "SZ3 decompress": lambda: sz.decompress(theirs, data.dtype, data.shape),
        },
        REPEATS,
    )
    return {
        "megabytes": data.nbytes / 1e6,
        "seconds": {arm: asdict(spread) for arm, spread in timed.seconds.items()},
        "pack_speed_over_sz3": asdict(timed.ratios["SZ3 compress/pack"]),
        "unpack_speed_over_sz3": asdict(timed.ratios["SZ3 decompress/unpack"]),
    }


def _spread(ratio: Mapping[str, float]) -> str:
    return f"{ratio['median']:.2f} ({ratio['minimum']:.2f} to {ratio['maximum']:.2f})"


def _markdown(speeds: Mapping[str, Any], noises: Mapping[str, Any], rivals: Mapping[str, Any]) -> str:
    lines = [
        f"## Speed, {NUMEL} float32 elements max(0, N(0, 1)); entropy and planes at bound {BOUND} std",
        "",
        "| codec | bits | pack GB/s | unpack GB/s | pack / copy | unpack / copy |",
        "|---|---|---|---|---|---|",
    ]
    for name, row in speeds.items():
        rate = row["gigabytes_per_second"]
        lines.append(
            f"| {name} | {row['bits']:.2f} | {rate['pack']:.2f} | {rate['unpack']:.2f} | "
            f"{_spread(row['pack_speed_over_copy'])} | {_spread(row['unpack_speed_over_copy'])} |"
        )
    for kind, table in noises.items():
        lines += ["", f"## Bits an element at equal weight-gradient noise, {kind}", ""]
        lines += ["| family | " + " | ".join(f"{wanted:g}" for wanted in NOISES) + " |"]
        lines += ["|---" * (len(NOISES) + 1) + "|"]
        lines += [
            f"| {family} | " + " | ".join(f"{bits:.2f}" for bits in row.values()) + " |"
            for family, row in table.items()
        ]
    lines += ["", "## entropy-sign against SZ3 (one thread), speed ratios on real inputs", ""]
    lines += ["| inputs | MB | pack | unpack |", "|---|---|---|---|"]
    lines += [
        f"| {kind} | {row['megabytes']:.0f} | {_spread(row['pack_speed_over_sz3'])} | "
        f"{_spread(row['unpack_speed_over_sz3'])} |"
        for kind, row in rivals.items()
    ]
    return "\n".join(lines)


def keep_freed_memory() -> None:
    """Tell glibc to reuse freed blocks: packed outputs are then warm, as in a training loop's steady state.

    Otherwise page faults on fresh pages, not packing, are what is timed. No effect elsewhere.
    """
    try:
        library = ctypes.CDLL(None)
        for option in (-3, -1):  # M_MMAP_THRESHOLD, M_TRIM_THRESHOLD
            library.mallopt(option, 1 << 30)
    except (OSError, AttributeError):
        return


def main() -> None:
    keep_freed_memory()
    found = samples()
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(NUMEL, generator=generator).relu_()
    speeds = {name: speed_row(name, x) for name in SPEEDS}
    speeds |= {f"{name}, lag 1": speed_row(name, x, lag=1) for name in ("entropy", "entropy-sign")}
    joined = {
        kind: torch.cat([sample.x.reshape(-1) for sample in found if sample.kind == kind])
        for kind in sorted({sample.kind for sample in found})
    }
    rivals = {kind: against_sz3(values) for kind, values in joined.items()}
    noises = noise_table(found)
    payload = {"speed": speeds, "bits_at_noise": noises, "against_sz3": rivals}
    for path in _report.write("codecs", payload, _markdown(speeds, noises, rivals)):
        print(path)


if __name__ == "__main__":
    main()

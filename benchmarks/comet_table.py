"""What is saved, what is held instead, the peak and the noise: five CNNs on real photographs.

Goes in: nothing; networks from benchmarks/models.py, briefly trained on crops of photographs, then
measured at 224x224. Comes out: benchmarks/reports/comet_table-<date>.json and .md.

Every ratio is of one run. "Noise" is the squared error of all parameter gradients over their squared
norm, measured by running the same step exactly and squeezed: the median of NOISE_BATCHES batches, and
their range. The caller's images count nowhere: the training loop holds them anyway.

VGG-16 is in channels_last layout: in the default one oneDNN copies both of conv1_2's maps, of 98 MiB at
batch 8, into a blocked layout of its own, with and without a session.

SZ3 and zfp take the convolutions' inputs at one bound a tensor, RIVAL_BOUND of its deviation, and so does
ours beside them. The fp8 column is eager: every tensor whose values backward reads, in 8-bit floats, as
Inductor's activation-quantization pass would hold it.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import zfpy
from pysz import sz, szConfig, szErrorBoundMode
from torch import Tensor, nn

import squeezebox
from benchmarks import _report, models, photos, training
from benchmarks.checkpointing import checkpointed
from squeezebox.bounds import Comet, Controller, ControllerState, NoiseBudget
from squeezebox.capture import Choice, Recorder, Rule, Store
from squeezebox.profiling import PeakMeter
from squeezebox.schema import Role, StepStatistics
from squeezebox.session import Session

NETWORKS = ("alexnet", "vgg16", "resnet18", "resnet50", "efficientnet_b0")
SIZE = 224
RIVAL_BOUND = 0.3
NOISE_BATCHES = 5
CHANNELS_LAST = ("vgg16",)
Closure = Callable[[], object]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("networks", nargs="*", default=list(NETWORKS))
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--train-steps", type=int, help="default: training.STEPS of the network")
    parser.add_argument("--refreshes", type=int, default=4)
    parser.add_argument(
        "--checks", type=int, default=1000, help="tensors checked at each refresh, of each kind"
    )
    parser.add_argument(
        "--name", default="comet_table", help="of the report, if it shall not replace today's"
    )
    arguments = parser.parse_args()
    torch.manual_seed(0)
    results = {}
    for name in arguments.networks:
        started = time.perf_counter()
        steps = arguments.train_steps or training.STEPS[name]
        results[name] = measure(name, arguments.batch, steps, arguments.refreshes, arguments.checks)
        results[name]["seconds"] = time.perf_counter() - started
        paths = _report.write(arguments.name, results, table(results))  # a kill loses one network
        print(name, f"{results[name]['seconds']:.0f} s", *paths, file=sys.stderr, flush=True)


def measure(name: str, batch: int, train_steps: int, refreshes: int, checks: int) -> dict[str, Any]:
    """All columns of one network."""
    model = models.build(name, num_classes=photos.num_classes()).train()
    layout = torch.channels_last if name in CHANNELS_LAST else torch.contiguous_format
    model.to(memory_format=layout)
    losses = training.train_briefly(
        model, photos.batches(16, 112, seed=0), train_steps, training.LEARNING_RATES[name]
    )
    batches = ((x.to(memory_format=layout), labels) for x, labels in photos.batches(batch, SIZE, seed=1))
    step = functools.partial(train_step, model, batches)
    result: dict[str, Any] = {
        "batch": batch,
        "loss_before_and_after": [losses[0], losses[-1]],
        "plain": {"peak_bytes": peak(model, step)},
        "comet": comet(model, batches, refreshes),
        "noise_1e-2": budget(model, batches, 1e-2, refreshes, checks),
        "noise_1e-3": budget(model, batches, 1e-3, refreshes, checks),
        "checkpointing": checkpointing(model, batches),
        "rivals": rivals(model, batches),
    }
    for codec in ("minmax4-stochastic", "zero4", "fp8-e4m3"):
        result[codec] = uniform(model, batches, codec)
    return result


def train_step(model: nn.Module, batches: Iterator[tuple[Tensor, Tensor]]) -> None:
    """Forward and backward of one batch; gradients stay."""
    images, labels = next(batches)
    model.zero_grad()
    training.classification_loss(model(images), labels).backward()


def peak(model: nn.Module, step: Closure) -> int:
    """Peak bytes of one step beyond parameters and gradients."""
    step()
    meter = PeakMeter(torch.device("cpu"))
    meter.start()
    step()
    return meter.stop([p.grad for p in model.parameters() if p.grad is not None]).activation_bytes


def closure(model: nn.Module, batches: Iterator[tuple[Tensor, Tensor]]) -> Closure:
    """The same batch every time it is called."""
    images, labels = next(batches)
    return lambda: training.classification_loss(model(images), labels).backward()


def comet(model: nn.Module, batches: Iterator[tuple[Tensor, Tensor]], steps: int) -> dict[str, Any]:
    """Convolution inputs under the published rule, in a few steps of momentum SGD at a small rate."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)
    session = squeezebox.attach(model, optimizer=optimizer, controller=Comet(interval=steps))
    try:
        for _ in range(2 * steps + 1):
            train_step(model, batches)
            optimizer.step()
        return conv_inputs(session) | noises(session, model, batches)
    finally:
        session.detach()


def noises(session: Session, model: nn.Module, batches: Iterator[tuple[Tensor, Tensor]]) -> dict[str, Any]:
    """The noise of several batches and its median."""
    found = [session.measure_noise(closure(model, batches)) for _ in range(NOISE_BATCHES)]
    return {"noise": statistics.median(found), "noises": found}


def spread(row: dict[str, Any]) -> str:
    """The median noise and its range."""
    return f"{row['noise']:.1e} ({min(row['noises']):.1e}..{max(row['noises']):.1e})"


def conv_inputs(session: Session) -> dict[str, Any]:
    """Bytes of the storages that convolutions read, the images apart."""
    rows = [row for row in session.report().tensors if Role.CONV_INPUT in row.roles]
    saved = sum(row.saved_bytes for row in rows)
    packed = sum(row.packed_bytes for row in rows)
    return {"conv_saved_bytes": saved, "conv_packed_bytes": packed, "conv_ratio": saved / packed}


def budget(
    model: nn.Module, batches: Iterator[tuple[Tensor, Tensor]], noise: float, refreshes: int, checks: int
) -> dict[str, Any]:
    """Everything saved, under a noise budget whose every tensor has been checked, if ``checks`` allows."""
    controller = _Schedule(NoiseBudget(noise=noise), refreshes)
    session = squeezebox.attach(model, controller=controller, checks_per_refresh=checks)
    try:
        for _ in range(refreshes + 1):  # the last is a regular step, of which the session takes the peak
            train_step(model, batches)
        result = {"peak_bytes": session.report().record.activation_peak_bytes or 0}
        measured = noises(session, model, batches)
        record = session.report().record
        last = {c.key: c for c in record.checks if c.predicted > 0.0}.values()
        layers = [c.measured / c.predicted for c in last if c.layer]
        floor = record.floor_bytes or 1
        return (
            result
            | measured
            | conv_inputs(session)
            | {
                "saved_bytes": record.saved_bytes,
                "packed_bytes": record.packed_bytes,
                "ratio": record.saved_bytes / record.packed_bytes,
                "predicted_noise": record.predicted_noise,
                "floor_bytes": floor,
                "peak_over_floor": result["peak_bytes"] / floor,
                "layers_within_0.75_to_1.33": sum(0.75 <= c <= 1.33 for c in layers) / max(len(layers), 1),
                "layers_checked": len(layers),
                "traced_over_white": {c.key: c.measured / c.predicted for c in last if not c.layer},
                "packed_by_role": _by_role(session),
            }
        )
    finally:
        session.detach()


@dataclass(frozen=True, slots=True)
class _Schedule:
    """A controller refreshed on the first steps only, so that a regular step follows at once."""

    controller: Controller
    refreshes: int

    def due(self, step: int) -> bool:
        return step < self.refreshes

    def bound(self, state: ControllerState, key: str, role: Role, rms: Callable[[], float]) -> float | None:
        return self.controller.bound(state, key, role, rms)

    def update(self, state: ControllerState, statistics: StepStatistics) -> ControllerState:
        return self.controller.update(state, statistics)


def _by_role(session: Session) -> dict[str, list[int]]:
    """Role of the first saver -> saved and packed bytes."""
    totals: dict[str, list[int]] = {}
    for row in session.report().tensors:
        total = totals.setdefault(row.role.value, [0, 0])
        total[0] += row.saved_bytes
        total[1] += row.packed_bytes
    return totals


@dataclass(frozen=True, slots=True)
class _Uniform:
    """One codec without a bound for every tensor whose values are read."""

    codec: str

    def choose(self, key: str, rule: Rule, tensor: Tensor) -> Choice:
        return Choice(codec=self.codec)


def uniform(model: nn.Module, batches: Iterator[tuple[Tensor, Tensor]], codec: str) -> dict[str, Any]:
    """Every value-read tensor in one fixed-size codec: what ActNN and its like do."""
    images, labels = next(batches)
    gradients = []
    store = Store(_Uniform(codec))
    for recorder in (None, Recorder(store, model)):
        torch.manual_seed(1)
        model.zero_grad()
        with recorder or contextlib.nullcontext():
            if recorder is not None:
                recorder.own([*model.parameters(), *model.buffers(), images])
            loss = training.classification_loss(model(images), labels)
        loss.backward()
        gradients.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    exact, lossy = gradients
    error = sum(float((a - b).norm()) ** 2 for a, b in zip(exact, lossy, strict=True))
    saved = sum(row.saved_bytes for row in store.rows)
    packed = sum(row.packed_bytes for row in store.rows)
    return {
        "saved_bytes": saved,
        "packed_bytes": packed,
        "ratio": saved / packed,
        "noise": error / sum(float(a.norm()) ** 2 for a in exact),
    }


def rivals(model: nn.Module, batches: Iterator[tuple[Tensor, Tensor]]) -> dict[str, float]:
    """Compression of the convolutions' inputs, the images apart, by ours, SZ3 and zfp at the same bounds."""
    images, _ = next(batches)
    nbytes = dict.fromkeys(("saved", "ours", "SZ3", "zfp"), 0)
    seen = {images.untyped_storage().data_ptr()}

    def compress(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        x = inputs[0].detach()
        if x.untyped_storage().data_ptr() in seen:
            return
        bound = RIVAL_BOUND * float(x.std())
        config = szConfig()
        config.errorBoundMode, config.absErrorBound = szErrorBoundMode.ABS, bound
        nbytes["saved"] += x.nbytes
        nbytes["ours"] += squeezebox.codecs.get("entropy-sign").pack(x, bound).nbytes
        nbytes["SZ3"] += sz.compress(x.contiguous().numpy(), config)[0].nbytes
        nbytes["zfp"] += len(zfpy.compress_numpy(x.contiguous().numpy(), tolerance=bound))

    convolutions = [module for module in model.modules() if isinstance(module, nn.Conv2d)]
    handles = [module.register_forward_pre_hook(compress) for module in convolutions]
    with torch.no_grad():
        model(images)
    for handle in handles:
        handle.remove()
    return {name: nbytes["saved"] / nbytes[name] for name in ("ours", "SZ3", "zfp")}


def checkpointing(model: nn.Module, batches: Iterator[tuple[Tensor, Tensor]]) -> dict[str, int]:
    """Peak with every block (or a fifth of the plain stacks) recomputed in backward."""
    with checkpointed(model):
        return {"peak_bytes": peak(model, functools.partial(train_step, model, batches))}


def table(results: dict[str, Any]) -> str:
    """The Markdown tables of the report."""
    conv = [
        "| network | COMET's rule | noise there | ours at 1e-3 | at one bound: ours | SZ3 | zfp |",
        "|---|---|---|---|---|---|---|",
    ]
    whole = [
        "| network | all saved, 1e-2 | measured | predicted | all saved, 1e-3 | measured | predicted "
        "| layers within 0.75..1.33 | 4-bit min/max groups | noise there | fp8 | noise there |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    peaks = [
        "| network | plain MiB | squeezed 1e-2 MiB | ratio | floor MiB | peak / floor | checkpointing MiB |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, row in results.items():
        coarse, fine, groups = row["noise_1e-2"], row["noise_1e-3"], row["minmax4-stochastic"]
        conv.append(
            f"| {name} | {row['comet']['conv_ratio']:.1f}x | {spread(row['comet'])} "
            f"| {fine['conv_ratio']:.1f}x "
            + "".join(f"| {row['rivals'][rival]:.1f}x " for rival in ("ours", "SZ3", "zfp"))
            + "|"
        )
        whole.append(
            f"| {name} | {coarse['ratio']:.1f}x | {spread(coarse)} | {coarse['predicted_noise']:.1e} "
            f"| {fine['ratio']:.1f}x | {spread(fine)} | {fine['predicted_noise']:.1e} "
            f"| {100 * fine['layers_within_0.75_to_1.33']:.0f} % "
            f"| {groups['ratio']:.1f}x | {groups['noise']:.1e} "
            f"| {row['fp8-e4m3']['ratio']:.1f}x | {row['fp8-e4m3']['noise']:.1e} |"
        )
        plain = row["plain"]["peak_bytes"]
        peaks.append(
            f"| {name} | {plain / 2**20:.0f} | {coarse['peak_bytes'] / 2**20:.0f} "
            f"| {plain / coarse['peak_bytes']:.2f}x | {coarse['floor_bytes'] / 2**20:.0f} "
            f"| {coarse['peak_over_floor']:.2f} | {row['checkpointing']['peak_bytes'] / 2**20:.0f} |"
        )
    titles = (
        "## Convolution inputs",
        "## Everything saved, against the measured total gradient noise",
        "## Peak of one step beyond parameters and gradients",
    )
    parts = ["\n".join([title, "", *rows]) for title, rows in zip(titles, (conv, whole, peaks), strict=True)]
    return "\n\n".join(parts)


if __name__ == "__main__":
    main()

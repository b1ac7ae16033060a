"""``squeezebox demo``: the same network trained plain and squeezed, side by side.

Narrow and deep, in channels-last layout (in the default one, convolutions make copies in a blocked
layout), so that the tensors saved for backward and not one operator's working set rule the peak.
"""

from __future__ import annotations

import json
import math
import platform
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn import functional

import squeezebox
from squeezebox.bounds import Controller, ControllerState, NoiseBudget
from squeezebox.cli._data import Dataset, fashion_mnist
from squeezebox.cli._show import progress
from squeezebox.profiling import Peak, PeakMeter
from squeezebox.reports import require_writable, write_whole
from squeezebox.schema import OptionError, Role, StepStatistics

_CHANNELS = (16,) * 12 + (32, 32)
_POOLED = 7  # height and width before the classifier
_NUM_CLASSES = 10


def network(seed: int) -> nn.Module:
    """The network with weights from ``seed``, for grey images ``[n, 1, 28, 28]``."""
    layers: list[nn.Module] = []
    previous = 1
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(seed)
        for channels in _CHANNELS:
            stride = 2 if previous not in (1, channels) else 1
            layers.append(_block(previous, channels, stride))
            previous = channels
        head = nn.Linear(previous * _POOLED**2, _NUM_CLASSES)
    model: nn.Module = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(_POOLED), nn.Flatten(), head)
    return model.to(  # type: ignore[no-any-return, call-overload]
        memory_format=torch.channels_last
    )


def _block(channels_in: int, channels_out: int, stride: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(channels_in, channels_out, 3, stride, 1, bias=False),
        nn.BatchNorm2d(channels_out),
        nn.ReLU(inplace=True),
    )


LEARNING_RATE = 0.03
INTERVAL = 32  # steps between refreshes: a short training changes fast


class Steered:
    """A controller that refreshes when its owner says so, and until then as the wrapped one does."""

    def __init__(self, controller: Controller) -> None:
        self.forced: bool | None = None
        self._controller = controller

    def due(self, step: int) -> bool:
        """``forced`` where it is set."""
        return self._controller.due(step) if self.forced is None else self.forced

    def bound(self, state: ControllerState, key: str, role: Role, rms: Callable[[], float]) -> float | None:
        """As the wrapped controller."""
        return self._controller.bound(state, key, role, rms)

    def update(self, state: ControllerState, statistics: StepStatistics) -> ControllerState:
        """As the wrapped controller."""
        return self._controller.update(state, statistics)


class Arm:
    """One network in training."""

    def __init__(self, seed: int, noise: float | None) -> None:
        self.model = network(seed)
        self.optimizer = torch.optim.SGD(
            self.model.parameters(), lr=LEARNING_RATE, momentum=0.9, weight_decay=5e-4
        )
        self.seconds: list[float] = []
        self.controller: Steered | None = None
        self.session: Any = None
        if noise is not None:
            self.controller = Steered(NoiseBudget(noise=noise, interval=INTERVAL))
            squeezebox.codecs.require(torch.float32)  # no arm's first steps are another's
            self.session = squeezebox.attach(
                self.model, optimizer=self.optimizer, controller=self.controller, speed="fast"
            )

    def gradients(self, images: torch.Tensor, labels: torch.Tensor) -> float:
        """Forward and backward; the mean loss."""
        loss = functional.cross_entropy(self.model(images), labels)
        loss.backward()
        return float(loss.detach())

    def step(self, images: torch.Tensor, labels: torch.Tensor) -> float:
        """One training step; the mean loss."""
        self.optimizer.zero_grad()
        loss = self.gradients(images, labels)
        self.optimizer.step()
        return loss

    def timed_step(self, images: torch.Tensor, labels: torch.Tensor) -> float:
        """The same, noting its seconds."""
        start = time.perf_counter()
        loss = self.step(images, labels)
        self.seconds.append(time.perf_counter() - start)
        return loss

    def refreshes(self, step: int) -> bool:
        """Whether training step ``step`` (from 0) gathers statistics for new bounds."""
        return self.controller is not None and self.controller.due(step)

    def measured_step(self, images: torch.Tensor, labels: torch.Tensor) -> Peak:
        """One training step and its peak, parameters, inputs and optimizer state included."""
        if self.session is not None:
            self.session.report()  # ends the session's own measurement, should one be running
        self.optimizer.zero_grad()
        held = [*self.model.parameters(), *self.model.buffers(), *self._state(), images, labels]
        before = sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in held}.values())
        meter = PeakMeter(torch.device("cpu"))
        if not meter.start():
            raise squeezebox.AttachError(
                "the peak of a step cannot be measured while another profiler is running; end that one first."
            )
        self.step(images, labels)
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        peak = meter.stop([*gradients, *self._state()])
        return replace(peak, total_bytes=before + peak.total_bytes)

    def peak(self, images: torch.Tensor, labels: torch.Tensor, *, refresh: bool) -> Peak:
        """:meth:`measured_step`, with the bounds refreshed in it or not."""
        if self.controller is None:
            return self.measured_step(images, labels)
        self.controller.forced = refresh
        try:
            return self.measured_step(images, labels)
        finally:
            self.session.report()  # the step is closed while its refresh is still forced
            self.controller.forced = None

    def accuracy(self, images: torch.Tensor, labels: torch.Tensor) -> float:
        """Share of images whose class is found."""
        self.model.eval()
        with torch.no_grad():
            pairs = zip(images.split(500), labels.split(500), strict=True)
            right = sum(int((self.model(x).argmax(1) == y).sum()) for x, y in pairs)
        self.model.train()
        return right / len(labels)

    def _state(self) -> list[torch.Tensor]:
        states: list[Mapping[str, Any]] = list(self.optimizer.state.values())
        return [value for state in states for value in state.values() if isinstance(value, torch.Tensor)]


def layout(images: torch.Tensor) -> torch.Tensor:
    """A copy of the images, of their own storage, in the network's layout."""
    return images.clone(memory_format=torch.channels_last)


_TRIALS = 8


def largest_batch(
    arm: Arm, images: torch.Tensor, labels: torch.Tensor, batch: int, plain: Peak, squeezed: Peak
) -> dict[str, Any]:
    """Search multiples of half the batch: each trial is true training steps with BatchNorm over all of it.

    A trial refreshes the bounds at that batch, then measures a regular step. ``plain`` and ``squeezed``
    are the peaks at ``batch``; where the search starts follows from them, what fits is measured only.
    """
    stride, most = max(1, batch // 2), len(images)
    fits: dict[int, dict[str, int]] = {}
    too_large: dict[int, dict[str, int]] = {}
    candidate = _clamp(4 * batch, stride, most)
    with progress("searching the largest batch in plain's peak") as show:
        for number in range(_TRIALS):
            x, y = layout(images[:candidate]), labels[:candidate].clone()
            refresh = arm.peak(x, y, refresh=True).total_bytes
            peak = arm.peak(x, y, refresh=False).total_bytes
            fitting = peak <= plain.total_bytes
            (fits if fitting else too_large)[candidate] = {"peak_bytes": peak, "refresh_peak_bytes": refresh}
            show(number + 1, _TRIALS, f"batch {candidate} {'fits' if fitting else 'is too large'}")
            guess = _guess(candidate, peak, batch, squeezed.total_bytes, plain.total_bytes)
            limits = max(fits, default=0), min(too_large, default=most + 1)
            candidate = _next(_clamp(guess, stride, most), stride, *limits)
            if candidate in fits:
                break
    best = max(fits, default=batch)
    figures = fits.get(best, {"peak_bytes": squeezed.total_bytes, "refresh_peak_bytes": None})
    return {"limit_bytes": plain.total_bytes, "plain_batch": batch, "squeezed_batch": best, **figures}


def _guess(batch: int, peak: int, small: int, small_peak: int, limit: int) -> int:
    """The batch whose peak would be ``limit`` if peaks grew along a line."""
    if batch == small or peak <= small_peak:
        return 2 * batch
    return small + int((limit - small_peak) * (batch - small) / (peak - small_peak))


def _clamp(batch: int, stride: int, most: int) -> int:
    return max(stride, min(batch, most) // stride * stride)


def _next(guess: int, stride: int, fitting: int, too_large: int) -> int:
    """The next trial strictly between what fits and what does not; what fits if nothing is between."""
    if too_large - fitting <= stride:
        return fitting
    return min(max(guess, fitting + stride), max(too_large - 1, 0) // stride * stride)


DEFAULT_STEPS = 160
_MEAN, _DEVIATION = 0.286, 0.353  # of Fashion-MNIST's pixels


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """What the command line said. ``epochs=None``: DEFAULT_STEPS steps, whatever the data."""

    out: Path
    data: Path | None = None
    epochs: float | None = None
    batch: int = 64
    noise: float = 1e-3
    seed: int = 0
    timeline: Path | None = None


@dataclass(frozen=True, slots=True, eq=False)
class _Images:
    """The data as the network takes it."""

    train: torch.Tensor
    train_labels: torch.Tensor
    test: torch.Tensor
    test_labels: torch.Tensor


def run(settings: Settings) -> dict[str, Any]:
    """Train, measure, write ``settings.out`` and return what was written.

    Raises:
        OptionError: an option is out of range.
        DatasetError: the data set was asked for and is missing.
        OutputError: ``out`` cannot be written; found before anything is trained.
    """
    _check(settings)
    for path in filter(None, (settings.out, settings.timeline)):
        require_writable(path)
    start = time.perf_counter()
    data = fashion_mnist(settings.data)
    images = _prepare(data)
    steps = _steps(settings, len(images.train))
    plain, squeezed = Arm(settings.seed, None), Arm(settings.seed, settings.noise)
    _train(plain, squeezed, images, settings, steps)
    result = {
        "squeezebox": squeezebox.__version__,
        "torch": torch.__version__,
        "machine": {"processor": platform.machine(), "threads": torch.get_num_threads()},
        "settings": _recorded(settings) | {"data": data.source, "steps": steps},
        **_compare(plain, squeezed, images, settings),
    }
    if settings.timeline is not None:
        x, y = layout(images.train[: settings.batch]), images.train_labels[: settings.batch].clone()
        squeezed.session.timeline(lambda: squeezed.step(x, y)).save(settings.timeline)
    squeezed.session.detach()
    result["seconds"] = time.perf_counter() - start
    write_whole(settings.out, json.dumps(result, indent=1) + "\n")
    return result


def _recorded(settings: Settings) -> dict[str, Any]:
    """As the result has them: paths as text, and none that was not asked for."""
    values = asdict(settings)
    if settings.timeline is None:
        del values["timeline"]
    return {name: str(value) if isinstance(value, Path) else value for name, value in values.items()}


def _check(settings: Settings) -> None:
    if settings.batch < 2:
        raise OptionError(f"--batch {settings.batch} is below 2, and BatchNorm needs several; give 64.")
    if settings.epochs is not None and not 0.0 < settings.epochs < math.inf:
        raise OptionError(f"--epochs {settings.epochs} is not a positive number; give 1, or 0.5.")


def _prepare(data: Dataset) -> _Images:
    def pixels(images: NDArray[np.uint8]) -> torch.Tensor:
        scaled = torch.from_numpy(images).unsqueeze(1).float().div_(255.0)
        return scaled.sub_(_MEAN).div_(_DEVIATION)

    def classes(labels: NDArray[np.uint8]) -> torch.Tensor:
        return torch.from_numpy(labels).long()

    return _Images(
        pixels(data.train_images),
        classes(data.train_labels),
        pixels(data.test_images),
        classes(data.test_labels),
    )


def _steps(settings: Settings, count: int) -> int:
    if settings.batch > count:
        raise OptionError(f"--batch {settings.batch} is more than the {count} training images; give less.")
    if settings.epochs is None:
        return DEFAULT_STEPS
    return max(1, round(settings.epochs * count / settings.batch))


def _train(plain: Arm, squeezed: Arm, images: _Images, settings: Settings, steps: int) -> None:
    """Alternate the arms' steps on the same batches, so that a slow moment of the machine meets both."""
    generator = torch.Generator().manual_seed(settings.seed)
    order = torch.empty(0, dtype=torch.int64)
    with progress("training, plain and squeezed") as show:
        for number in range(steps):
            if len(order) < settings.batch:
                order = torch.randperm(len(images.train), generator=generator)
            chosen, order = order[: settings.batch], order[settings.batch :]
            x, y = layout(images.train[chosen]), images.train_labels[chosen]
            losses = {}
            arms = {"plain": plain, "squeezed": squeezed}
            for name in list(arms) if number % 2 else reversed(arms):
                for group in arms[name].optimizer.param_groups:
                    group["lr"] = LEARNING_RATE * (1.0 - number / steps)
                losses[name] = arms[name].timed_step(x, y)
            show(number + 1, steps, f"loss {losses['plain']:.3f} and {losses['squeezed']:.3f}")


def _compare(plain: Arm, squeezed: Arm, images: _Images, settings: Settings) -> dict[str, Any]:
    x, y = layout(images.train[: settings.batch]), images.train_labels[: settings.batch].clone()
    with progress("testing, measuring") as show:
        accuracies = {}
        for number, (name, arm) in enumerate((("plain", plain), ("squeezed", squeezed))):
            accuracies[name] = arm.accuracy(images.test, images.test_labels)
            show(number + 1, 4, f"{name}: accuracy {accuracies[name]:.1%}")
        noise = squeezed.session.measure_noise(lambda: squeezed.gradients(x, y))
        show(3, 4, f"gradient noise {noise:.1e}")
        report = squeezed.session.report()
        plain_peak, peak = plain.measured_step(x, y), squeezed.peak(x, y, refresh=False)
        refresh_peak = squeezed.peak(x, y, refresh=True)
        show(4, 4, "peaks")
    story = largest_batch(squeezed, images.train, images.train_labels, settings.batch, plain_peak, peak)
    times = _times(plain, squeezed)
    return {
        "plain": {
            "saved_bytes": report.saved_bytes,
            "peak_bytes": plain_peak.total_bytes,
            "activation_peak_bytes": plain_peak.activation_bytes,
            "step_seconds": times["plain"],
            "test_accuracy": accuracies["plain"],
            "noise": 0.0,
            "predicted_noise": 0.0,
        },
        "squeezed": {
            "saved_bytes": report.packed_bytes,
            "peak_bytes": peak.total_bytes,
            "activation_peak_bytes": peak.activation_bytes,
            "refresh_peak_bytes": refresh_peak.total_bytes,
            "step_seconds": times["squeezed"],
            "refresh_step_seconds": times["refresh"],
            "step_seconds_ratio": times["ratio"],
            "test_accuracy": accuracies["squeezed"],
            "noise": noise,
            "predicted_noise": report.predicted_noise,
        },
        "story": story,
    }


def _times(plain: Arm, squeezed: Arm) -> dict[str, float]:
    """Medians over the same steps of both arms; the ratio is that of neighbours in time."""
    pairs = list(zip(plain.seconds, squeezed.seconds, strict=True))
    refreshes = [pair for number, pair in enumerate(pairs) if squeezed.refreshes(number)]
    regular = [pair for number, pair in enumerate(pairs) if not squeezed.refreshes(number)] or pairs
    return {
        "plain": median(first for first, _ in regular),
        "squeezed": median(second for _, second in regular),
        "ratio": median(second / first for first, second in regular),
        "refresh": median(second for _, second in refreshes or pairs),
    }

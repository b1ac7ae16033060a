"""``squeezebox demo``: the same network trained plain and squeezed, side by side."""

from __future__ import annotations

import json
import math
import platform
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

import squeezebox
from squeezebox.cli._arms import LEARNING_RATE, Arm, layout
from squeezebox.cli._data import Dataset, fashion_mnist
from squeezebox.cli._progress import progress
from squeezebox.cli._story import largest_batch
from squeezebox.reports import require_writable, write_whole
from squeezebox.schema import OptionError

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

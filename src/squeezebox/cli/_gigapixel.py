"""``squeezebox demo --gigapixel``: one training step on a whole image that no memory holds."""

from __future__ import annotations

import json
import re
import shutil
import tempfile
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

import squeezebox
from squeezebox.cli._data import demo_file
from squeezebox.cli._show import Show, progress
from squeezebox.memory import ProcessMeter
from squeezebox.reports import human_bytes, parse_size, require_writable, write_whole
from squeezebox.schema import DatasetError, OptionError, OutputError

_TILE = 256  # pixels a side of the pieces of photographs
_CELL = 32  # pixels between the mask's support points
_WAVES = 24  # that make the mask's shape


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Slide:
    """Memory-mapped: pixels, uint8 ``[height, width, 3]``, and where tissue is, uint8 ``[height, width]``."""

    pixels: NDArray[np.uint8]
    mask: NDArray[np.uint8]


def lay_out(folder: Path, height: int, width: int, seed: int, show: Show) -> Slide:
    """Fill two files in ``folder``: pieces of photographs in tissue, and around it faded to glass.

    Args:
        folder: where 4 bytes a pixel are written.
        height: pixels.
        width: pixels.
        seed: of the pieces and of the tissue's shape.
        show: called after each row of pieces with (rows, of how many, what they are).

    Raises:
        DatasetError: the photographs are missing or damaged.
        OutputError: the disk has too little room.
    """
    _require_room(folder, 4 * height * width)
    photographs = _photographs()
    random = np.random.default_rng(seed)
    slide = _mapped(folder, height, width, "w+")
    shape = _Shape(random, height, width)
    for top in range(0, height, _TILE):
        rows = min(_TILE, height - top)
        tissue = shape.rows(top, rows)
        slide.mask[top : top + rows] = tissue
        pieces = [_piece(photographs, random) for _ in range(0, width, _TILE)]
        strip = np.concatenate(pieces, axis=1)[:rows, :width]
        slide.pixels[top : top + rows] = np.where(tissue[:, :, None] != 0, strip, 200 + strip // 5)
        show(top + rows, height, "rows")
    del slide  # with the pages that were written
    return _mapped(folder, height, width, "r")


def _mapped(folder: Path, height: int, width: int, mode: Literal["r", "w+"]) -> Slide:
    return Slide(
        pixels=np.memmap(folder / "pixels", np.uint8, mode, shape=(height, width, 3)),
        mask=np.memmap(folder / "mask", np.uint8, mode, shape=(height, width)),
    )


def temporary_folder() -> tempfile.TemporaryDirectory[str]:
    """A folder that is gone with its content when it is closed."""
    return tempfile.TemporaryDirectory(prefix="squeezebox-")


class _Shape:
    """Smooth blobs: waves of random directions, added up."""

    def __init__(self, random: np.random.Generator, height: int, width: int) -> None:
        self._width, short = width, min(height, width)
        self._lengths = 2.0 * np.pi / (short * random.uniform(0.1, 0.8, _WAVES))
        self._angles = random.uniform(0.0, 2.0 * np.pi, _WAVES)
        self._phases = random.uniform(0.0, 2.0 * np.pi, _WAVES)

    def rows(self, top: int, count: int) -> NDArray[np.uint8]:
        x = np.arange(0, self._width + _CELL, _CELL)
        y = top + np.arange(0, count + _CELL, _CELL)
        field = np.zeros((len(y), len(x)))
        for length, angle, phase in zip(self._lengths, self._angles, self._phases, strict=True):
            field += np.cos(length * (np.cos(angle) * x[None] + np.sin(angle) * y[:, None]) + phase)
        inside = (field > 1.0).astype(np.uint8)
        return inside.repeat(_CELL, 0).repeat(_CELL, 1)[:count, : self._width]


def _piece(photographs: list[NDArray[np.uint8]], random: np.random.Generator) -> NDArray[np.uint8]:
    """A random square of a random photograph, turned or mirrored."""
    photograph = photographs[random.integers(len(photographs))]
    top, left = (int(random.integers(size - _TILE + 1)) for size in photograph.shape[:2])
    square = np.rot90(photograph[top : top + _TILE, left : left + _TILE], int(random.integers(4)))
    return np.ascontiguousarray(square[:, :: 1 - 2 * int(random.integers(2))])


def _photographs() -> list[NDArray[np.uint8]]:
    path = demo_file("photographs.npz")
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
            return [arrays[name] for name in arrays]
    except (OSError, ValueError, EOFError) as error:
        raise DatasetError(f"{path} is missing or damaged ({error}); reinstall squeezebox-demo.") from error


def _require_room(folder: Path, nbytes: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < nbytes:
        raise OutputError(
            f"the image and its mask take {human_bytes(nbytes)} of disk, and {folder} has "
            f"{human_bytes(free)} left. Give a smaller --size, or another folder in TMPDIR."
        )


_SAMPLING_SECONDS = 0.02


@dataclass(frozen=True, kw_only=True, slots=True)
class Gigapixel:
    """What the command line said."""

    out: Path
    size: str = "16000x64000"
    memory: str = "512MiB"
    steps: int = 1
    seed: int = 0


class Network(nn.Module):
    """A U-Net of 10,433 parameters with large kernels and strides of 4: tissue or not, for every pixel."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Conv2d(3, 8, 9, stride=4, padding=4)
        self.further = nn.Conv2d(8, 12, 5, stride=4, padding=2)
        self.middle = nn.Conv2d(12, 12, 3, padding=1)
        self.up = nn.ConvTranspose2d(12, 8, 4, stride=4)
        self.merge = nn.Conv2d(16, 8, 3, padding=1)
        self.last = nn.ConvTranspose2d(8, 4, 8, stride=4, padding=2)
        self.head = nn.Conv2d(4, 1, 1)

    def forward(self, image: Tensor) -> Tensor:
        """Logits ``[N, 1, H, W]`` of images ``[N, 3, H, W]`` whose sides are multiples of 16."""
        fine = torch.relu(self.down(image))
        coarse = torch.relu(self.middle(torch.relu(self.further(fine))))
        merged = torch.relu(self.merge(torch.cat([fine, torch.relu(self.up(coarse))], 1)))
        logits: Tensor = self.head(torch.relu(self.last(merged)))
        return logits


def loss_fn(logits: Tensor, mask: Tensor) -> Tensor:
    """Mean over pixels of the binary cross entropy; the mask is uint8 ``[H, W]``."""
    return nn.functional.binary_cross_entropy_with_logits(logits[:, 0], mask.to(logits.dtype)[None])


def run(settings: Gigapixel) -> dict[str, Any]:
    """Lay out the image, take the steps, write ``settings.out`` and return what was written.

    Raises:
        OptionError: an option is out of range.
        OutputError: ``out`` cannot be written, or the disk has no room for the image.
        BudgetError: the memory is too little for a strip.
    """
    height, width = _size(settings.size)
    parse_size("--memory", settings.memory)
    if settings.steps < 1:
        raise OptionError(f"--steps {settings.steps} is below 1.")
    require_writable(settings.out)
    start = time.perf_counter()
    with temporary_folder() as folder:
        with progress("laying out the image") as show:
            slide = lay_out(Path(folder), height, width, settings.seed, show)
        result = {
            "squeezebox": squeezebox.__version__,
            "torch": torch.__version__,
            "threads": torch.get_num_threads(),
            "settings": {**asdict(settings), "out": str(settings.out)},
            "image": {"height": height, "width": width, "bytes": 3 * height * width},
            **_train(settings, slide),
        }
    result["seconds"] = time.perf_counter() - start
    write_whole(settings.out, json.dumps(result, indent=1) + "\n")
    return result


def _size(text: str) -> tuple[int, int]:
    found = re.fullmatch(r"([0-9]{2,6})x([0-9]{2,6})", text)
    sides = (int(found[1]), int(found[2])) if found else (0, 0)
    if min(sides) < 64 or any(side % 16 for side in sides):
        raise OptionError(
            f"--size {text} is no height x width in multiples of 16, from 64; give 16000x64000."
        )
    return sides


def _train(settings: Gigapixel, slide: Slide) -> dict[str, Any]:
    torch.manual_seed(settings.seed)
    model = Network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    image, losses, seconds = slide.pixels.transpose(2, 0, 1)[None], list[float](), list[float]()
    with Peak() as peak, progress("training on the whole image") as show:
        step = squeezebox.streaming.StreamedStep(
            model,
            loss_fn,
            memory=settings.memory,
            progress=lambda now: show(now.done, now.total, f"{now.seconds_left:.0f} s left"),
        )
        plan = step.plan(image, slide.mask)
        for _ in range(settings.steps):
            start = time.perf_counter()
            losses.append(float(step(image, slide.mask)))
            seconds.append(time.perf_counter() - start)
            optimizer.step()
            optimizer.zero_grad()
    return {
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "plan": asdict(plan),
        "losses": losses,
        "step_seconds": float(np.median(seconds)),
        "peak_bytes": peak.nbytes,
    }


class Peak:
    """The most memory that this process holds beyond what it held before.

    It is the system's own highest (VmHWM), read every few hundredths of a second: measuring strips sets that
    back. ``nbytes`` is None where the system does not say.
    """

    def __init__(self) -> None:
        self.nbytes: int | None = None
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Peak:
        ProcessMeter().start()  # sets the highest back
        self._before = _status("VmRSS")
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()

    def _watch(self) -> None:
        while self._before is not None:
            self.nbytes = max(self.nbytes or 0, (_status("VmHWM") or 0) - self._before)
            if self._end.wait(_SAMPLING_SECONDS):
                return


def _status(name: str) -> int | None:
    try:
        lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith(f"{name}:")), None)

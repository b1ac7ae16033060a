"""A whole-slide-like image of any size, laid out of real photographs, with the mask of its tissue."""

from __future__ import annotations

import importlib.resources
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from squeezebox.cli._progress import Show
from squeezebox.reports import human_bytes
from squeezebox.schema import DatasetError, OutputError

PHOTOGRAPHS = importlib.resources.files("squeezebox.cli") / "data" / "photographs.npz"

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
    slide = Slide(
        pixels=np.memmap(folder / "pixels", np.uint8, "w+", shape=(height, width, 3)),
        mask=np.memmap(folder / "mask", np.uint8, "w+", shape=(height, width)),
    )
    shape = _Shape(random, height, width)
    for top in range(0, height, _TILE):
        rows = min(_TILE, height - top)
        tissue = shape.rows(top, rows)
        slide.mask[top : top + rows] = tissue
        pieces = [_piece(photographs, random) for _ in range(0, width, _TILE)]
        strip = np.concatenate(pieces, axis=1)[:rows, :width]
        slide.pixels[top : top + rows] = np.where(tissue[:, :, None] != 0, strip, 200 + strip // 5)
        show(top + rows, height, "rows")
    return slide


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
    try:
        with PHOTOGRAPHS.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
            return [arrays[name] for name in arrays]
    except (OSError, ValueError, EOFError) as error:
        raise DatasetError(f"{PHOTOGRAPHS} is missing or damaged ({error}); reinstall squeezebox.") from error


def _require_room(folder: Path, nbytes: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < nbytes:
        raise OutputError(
            f"the image and its mask take {human_bytes(nbytes)} of disk, and {folder} has "
            f"{human_bytes(free)} left. Give a smaller --size, or another folder in TMPDIR."
        )

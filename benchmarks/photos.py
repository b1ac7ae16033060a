"""Real photographs as two endless tasks: which photo is this crop from, and which colour has each pixel?

Goes in: batch, image side and seed. Comes out: normalised float32 crops and labels.
May touch: the image files inside the scikit-image and scikit-learn wheels; no network.
"""

from collections.abc import Iterator
from functools import cache
from importlib.resources import files

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

_SKIMAGE = (
    "astronaut.png",
    "brick.png",
    "camera.png",
    "cell.png",
    "chelsea.png",
    "clock_motion.png",
    "coffee.png",
    "coins.png",
    "grass.png",
    "gravel.png",
    "hubble_deep_field.jpg",
    "ihc.png",
    "moon.png",
    "motorcycle_left.png",
    "page.png",
    "retina.jpg",
    "rocket.jpg",
    "text.png",
)
_SKLEARN = ("china.jpg", "flower.jpg")
# (package that ships the file, file); the position is the label
PHOTOS: tuple[tuple[str, str], ...] = (
    *(("skimage.data", name) for name in _SKIMAGE),
    *(("sklearn.datasets.images", name) for name in _SKLEARN),
)
# per-channel statistics of ImageNet, the customary normalisation
_MEAN = (0.485, 0.456, 0.406)
_STD = (0.229, 0.224, 0.225)
NUM_COLOURS = 9
_COLOURED = 0.04  # of full brightness: by how much red or blue must leave the grey


def num_classes() -> int:
    """The number of photographs, hence of labels."""
    return len(PHOTOS)


def batches(batch: int, size: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield random resized, randomly mirrored crops without end; same seed, same crops.

    Args:
        batch: images in each batch, at least 1.
        size: side of the square crops in pixels, at least 1.
        seed: seed of this iterator's own generator.

    Returns:
        An iterator of (images, labels): float32 (batch, 3, size, size) with ImageNet
        normalisation, and int64 (batch,) below `num_classes()`.

    Raises:
        ValueError: batch or size is below 1.
        ModuleNotFoundError: scikit-image, scikit-learn or Pillow is not installed.
        FileNotFoundError: an installed package does not ship one of the photographs.
    """
    if batch < 1 or size < 1:
        raise ValueError(f"batch={batch} and size={size} must both be at least 1.")
    return _batches(_photographs(), batch, size, torch.Generator().manual_seed(seed))


def coloured(batch: int, size: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """The crops of :func:`batches` in shades of grey, and the colour of each of their pixels.

    Red is below, near or above the pixel's grey, and so is blue: nine classes, of which grey pixels have
    the middle one.

    Returns:
        An iterator of (images, labels): float32 (batch, 3, size, size) of three equal channels, and int64
        (batch, size, size) below `NUM_COLOURS`.

    Raises:
        As :func:`batches`.
    """
    return (_uncoloured(images) for images, _ in batches(batch, size, seed))


def _uncoloured(images_NCHW: Tensor) -> tuple[Tensor, Tensor]:
    mean, std = (torch.tensor(values).view(1, 3, 1, 1) for values in (_MEAN, _STD))
    pixels = images_NCHW * std + mean
    grey = pixels.mean(1, keepdim=True)
    differences = pixels[:, ::2] - grey
    level = (differences > -_COLOURED).long() + (differences > _COLOURED).long()
    spread = sum(_STD) / 3
    shades = ((grey - sum(_MEAN) / 3) / spread).expand_as(pixels)
    return shades.contiguous(), 3 * level[:, 0] + level[:, 1]


def _batches(
    photographs: tuple[Tensor, ...], batch: int, size: int, generator: torch.Generator
) -> Iterator[tuple[Tensor, Tensor]]:
    mean, std = (torch.tensor(values).view(1, 3, 1, 1) for values in (_MEAN, _STD))
    while True:
        labels = torch.randint(len(photographs), (batch,), generator=generator)
        crops = [_crop(photographs[label], size, generator) for label in labels.tolist()]
        yield (torch.cat(crops) / 255 - mean) / std, labels


def _crop(photo_CHW: Tensor, size: int, generator: torch.Generator) -> Tensor:
    """A crop of 8 to 100 % of the area, sides 3:4 to 4:3, as 1 x 3 x size x size float."""
    area, ratio, x, y, flip = torch.rand(5, generator=generator).tolist()
    full_height, full_width = photo_CHW.shape[1:]
    pixels = (0.08 + 0.92 * area) * full_height * full_width
    aspect = (4 / 3) ** (2 * ratio - 1)
    height = min(full_height, max(1, round((pixels / aspect) ** 0.5)))
    width = min(full_width, max(1, round((pixels * aspect) ** 0.5)))
    top, left = int(y * (full_height - height + 1)), int(x * (full_width - width + 1))
    crop = photo_CHW[None, :, top : top + height, left : left + width].float()
    resized = F.interpolate(crop, (size, size), mode="bilinear", antialias=True)
    return resized.flip(3) if flip < 0.5 else resized


@cache
def _photographs() -> tuple[Tensor, ...]:
    return tuple(_read(package, name) for package, name in PHOTOS)


def _read(package: str, name: str) -> Tensor:
    """One photograph as uint8 (3, height, width); grey ones have three equal channels."""
    try:
        from PIL import Image

        with (files(package) / name).open("rb") as file, Image.open(file) as image:
            pixels = np.array(image.convert("RGB"))
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"The benchmark photographs ship with scikit-image and scikit-learn, and "
            f'{error.name!r} is not installed. Run: pip install "squeezebox[bench]"'
        ) from error
    except FileNotFoundError as error:
        raise FileNotFoundError(
            f"The installed {package.partition('.')[0]} does not ship {name}, which is one of "
            f'the {len(PHOTOS)} photographs. Run: pip install --upgrade "squeezebox[bench]"'
        ) from error
    return torch.from_numpy(pixels).permute(2, 0, 1).contiguous()

"""Fashion-MNIST: the full set where it is found, else the subset that squeezebox[demo] brings."""

from __future__ import annotations

import gzip
import importlib.resources
import math
import os
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from squeezebox.schema import DatasetError, OptionError

if TYPE_CHECKING:
    from importlib.resources.abc import Traversable

    from numpy.typing import NDArray

_FILES = {
    "train_images": "train-images-idx3-ubyte",
    "train_labels": "train-labels-idx1-ubyte",
    "test_images": "t10k-images-idx3-ubyte",
    "test_labels": "t10k-labels-idx1-ubyte",
}
_IMAGES_MAGIC = 2051
_LABELS_MAGIC = 2049
_SIDE = 28
_NUM_CLASSES = 10
_HOW_TO_GET_IT = (
    "Install Debian's package (apt install dataset-fashion-mnist), or put the four files of "
    f"https://github.com/zalandoresearch/fashion-mnist ({', '.join(_FILES.values())}; .gz or unpacked) "
    "into one of these folders; the subset that squeezebox[demo] brings needs neither."
)
_PACKAGE = "squeezebox_demo"


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Dataset:
    """Grey images with labels, split for training and testing.

    Images are uint8 ``[n, 28, 28]``, labels uint8 ``[n]`` in 0..9; ``source`` says where they came from.
    """

    train_images: NDArray[np.uint8]
    train_labels: NDArray[np.uint8]
    test_images: NDArray[np.uint8]
    test_labels: NDArray[np.uint8]
    source: str


def fashion_mnist(root: Path | None = None, subset: bool | None = None) -> Dataset:
    """Load Fashion-MNIST.

    Args:
        root: The folder that must hold the full set, as four IDX files, gzipped or not, in it or in its
            ``FashionMNIST/raw``. None looks where ``SQUEEZEBOX_DATA`` says, or else in the usual places.
        subset: True takes the subset of squeezebox[demo], False demands the full set, None takes the full
            set when it is found. A folder that was named by ``root`` or ``SQUEEZEBOX_DATA`` must hold it.

    Raises:
        OptionError: ``root`` was given together with ``subset=True``.
        DatasetError: The set was asked for and is missing, or its files are damaged.
    """
    if subset:
        if root is not None:
            raise OptionError(
                f"The subset comes with squeezebox[demo], so {root} would not be read; drop one."
            )
        return _embedded()
    named = root or (Path(os.environ["SQUEEZEBOX_DATA"]) if os.environ.get("SQUEEZEBOX_DATA") else None)
    folders = _folders_of(named) if named else _usual_folders()
    for folder in folders:
        if not _missing(folder):
            return _full(folder)
    if named is None and subset is None:
        return _embedded()
    looked = "; ".join(f"{folder} ({_missing(folder)})" for folder in folders)
    raise DatasetError(f"The full Fashion-MNIST was not found. Looked in: {looked}. {_HOW_TO_GET_IT}")


def demo_file(name: str) -> Traversable:
    """A file of images for the demonstration.

    Raises:
        DatasetError: they are not installed.
    """
    try:
        return importlib.resources.files(_PACKAGE) / name
    except ModuleNotFoundError as error:
        raise DatasetError(
            f"the images in {name} are not installed. They are 6 MB: pip install 'squeezebox[demo]'"
        ) from error


def _folders_of(root: Path) -> list[Path]:
    return [root, root / "FashionMNIST" / "raw"]


def _usual_folders() -> list[Path]:
    return [
        Path("/usr/share/datasets/fashion-mnist"),
        Path("~/.cache/squeezebox/fashion-mnist").expanduser(),
        Path("data/FashionMNIST/raw"),
    ]


def _find(folder: Path, name: str) -> Path | None:
    """The unpacked file, else the gzipped one, else None."""
    return next((path for path in (folder / name, folder / f"{name}.gz") if path.is_file()), None)


def _missing(folder: Path) -> str:
    """What keeps ``folder`` from being the full set; empty if nothing does."""
    if not folder.is_dir():
        return "no such folder"
    absent = [name for name in _FILES.values() if _find(folder, name) is None]
    return f"{len(absent)} of 4 files missing: {', '.join(absent)}" if absent else ""


def _full(folder: Path) -> Dataset:
    paths = {key: _find(folder, name) or folder / name for key, name in _FILES.items()}
    return _checked(
        train_images=_read_images(paths["train_images"]),
        train_labels=_read_labels(paths["train_labels"]),
        test_images=_read_images(paths["test_images"]),
        test_labels=_read_labels(paths["test_labels"]),
        source=f"full set in {folder}",
    )


def _embedded() -> Dataset:
    path = demo_file("fashion_mnist.npz")
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
            return _checked(**{key: arrays[key] for key in _FILES}, source="subset of squeezebox[demo]")
    except (OSError, KeyError, ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        if isinstance(error, DatasetError):
            raise
        raise DatasetError(f"{path} is missing or damaged ({error}); reinstall squeezebox-demo.") from error


def _read_images(path: Path) -> NDArray[np.uint8]:
    header, body = _read_idx(path, _IMAGES_MAGIC, num_dims=3)
    if header[1:] != (_SIDE, _SIDE):
        raise _damaged(path, f"images are {header[1]} x {header[2]} pixels, not {_SIDE} x {_SIDE}")
    return body.reshape(header)


def _read_labels(path: Path) -> NDArray[np.uint8]:
    _, body = _read_idx(path, _LABELS_MAGIC, num_dims=1)
    return body


def _read_idx(path: Path, magic: int, num_dims: int) -> tuple[tuple[int, ...], NDArray[np.uint8]]:
    """Shape and bytes of an IDX file: a big-endian magic number, the shape, then one byte an element."""
    content = _read_bytes(path)
    header_nbytes = 4 + 4 * num_dims
    if len(content) < header_nbytes:
        raise _damaged(path, f"it has {len(content)} bytes, fewer than the {header_nbytes} of its header")
    found, *shape = (int(each) for each in np.frombuffer(content, ">u4", count=1 + num_dims))
    if found != magic:
        raise _damaged(path, f"its magic number is {found}, not {magic}")
    expected = header_nbytes + math.prod(shape)
    if len(content) != expected:
        raise _damaged(path, f"it has {len(content)} bytes, but its header ({shape}) announces {expected}")
    return tuple(shape), np.frombuffer(content, np.uint8, offset=header_nbytes)


def _read_bytes(path: Path) -> bytearray:
    """The unpacked content; a bytearray, so that arrays on it can be written to."""
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            return bytearray(file.read())
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise _damaged(path, f"it cannot be unpacked: {error}") from error
    except OSError as error:
        raise DatasetError(f"{path} is there but cannot be read: {error}. Check its permissions.") from error


def _damaged(path: Path, what: str) -> DatasetError:
    return DatasetError(f"{path} is damaged: {what}. Get the file again. {_HOW_TO_GET_IT}")


def _checked(*, source: str, **arrays: NDArray[np.uint8]) -> Dataset:
    """A Dataset whose counts match and whose labels are classes."""
    for split in ("train", "test"):
        images, labels = arrays[f"{split}_images"], arrays[f"{split}_labels"]
        if len(images) != len(labels) or not len(labels):
            raise DatasetError(
                f"The {source} is damaged: {len(images)} {split} images but {len(labels)} labels. "
                f"Get the files again. {_HOW_TO_GET_IT}"
            )
        if labels.max() >= _NUM_CLASSES:
            raise DatasetError(
                f"The {source} is damaged: a {split} label is {labels.max()}, but there are {_NUM_CLASSES} "
                f"classes, 0 to {_NUM_CLASSES - 1}. Get the files again. {_HOW_TO_GET_IT}"
            )
    return Dataset(**arrays, source=source)

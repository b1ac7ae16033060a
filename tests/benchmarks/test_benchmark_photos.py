import importlib.util
from itertools import islice

import pytest
import torch

from benchmarks import photos

needs_photos = pytest.mark.skipif(
    not (importlib.util.find_spec("skimage") and importlib.util.find_spec("sklearn")),
    reason='needs pip install "squeezebox[bench]"',
)


@needs_photos
def test_batches_are_normalised_labelled_crops() -> None:
    images, labels = next(photos.batches(64, 24, seed=0))
    assert images.shape == (64, 3, 24, 24)
    assert images.dtype == torch.float32
    assert images.abs().max() < 2.7
    assert 0.3 < images.std() < 3
    assert labels.dtype == torch.int64
    assert 0 <= labels.min() < labels.max() < photos.num_classes()


@needs_photos
def test_the_seed_decides_the_batches() -> None:
    first, again, other = (
        torch.stack([images for images, _ in islice(photos.batches(3, 16, seed), 2)]) for seed in (1, 1, 2)
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert not torch.equal(first[0], first[1])


@needs_photos
def test_coloured_hides_the_colours_that_it_asks_for() -> None:
    images, labels = next(photos.coloured(32, 24, seed=0))
    assert images.shape == (32, 3, 24, 24)
    assert torch.equal(images[:, 0], images[:, 1])
    assert torch.equal(images[:, 0], images[:, 2])
    assert labels.shape == (32, 24, 24)
    assert labels.dtype == torch.int64
    assert set(labels.unique().tolist()) <= set(range(photos.NUM_COLOURS))
    assert len(labels.unique()) > photos.NUM_COLOURS // 2


@pytest.mark.parametrize(
    ("pixel", "colour"), [((0.5, 0.5, 0.5), 4), ((0.9, 0.2, 0.2), 6), ((0.2, 0.3, 0.9), 2)]
)
def test_colours_are_told_by_red_and_blue(pixel: tuple[float, float, float], colour: int) -> None:
    mean, std = (torch.tensor(values) for values in (photos._MEAN, photos._STD))
    normalised = ((torch.tensor(pixel) - mean) / std).view(1, 3, 1, 1)
    _, labels = photos._uncoloured(normalised.expand(1, 3, 2, 2))
    assert torch.equal(labels, torch.full((1, 2, 2), colour))


@needs_photos
def test_batches_leave_the_global_generator_alone() -> None:
    state = torch.get_rng_state()
    next(photos.batches(2, 8, seed=0))
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize(("batch", "size"), [(0, 8), (2, 0)])
def test_empty_batches_are_refused(batch: int, size: int) -> None:
    with pytest.raises(ValueError, match="must both be at least 1"):
        photos.batches(batch, size, seed=0)


def test_a_missing_package_says_what_to_install() -> None:
    with pytest.raises(ModuleNotFoundError, match=r'pip install "squeezebox\[bench\]"'):
        photos._read("a_package_that_is_not_installed", "astronaut.png")


@needs_photos
def test_a_missing_photograph_names_its_package() -> None:
    with pytest.raises(FileNotFoundError, match="skimage does not ship nothing.png"):
        photos._read("skimage.data", "nothing.png")

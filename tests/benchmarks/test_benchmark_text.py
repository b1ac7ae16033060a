from pathlib import Path

import pytest
import torch

from benchmarks import text


def test_every_character_is_followed_by_the_next() -> None:
    read, following = next(text.batches(4, 50, seed=0))
    assert read.shape == following.shape == (4, 50)
    assert read.dtype == torch.int64
    assert 0 <= read.min() < read.max() < text.NUM_CHARACTERS
    assert torch.equal(read[:, 1:], following[:, :-1])


def test_the_seed_decides_the_passages() -> None:
    first, again, other = (next(text.batches(2, 20, seed))[0] for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_what_is_held_out_is_another_text() -> None:
    assert not set(text.HELD_OUT) & set(text.MODULES)
    seen, held_out = text._characters(), text._characters(modules=text.HELD_OUT)
    assert len(held_out) > 100_000
    assert not torch.equal(seen[:1000], held_out[:1000])


@pytest.mark.parametrize(("batch", "length"), [(0, 8), (2, 0)])
def test_empty_batches_are_refused(batch: int, length: int) -> None:
    with pytest.raises(ValueError, match="must both be at least 1"):
        text.batches(batch, length, seed=0)


def test_a_python_without_sources_says_so(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="source of Python's standard library"):
        text._characters(tmp_path)

"""The noise is Philox's, of the normal distribution, and the same to the bit however it is computed."""

import numpy as np
import pytest
import torch
from scipy import stats

from squeezebox.layers import _ops
from squeezebox.layers._normals import normals, words

CPU = torch.device("cpu")
KEY = dict(seed=0x123456789ABCDEF, draw=5, sample=1, module=3)
HERE = tuple(KEY.values())


def drawn(numel, *key):
    values = torch.ones(numel)
    torch.ops.squeezebox.scale_normals(values, *(key or HERE))
    return values


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0, 0, 0, 0), (0, 0), "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ((2**32 - 1,) * 4, (2**32 - 1,) * 2, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            "d16cfe09 94fdcceb 5001e420 24126ea1",
        ),
    ],
)
def test_words_are_those_that_its_authors_publish(counter, key, expected):
    found = words(torch.tensor(counter[:1]), key, counter[1:])
    assert " ".join(f"{int(word):08x}" for word in found) == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(0,), (1,), (), (37, 29), (3, 1024)])
def test_compiled_loops_equal_plain_torch_to_the_bit(dtype, shape):
    values, mean = torch.randn(shape, dtype=dtype), torch.randn(shape, dtype=dtype)
    for operator, reference, others in (
        (torch.ops.squeezebox.add_normals, _ops.add_reference, (mean,)),
        (torch.ops.squeezebox.scale_normals, _ops.scale_reference, ()),
    ):
        found, expected = values.clone(), values.clone()
        operator(found, *others, *HERE)
        reference(expected, *others, *HERE)
        assert torch.equal(found, expected)


def test_an_element_is_where_the_counter_says_in_long_tensors_too():
    numel = 300_000
    assert torch.equal(drawn(numel), normals(numel, **KEY, device=CPU))
    assert torch.equal(drawn(numel)[:1000], drawn(1000))


def test_threads_draw_the_same():
    threads, one = torch.get_num_threads(), drawn(500_000)
    try:
        torch.set_num_threads(4)
        assert torch.equal(drawn(500_000), one)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("part", range(4))
@pytest.mark.parametrize("bit", [0, 31])
def test_every_part_of_the_key_changes_the_noise(part, bit):
    key = list(HERE)
    key[part] ^= 1 << bit
    assert abs(float((drawn(4096) * drawn(4096, *key)).mean())) < 0.08


def check_distribution(numel):
    """Tests at 0.1 %, of numbers that are the same in every run."""
    values = drawn(numel).double().numpy()
    assert stats.kstest(values, "norm").pvalue > 0.001
    assert anderson_darling(np.sort(values)) < 6.0  # the law's 99.9 % quantile
    for power, moment in ((1, 0), (2, 1), (3, 0), (4, 3), (6, 15)):
        powers = values**power
        assert abs(powers.mean() - moment) < 3.5 * powers.std() / numel**0.5
    for lag in (1, 2, 3, 4, 255, 256, 257, 512, 768, 1024):
        for kind in (values, values**2 - 1):
            correlation = (kind[lag:] * kind[:-lag]).mean() / (kind * kind).mean()
            assert abs(correlation) < 4 / numel**0.5
    for limit in (3.0, 4.0, 4.5):
        expected = numel * 2 * stats.norm.sf(limit)
        assert abs((abs(values) > limit).sum() - expected) < 4 * expected**0.5 + 1


def anderson_darling(ordered):
    """A^2 against the standard normal distribution, no parameter estimated."""
    numel = len(ordered)
    odd = 2 * np.arange(1, numel + 1) - 1
    return -numel - (odd * (stats.norm.logcdf(ordered) + stats.norm.logsf(ordered[::-1]))).sum() / numel


def test_a_million_numbers_are_normal_and_independent():
    check_distribution(10**6)


@pytest.mark.slow
def test_ten_million_numbers_are_normal_and_independent():
    check_distribution(10**7)


def test_samples_are_independent():
    first, second = (drawn(10**6, 1, 2, sample, 3).double() for sample in (0, 1))
    assert abs(float((first * second).mean())) < 0.004


def test_the_farthest_words_stay_finite():
    """A radius word of 0 is the farthest a number gets."""
    from squeezebox.layers._normals import _pair

    ends = torch.tensor([0, 0, 2**32 - 1, 2**32 - 1, 2**31])
    x, y = _pair(ends, torch.tensor([0, 2**32 - 1, 0, 2**31, 2**30]))
    assert torch.isfinite(x).all() and torch.isfinite(y).all()
    assert float(torch.hypot(x, y).max()) == pytest.approx(6.7638, abs=1e-3)

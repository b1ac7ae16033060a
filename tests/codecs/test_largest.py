"""The k largest elements: torch's, with ties to the lowest place."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from squeezebox import codecs
from squeezebox.codecs import _measures
from squeezebox.schema import OptionError


def expected(values, k):
    found, places = torch.sort(values, descending=True, stable=True)
    return found[:k], places[:k]


def check(values, k):
    found = codecs.largest(values, k)
    wanted, places = expected(values, k)
    assert torch.equal(found.indices, places)
    assert found.values.dtype == values.dtype
    assert torch.equal(found.values.nan_to_num(7e7), wanted.nan_to_num(7e7))


DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.int64, torch.uint8]


@given(
    numel=st.integers(1, 3000),
    share=st.sampled_from([0.0, 0.001, 0.01, 0.03, 0.2, 1.0]),
    dtype=st.sampled_from(DTYPES),
    levels=st.sampled_from([1, 2, 5, 1000]),
    seed=st.integers(0, 1000),
)
def test_equals_a_stable_sort(numel, share, dtype, levels, seed):
    generator = torch.Generator().manual_seed(seed)
    values = torch.randint(0, levels, (numel,), generator=generator).to(dtype)
    with pytest.MonkeyPatch.context() as patch:  # every way, at sizes that are quick to try
        patch.setattr(_measures, "_FEW", 0)
        check(values, round(share * numel))


@pytest.mark.parametrize("k", [1, 30, 500, 20_000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_large(k, dtype):
    torch.manual_seed(0)
    values = torch.randn(100_003).to(dtype)
    check(values, k)
    values[torch.randint(0, len(values), (7,))] = torch.nan
    check(values, k)


def test_special_values():
    torch.manual_seed(0)
    values = torch.randn(40_000).clamp(max=0.0)  # half of them tie at zero, of either sign
    values[::3] *= 0.0
    for k in (1, 64, 1000, 30_000):
        check(values, k)
    values[5], values[39_999] = torch.inf, torch.inf
    assert codecs.largest(values, 2).indices.tolist() == [5, 39_999]


def test_any_strides_and_none():
    values = torch.arange(60_000.0)[::3]
    assert codecs.largest(values, 3).indices.tolist() == [19_999, 19_998, 19_997]
    assert codecs.largest(values, 0).values.numel() == 0
    assert codecs.largest(torch.empty(0), 0).indices.dtype == torch.int64


@pytest.mark.parametrize(
    ("values", "k"),
    [(torch.ones(4), 5), (torch.ones(4), -1), (torch.ones(2, 2), 1), (torch.ones(3).bool(), 1)],
)
def test_refused(values, k):
    with pytest.raises(OptionError, match="largest"):
        codecs.largest(values, k)

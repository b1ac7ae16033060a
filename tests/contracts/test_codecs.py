"""One contract for every codec, hostile values included."""

import math

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from squeezebox import codecs
from squeezebox.schema import CodecError

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
# These keep values within a bound; mask, sign, interval, narrow and pool-index have tests of their own.
VALUED = [
    name for name in codecs.available() if name not in ("mask", "sign", "interval", "narrow", "pool-index")
]
NEEDS_BOUND = ("blocks", "entropy", "entropy-sign")
HOSTILE = (0.0, -0.0, 1e-45, -1e-45, 1e-40, 1e-38, 6e-8, 1e-3, 1.0, -1.0, 65504.0, 1e30, 3.4e38, -3.4e38)


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    """Float tensors of any dtype, length and layout, smooth, sparse or hostile."""
    dtype = draw(st.sampled_from(FLOATS))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    shape = draw(st.lists(st.integers(0, 9), max_size=4))
    kind = draw(st.sampled_from(("normal", "relu", "offset", "hostile", "wide")))
    x = torch.randn(shape, generator=generator, dtype=torch.float64)
    if kind == "relu":
        x = x.relu()
    elif kind == "offset":
        x = x * 1e-4 + 1000
    elif kind == "wide":
        x = x * torch.exp(40 * torch.randn(shape, generator=generator, dtype=torch.float64))
    elif kind == "hostile":
        pick = torch.randint(len(HOSTILE), shape, generator=generator)
        x = torch.tensor(HOSTILE, dtype=torch.float64)[pick]
    limit = torch.finfo(dtype).max
    x = x.clamp(-limit, limit).to(dtype).nan_to_num(0, limit, -limit)
    order = draw(st.permutations(range(x.dim())))
    x = x.permute(order)
    return x[..., ::2] if x.dim() and draw(st.booleans()) else x


bounds = st.one_of(st.floats(1e-6, 10), st.sampled_from((0.0, 1e-45, 1e-12, 1e30, 1e300)))


def assert_contract(codec: codecs.Codec, x: Tensor, packed: codecs.Packed, back: Tensor) -> None:
    """Shape, dtype, bound, zeros and signs."""
    assert back.dtype == x.dtype and back.shape == x.shape and back.device == x.device
    error = (back.double() - x.double()).abs()
    assert bool((error <= packed.bound).all()), (error.max().item(), packed.bound)
    assert bool((back[x == 0] == 0).all())
    if codec.exact:
        assert packed.bound == 0.0
    if codec.preserves_sign:
        assert torch.equal(back.sign(), x.sign())


@pytest.mark.parametrize("name", VALUED)
@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(x=tensors(), bound=bounds, lag=st.sampled_from((0, 1, 3, -1)), dither=st.sampled_from((0, 1, 50)))
@example(x=torch.ones(2, dtype=torch.float16), bound=1e30, lag=0, dither=0)
def test_error_stays_within_the_bound(name: str, x: Tensor, bound: float, lag: int, dither: int) -> None:
    codec = codecs.get(name)
    packed = codec.pack(x, bound, lag=lag, dither=dither) if name in NEEDS_BOUND else codec.pack(x)
    assert_contract(codec, x, packed, codec.unpack(packed))
    assert_contract(codec, x, packed, codec.unpack(codecs.loads(codecs.dumps(packed))))


@pytest.mark.parametrize("name", [*VALUED, "mask", "sign", "interval", "narrow"])
def test_the_default_device_does_not_matter(name: str) -> None:
    codec, x = codecs.get(name), torch.randn(2, 3, 40, 40)
    x = {"mask": x > 0, "narrow": torch.arange(99)}.get(name, x)
    with torch.device("meta"):
        packed = codec.pack(x, 0.1 if name in NEEDS_BOUND else None)
        back = codec.unpack(packed)
        again = codec.unpack(codecs.loads(codecs.dumps(packed)))
    assert back.device == x.device and torch.equal(again, back)


@pytest.mark.parametrize("name", VALUED)
def test_dense_layouts_come_back_as_they_were(name: str) -> None:
    codec = codecs.get(name)
    x = torch.randn(2, 3, 5, 7).to(memory_format=torch.channels_last)
    packed = codec.pack(x, 0.5 if name in NEEDS_BOUND else None)
    assert codec.unpack(packed).stride() == x.stride()
    gap = x[:, :, ::2]
    packed = codec.pack(gap, 0.5 if name in NEEDS_BOUND else None)
    assert codec.unpack(packed).is_contiguous()


@pytest.mark.parametrize("name", VALUED)
def test_decodes_into_a_given_buffer(name: str) -> None:
    codec = codecs.get(name)
    x = torch.randn(3, 500)
    packed = codec.pack(x, 0.1 if name in NEEDS_BOUND else None)
    buffer = torch.full((2000,), math.nan)
    back = codec.unpack(packed, out=buffer)
    assert back.data_ptr() == buffer.data_ptr()
    assert torch.equal(back, codec.unpack(packed))
    assert bool(buffer[1500:].isnan().all())
    for wrong in (buffer[:10], buffer.double(), buffer.view(2, 1000)):
        with pytest.raises(CodecError):
            codec.unpack(packed, out=wrong)


@pytest.mark.parametrize("name", VALUED)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("bad", (math.nan, math.inf, -math.inf))
def test_nan_and_infinity_are_refused_or_kept(name: str, dtype: torch.dtype, bad: float) -> None:
    codec = codecs.get(name)
    x = torch.randn(1000).to(dtype)
    x[137] = bad
    try:
        packed = codec.pack(x, 0.1 if name in NEEDS_BOUND else None)
    except CodecError as refused:
        assert "1 of 1000" in str(refused) and "137" in str(refused)
    else:
        assert torch.equal(codec.unpack(packed).nan_to_num(7.0), x.nan_to_num(7.0))


@pytest.mark.parametrize("name", [name for name in VALUED if codecs.get(name).fixed_size])
def test_fixed_size_depends_on_the_shape_alone(name: str) -> None:
    codec = codecs.get(name)
    sizes = {codec.pack(x).nbytes for x in (torch.zeros(999), torch.randn(999), torch.ones(999))}
    assert len(sizes) == 1


@pytest.mark.parametrize("name", [name for name in VALUED if "stochastic" in name])
def test_stochastic_rounding_is_unbiased_and_repeatable(name: str) -> None:
    codec = codecs.get(name)
    x = torch.randn(256) * torch.rand(256)
    x[:20] = 0
    draws = torch.stack([codec.unpack(codec.pack(x, seed=seed)) for seed in range(400)])
    tolerance = 5 * codec.pack(x).bound / math.sqrt(400)
    assert float((draws.mean(0) - x).abs().max()) < tolerance
    assert torch.equal(draws[3], codec.unpack(codec.pack(x, seed=3)))


@pytest.mark.parametrize("name", ("zero4", "minmax2", "bf16", "fp8-e4m3"))
def test_a_bound_the_format_cannot_hold_is_refused_with_both_numbers(name: str) -> None:
    x = torch.randn(1000)
    reached = codecs.get(name).pack(x).bound
    assert codecs.get(name).pack(x, reached).bound == reached
    with pytest.raises(CodecError, match=f"{reached:.6g}.*{reached / 2:.6g}"):
        codecs.get(name).pack(x, reached / 2)

"""One contract for every codec, hostile values included."""

import math

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from squeezebox import codecs
from squeezebox.schema import CodecError, OptionError

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
# These keep values within a bound; mask, sign, interval, narrow and pool-index have tests of their own.
VALUED = [
    name for name in codecs.available() if name not in ("mask", "sign", "interval", "narrow", "pool-index")
]
NEEDS_BOUND = ("blocks", "entropy", "entropy-sign", "planes", "planes-sign")
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


@st.composite
def extremes(draw: st.DrawFn) -> Tensor:
    """Runs of a dtype's outermost values: its largest, denormals, zeros of both signs; NaN and infinity."""
    dtype = draw(st.sampled_from(FLOATS))
    facts = torch.finfo(dtype)
    least = facts.smallest_normal * facts.eps
    finite = (0.0, least, 3 * least, facts.smallest_normal, facts.eps, 1.0, facts.max / 3, facts.max)
    values = [sign * value for value in finite for sign in (1.0, -1.0)]
    if draw(st.integers(0, 3)) == 0:
        values += [math.nan, math.inf, -math.inf]
    runs = st.lists(st.sampled_from(values), min_size=1, max_size=4), st.integers(1, 400)
    parts = draw(st.lists(st.tuples(*runs), min_size=1, max_size=3))
    flat = [value for kinds, length in parts for value in (kinds * length)[:length]]
    return torch.tensor(flat, dtype=torch.float64).to(dtype)


def same_bits(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


def within(x: Tensor, back: Tensor, bound: float) -> bool:
    """Whether ``|x - back| <= bound``, also where the difference has no place in a float64."""
    near = (back.double() - x.double()).abs() <= bound
    return bool((near | ((back.double() / 2 - x.double() / 2).abs() <= bound / 2)).all())


def assert_contract(codec: codecs.Codec, x: Tensor, packed: codecs.Packed, back: Tensor) -> None:
    """Shape, dtype, bound, zeros and signs."""
    assert back.dtype == x.dtype and back.shape == x.shape and back.device == x.device
    assert bool(back.isfinite().all()) and math.isfinite(packed.bound)
    assert within(x, back, packed.bound), packed.bound
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
    packed = (
        codec.pack(x, bound, codecs.Hints(lag=lag, dither=dither)) if name in NEEDS_BOUND else codec.pack(x)
    )
    assert_contract(codec, x, packed, codec.unpack(packed))
    assert_contract(codec, x, packed, codec.unpack(codecs.loads(codecs.dumps(packed))))


@pytest.mark.every(3)
@pytest.mark.parametrize("name", [*VALUED, "mask"])
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(x=extremes(), bound=st.sampled_from((0.0, 1e-45, 1e-3, 1.0, 1e30, 3e38, 1e300)))
@example(x=torch.tensor([0.0, -0.0, 2.0]), bound=1.0)
@example(x=torch.tensor([-0.0, -0.0, 2.0]), bound=1.0)
@example(x=torch.tensor([0.0, -0.0], dtype=torch.float16), bound=1.0)
@example(x=torch.finfo(torch.float64).max * torch.tensor([-1.0, 1.0]).double().repeat(150), bound=1.0)
def test_extremes_are_within_the_bound_or_refused(name: str, x: Tensor, bound: float) -> None:
    codec = codecs.get(name)
    try:
        packed = codec.pack(x, bound if name in NEEDS_BOUND else None)
    except CodecError:
        assert name == "mask" or not (codec.exact or bool(x.isfinite().all()))
        return
    back = codec.unpack(packed)
    finite = x.isfinite()
    if codec.exact:
        assert same_bits(back, x)
    elif not bool(finite.all()):
        assert same_bits(back[~finite], x[~finite]) and within(x[finite], back[finite], packed.bound)
    else:
        assert_contract(codec, x, packed, back)


@settings(max_examples=60, deadline=None)
@given(
    x=extremes(), bound=st.sampled_from((1e-3, 1.0, 1e10, 1e38)), factor=st.sampled_from((1.0, 1e20, 3e38))
)
def test_bounds_whose_product_with_a_scale_overflows_are_kept(x: Tensor, bound: float, factor: float) -> None:
    for name in ("blocks", "entropy", "entropy-sign"):
        if x.dtype == torch.float64 or (name != "blocks" and x.dtype != torch.float32):
            continue
        codec = codecs.get(name)
        x = x.nan_to_num(1.0)
        packed = codec.pack(x, bound, codecs.Hints(scale=torch.tensor([factor, 1.0]), inner=7))
        assert_contract(codec, x, packed, codec.unpack(packed))


@pytest.mark.parametrize(
    "name", [name for name in VALUED if not codecs.get(name).exact and name not in NEEDS_BOUND]
)
def test_a_scale_is_never_ignored(name: str) -> None:
    with pytest.raises(OptionError, match="takes no scale"):
        codecs.get(name).pack(torch.ones(4), 1.0, codecs.Hints(scale=torch.ones(2)))


def _between(x: Tensor, lower: float, upper: float) -> Tensor:
    """What hardtanh's backward lets through; NaN as where it is not vectorised."""
    wide = x.double() if x.dtype == torch.float64 else x.float()
    low, high = torch.tensor([lower, upper], dtype=torch.float64).to(wide.dtype)
    return ~((wide <= low) | (wide >= high))


@settings(max_examples=300, deadline=None)
@given(x=extremes(), data=st.data())
def test_flags_of_extremes_are_what_backward_reads(x: Tensor, data: st.DataObject) -> None:
    sign, interval = codecs.get("sign"), codecs.get("interval")
    assert torch.equal(sign.unpack(sign.pack(x)) <= 0, x <= 0)
    facts = torch.finfo(x.dtype)
    near = [1.0, 1.0 - facts.eps / 9, 1.0 + facts.eps / 9, 1.0 + facts.eps, 0.0, -0.0, 1e-320, -1e-320]
    far = [facts.max, -facts.max, facts.max / 3, 1e308, -1e308, math.inf, -math.inf]
    lower, upper = sorted(
        data.draw(st.lists(st.sampled_from(near + far), min_size=2, max_size=2, unique=True))
    )
    if not lower < upper:
        return
    back = interval.unpack(interval.pack(x, lower=lower, upper=upper))  # type: ignore[call-arg]
    assert torch.equal(_between(back, lower, upper), _between(x, lower, upper))
    back = interval.unpack(interval.pack(x, lower=lower, upper=upper, inclusive=True))  # type: ignore[call-arg]
    assert torch.equal((back >= lower) & (back <= upper), (x >= lower) & (x <= upper))


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
        back, finite = codec.unpack(packed), x.isfinite()
        assert torch.equal(back[~finite].nan_to_num(7.0), x[~finite].nan_to_num(7.0))
        assert ((back[finite].double() - x[finite].double()).abs() <= packed.bound).all()


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
    draws = torch.stack([codec.unpack(codec.pack(x, hints=codecs.Hints(seed=seed))) for seed in range(400)])
    tolerance = 5 * codec.pack(x).bound / math.sqrt(400)
    assert float((draws.mean(0) - x).abs().max()) < tolerance
    assert torch.equal(draws[3], codec.unpack(codec.pack(x, hints=codecs.Hints(seed=3))))


@pytest.mark.parametrize("name", ("zero4", "minmax2", "bf16", "fp8-e4m3"))
def test_a_bound_the_format_cannot_hold_is_refused_with_both_numbers(name: str) -> None:
    x = torch.randn(1000)
    reached = codecs.get(name).pack(x).bound
    assert codecs.get(name).pack(x, reached).bound == reached
    with pytest.raises(CodecError, match=f"{reached:.6g}.*{reached / 2:.6g}"):
        codecs.get(name).pack(x, reached / 2)

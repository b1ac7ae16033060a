"""The variable-size codecs: sizes, fallbacks, lags, many callers."""

import math
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from squeezebox import codecs
from squeezebox.codecs._chunks import CHUNK
from squeezebox.schema import OptionError

NAMES = ("entropy", "entropy-sign")


@pytest.mark.parametrize("name", NAMES)
def test_a_coarse_bound_takes_few_bits(name: str) -> None:
    x = torch.randn(1 << 19).relu()
    assert codecs.get(name).pack(x, 0.3).nbytes * 8 < 2.6 * x.numel()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("bad", (None, math.nan, math.inf, -1.0))
def test_the_bound_must_be_a_finite_number(name: str, bad: float | None) -> None:
    with pytest.raises(OptionError, match="bound"):
        codecs.get(name).pack(torch.ones(3), bad)


@pytest.mark.parametrize("name", NAMES)
def test_only_the_chunk_with_nan_is_kept_exactly(name: str) -> None:
    x = torch.randn(3 * CHUNK)
    clean = codecs.get(name).pack(x, 0.2).nbytes
    x[CHUNK + 5] = math.nan
    packed = codecs.get(name).pack(x, 0.2)
    back = codecs.get(name).unpack(packed)
    assert torch.equal(back[CHUNK : 2 * CHUNK].nan_to_num(9), x[CHUNK : 2 * CHUNK].nan_to_num(9))
    assert bool(((back - x).abs() <= 0.2)[:CHUNK].all())
    assert packed.nbytes < clean + 4 * CHUNK + 1000


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("value", (0.0, 2.5))
def test_constant_chunks_cost_a_table_row(name: str, value: float) -> None:
    x = torch.full((2 * CHUNK + 7,), value)
    packed = codecs.get(name).pack(x, 0.1)
    assert packed.nbytes == 3 * 16
    assert torch.equal(codecs.get(name).unpack(packed), x)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("channels_last", (False, True))
def test_the_trial_finds_a_lag_that_pays(name: str, channels_last: bool) -> None:
    x = torch.randn(8, 16, 64, 64).cumsum(-1).cumsum(-2)
    if channels_last:
        x = x.to(memory_format=torch.channels_last)
    codec = codecs.get(name)
    bound = 0.01 * float(x.std())
    chosen, none = codec.pack(x, bound), codec.pack(x, bound, codecs.Hints(lag=0))
    assert chosen.meta["lag"] != 0 and chosen.nbytes < none.nbytes
    assert torch.equal(codec.unpack(chosen), codec.unpack(none))
    with pytest.raises(OptionError, match="lag"):
        codec.pack(x, bound, codecs.Hints(lag=-2))


def test_many_callers_at_once() -> None:
    codec = codecs.get("entropy-sign")
    inputs = [torch.randn(300_000).relu() for _ in range(8)]
    expected = [codec.unpack(codec.pack(x, 0.1, codecs.Hints(lag=1))) for x in inputs]
    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(lambda x: codec.unpack(codec.pack(x, 0.1, codecs.Hints(lag=1))), inputs))
    assert all(torch.equal(a, b) for a, b in zip(expected, results, strict=True))


def test_inference_mode() -> None:
    with torch.inference_mode():
        x = torch.zeros(2 * CHUNK)
        x[CHUNK:] = torch.randn(CHUNK)
        for name in (*NAMES, "zero4", "minmax4"):
            back = codecs.get(name).unpack(codecs.get(name).pack(x, 5.0))
            assert back.shape == x.shape


@pytest.mark.parametrize("memory_format", (torch.contiguous_format, torch.channels_last))
def test_the_bound_of_a_scaled_tensor_holds_in_every_channel(memory_format: torch.memory_format) -> None:
    generator = torch.Generator().manual_seed(5)
    scale = torch.tensor([1e-3, 1.0, 40.0, 0.2])
    x = torch.randn(8, 4, 33, 17, generator=generator) * scale.view(1, -1, 1, 1) + 3 * scale.view(1, -1, 1, 1)
    x = x.to(memory_format=memory_format)
    inner = 33 * 17 if memory_format is torch.contiguous_format else 1
    packed = codecs.get("entropy").pack(x, 0.25, codecs.Hints(lag=17, scale=scale, inner=inner))
    back = codecs.get("entropy").unpack(codecs.loads(codecs.dumps(packed)))
    error = (back.double() - x.double()).abs().amax((0, 2, 3))
    assert back.stride() == x.stride()
    assert bool((error <= 0.25 * scale.double()).all())
    assert packed.bound == 10.0
    assert packed.nbytes < x.numel()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("inner", (1, 60))
@pytest.mark.parametrize("bound", (0.5, 3e-3, 1e-5))
def test_the_scaled_bound_holds_in_codes_of_every_width(name: str, inner: int, bound: float) -> None:
    generator = torch.Generator().manual_seed(8)
    scale = torch.tensor([1e-4, 3.0, 700.0])
    channels = torch.arange(30_000) // inner % 3
    x = torch.randn(30_000, generator=generator) * scale[channels]
    x[::7] = 0.0
    packed = codecs.get(name).pack(x, bound, codecs.Hints(lag=5, scale=scale, inner=inner))
    back = codecs.get(name).unpack(packed)
    assert bool(((back.double() - x.double()).abs() <= bound * scale[channels].double()).all())
    assert bool((back[x == 0] == 0).all())
    if name == "entropy-sign":
        assert torch.equal(back.sign(), x.sign())


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dither", (0, 5))
def test_no_code_is_moved_out_of_the_bound_by_rounding(name: str, dither: int) -> None:
    bound = 0.37
    edges = (torch.arange(-254, 255) * 0.5 * 2 * bound).float()
    x = torch.cat([edges, torch.nextafter(edges, edges + 1), torch.nextafter(edges, edges - 1)])
    back = codecs.get(name).unpack(codecs.get(name).pack(x[x != 0], bound, codecs.Hints(dither=dither)))
    assert float((back.double() - x[x != 0].double()).abs().max()) <= bound


@pytest.mark.parametrize("name", ("entropy", "planes", "blocks"))
def test_a_packed_scale_is_not_the_callers(name: str) -> None:
    x, scale = torch.randn(9000), torch.ones(3)
    packed = codecs.get(name).pack(x, 0.1, codecs.Hints(scale=scale, inner=10))
    scale *= 5
    assert float((codecs.get(name).unpack(packed) - x).abs().max()) <= 0.1


def test_scales_that_cannot_be_are_refused() -> None:
    x = torch.randn(2, 3, 4, 4)
    ones = torch.ones(3)
    for scale in (ones * torch.tensor([1.0, 0.0, 1.0]), ones * float("nan"), ones.double()):
        with pytest.raises(OptionError, match="scale"):
            codecs.get("entropy").pack(x, 0.1, codecs.Hints(scale=scale, inner=16))


@pytest.mark.parametrize("dither", (0, 100))
def test_the_error_of_a_sign_preserving_code_has_no_mean_on_a_flat_density(dither: int) -> None:
    x = torch.rand(1 << 18, generator=torch.Generator().manual_seed(6)) * 40
    codec = codecs.get("entropy-sign")
    error = codec.unpack(codec.pack(x, 0.5, codecs.Hints(dither=dither))).double() - x.double()
    # Evenly spread errors of half-width 0.5 would leave a mean within 5 standard errors of 0.003.
    assert abs(float(error.mean())) < 5 * 0.5 / 3**0.5 / 2**9


@pytest.mark.parametrize("value", (0.1, -0.7, 2.345))
def test_dither_takes_the_mean_off_the_errors_of_equal_values(value: float) -> None:
    x = torch.full((64, 1000), value)
    x[:, 0] += 1e-3  # no constant chunk
    codec = codecs.get("entropy")
    same = codec.unpack(codec.pack(x, 0.5)) - x
    moved = codec.unpack(codec.pack(x, 0.5, codecs.Hints(dither=1000))) - x
    assert abs(float(moved.mean())) < 0.02 < 0.5 * abs(float(same.mean()))
    assert float(moved.std()) == pytest.approx(0.5 / 3**0.5, rel=0.05)


@pytest.mark.parametrize("name", NAMES)
def test_dither_leaves_zeros_alone(name: str) -> None:
    x = torch.randn(2 * CHUNK)
    x[CHUNK + 17] = 0.0
    codec = codecs.get(name)
    back = codec.unpack(codec.pack(x, 0.5, codecs.Hints(dither=64)))
    assert float(back[CHUNK + 17]) == 0.0
    assert torch.equal(back[CHUNK:], codec.unpack(codec.pack(x[CHUNK:], 0.5))) == (name == "entropy")


def test_dither_must_be_a_count() -> None:
    with pytest.raises(OptionError, match="dither"):
        codecs.get("entropy").pack(torch.randn(9), 0.5, codecs.Hints(dither=-1))

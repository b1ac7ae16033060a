"""`planes`: the bound, signs and zeros, what is stored for hostile blocks, and channels' own units."""

import pytest
import torch

from squeezebox import codecs
from squeezebox.codecs._reference import _planes as reference
from squeezebox.schema import FormatError

NAMES = ("planes", "planes-sign")
DTYPES = (
    torch.float32,
    torch.bfloat16,
    *(pytest.param(dtype, marks=pytest.mark.slow) for dtype in (torch.float64, torch.float16)),
)
KINDS = {
    "dense": lambda x: x,
    "sparse": torch.relu,
    "heavy": lambda x: x**7,
    "offset": lambda x: x + 10,
    "hostile": lambda x: x.index_fill(0, torch.arange(0, len(x), 900), float("nan")) * 3e38,
    "denormal": lambda x: x * 1e-40,
}


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.uint8)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_compiled_loops_equal_the_reference_and_keep_the_bound(name, dtype, kind):
    codec = codecs.get(name)
    for numel, bound in ((1, 0.5), (300, 1e-3), (200_001, 0.02), (4096, 0.0), (4096, 1e30)):
        x = KINDS[kind](torch.randn(numel, generator=torch.Generator().manual_seed(numel))).to(dtype)
        packed = codec.pack(x, bound)
        heads, data = reference.pack_planes(x, bound, codec.keep_sign, None, 1)
        assert torch.equal(packed.payload[0], heads) and torch.equal(packed.payload[1], data)
        back, again = codec.unpack(packed), torch.empty_like(x)
        reference.unpack_planes(heads, data, bound, codec.keep_sign, None, 1, again)
        assert torch.equal(bits(back), bits(again))
        finite = x.isfinite()
        assert torch.equal(bits(back[~finite]), bits(x[~finite]))
        assert ((back.double() - x.double()).abs()[finite] <= bound).all()
        assert (back[x == 0] == 0).all()
        if codec.keep_sign:
            assert torch.equal(back[finite].sign(), x[finite].sign())


@pytest.mark.parametrize(("channels", "inner"), ((64, 1), (3, 1), (64, 49), (5, 4096), (1, 7)))
@pytest.mark.parametrize("name", NAMES)
def test_a_bound_in_units_of_each_channel(name, channels, inner):
    codec, generator = codecs.get(name), torch.Generator().manual_seed(channels)
    x = torch.randn(100_000, generator=generator)
    x[::9] = 1e-42  # times a small factor it underflows, and keeps its sign all the same
    scale = 10.0 ** (torch.rand(channels, generator=generator) * 6 - 3)
    packed = codec.pack(x, 0.1, codecs.Hints(scale=scale, inner=inner))
    own = scale[torch.arange(len(x)) // inner % channels].double()
    back = codec.unpack(packed)
    assert ((back.double() - x.double()).abs() <= 0.1 * own).all()
    again = torch.empty_like(x)
    heads, data = reference.pack_planes(x, 0.1, codec.keep_sign, scale, inner)
    assert torch.equal(packed.payload[0], heads) and torch.equal(packed.payload[1], data)
    reference.unpack_planes(heads, data, 0.1, codec.keep_sign, scale, inner, again)
    assert torch.equal(back, again)
    if codec.keep_sign:
        assert torch.equal(back.sign(), x.sign())


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16, torch.float64), ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_bytes_with_a_scale_are_read_again_in_every_dtype(name, dtype):
    codec, scale = codecs.get(name), torch.tensor([0.25, 3.0, 1e-3])
    x = torch.randn(3000, generator=torch.Generator().manual_seed(7)).to(dtype)
    packed = codecs.loads(codecs.dumps(codec.pack(x, 0.3, codecs.Hints(scale=scale, inner=5))))
    back, again = codec.unpack(packed), torch.empty_like(x)
    reference.unpack_planes(*packed.payload[:2], 0.3, codec.keep_sign, scale, 5, again)
    assert torch.equal(back, again)
    own = scale[torch.arange(len(x)) // 5 % 3].double()
    assert ((back.double() - x.double()).abs() <= 0.3 * own).all()


def test_a_block_takes_the_bits_that_its_range_needs():
    x = torch.cat(
        [torch.zeros(256), torch.full((256,), 9.0), torch.linspace(0, 7, 256), torch.ones(256) * 1e9]
    )
    packed = codecs.get("planes").pack(x, 0.5)
    assert (packed.payload[0] & 15).tolist() == [0, 0, 3, 15]
    assert packed.payload[1].numel() == 0 + 0 + 3 * 32 + 1024


def test_errors_of_signed_codes_have_no_mean():
    x = torch.rand(1 << 20, generator=torch.Generator().manual_seed(0)) * 0.02  # within the first two steps
    error = codecs.get("planes-sign").unpack(codecs.get("planes-sign").pack(x, 0.1)) - x
    density = x < 0.789 * 0.2 * (1 - 2**-9)
    assert density.all()  # one code: its value is where a flat density to the step's end has no mean
    assert float(error.mean()) == pytest.approx(0.2 * 0.2887 - 0.01, abs=1e-3)


def test_damaged_heads_are_refused():
    packed = codecs.get("planes").pack(torch.randn(1000), 0.1)
    packed.payload[0][0] = 13
    with pytest.raises(FormatError, match="damaged"):
        codecs.loads(codecs.dumps(packed))


def test_one_and_several_threads_write_the_same_bytes():
    x, before = torch.randn(1_000_000), torch.get_num_threads()
    found = []
    for threads in (1, 3):
        torch.set_num_threads(threads)
        found.append(codecs.get("planes").pack(x, 0.1).payload)
    torch.set_num_threads(before)
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


@pytest.mark.parametrize("layout", ("one unit", "by channel", "by row", "channels last"))
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16, torch.float64), ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_packed_bytes_come_back_from_a_file_with_any_unit(name, dtype, layout):
    x = torch.randn(6, 8, 10, 10, generator=torch.Generator().manual_seed(1)).to(dtype)
    if layout == "channels last":
        x = x.contiguous(memory_format=torch.channels_last)
    factors = {"by channel": (8, 100), "by row": (48, 100), "channels last": (8, 1)}
    channels, inner = factors.get(layout, (0, 1))
    scale = torch.linspace(0.5, 2.0, channels) if channels else None
    codec = codecs.get(name)
    packed = codec.pack(x, 0.1, codecs.Hints(scale=scale, inner=inner))
    loaded = codecs.loads(codecs.dumps(packed))
    assert loaded.bound == packed.bound == (0.2 if channels else 0.1)
    assert [part.dtype for part in loaded.payload] == [part.dtype for part in packed.payload]
    assert torch.equal(bits(codec.unpack(loaded)), bits(codec.unpack(packed)))
    assert ((codec.unpack(loaded).double() - x.double()).abs() <= packed.bound).all()


@pytest.mark.parametrize("name", NAMES)
def test_a_unit_that_changes_later_is_not_that_of_packed_values(name):
    x, scale = torch.randn(3000, generator=torch.Generator().manual_seed(2)), torch.tensor([0.5, 2.0])
    codec = codecs.get(name)
    packed = codec.pack(x, 0.1, codecs.Hints(scale=scale, inner=7))
    before = codec.unpack(packed)
    scale.mul_(3)
    assert torch.equal(codec.unpack(packed), before)


@pytest.mark.parametrize("threads", (1, 2, 3))
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
def test_any_number_of_threads_makes_the_same_bytes(dtype, threads):
    codec, used = codecs.get("planes"), torch.get_num_threads()
    x = torch.randn(3_000_017, generator=torch.Generator().manual_seed(3)).to(dtype)
    x[::700_000] = float("nan")
    expected = codec.pack(x, 0.1)
    torch.set_num_threads(threads)
    try:
        packed = codec.pack(x, 0.1)
        back = codec.unpack(packed)
    finally:
        torch.set_num_threads(used)
    assert all(map(torch.equal, packed.payload, expected.payload))
    assert torch.equal(bits(back), bits(codec.unpack(expected)))

"""The compiled CPU loops and the Triton kernels against the plain-torch reference, to the bit.

Without a CUDA device the kernels run in Triton's interpreter (tests/conftest.py).
"""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from squeezebox.codecs._ops import OPERATORS
from squeezebox.codecs._reference import _blocks

REFERENCE: dict[str, Callable[..., Any]] = {name: kernel for name, _, kernel, _ in OPERATORS}
# Each is compiled for by itself: the slow tests have all but one.
FLOATS = (
    torch.float32,
    *(
        pytest.param(dtype, marks=pytest.mark.slow)
        for dtype in (torch.bfloat16, torch.float16, torch.float64)
    ),
)


# numpy, under the interpreter, warns of what kernels mean to happen.
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")


class Backend:
    """Operators as one backend has them, and where its tensors lie."""

    def __init__(self, name: str) -> None:
        on_device = name == "triton" and torch.cuda.is_available()
        self.name, self.device = name, torch.device("cuda" if on_device else "cpu")

    def __call__(self, name: str) -> Callable[..., Any]:
        if self.name == "loops":
            return getattr(torch.ops.squeezebox, name)
        from squeezebox.codecs import _triton

        return _triton.KERNELS[name]

    def inputs(self, dtype: torch.dtype) -> Iterator[Tensor]:
        """Fewer where they are interpreted, which is slow."""
        lengths = (0, 1, 255, 256, 1100) if self.name == "loops" or self.device.type == "cuda" else (1, 1100)
        return (x.to(self.device) for x in inputs(dtype, lengths))


@pytest.fixture(params=("loops", "triton"))
def ours(request: pytest.FixtureRequest) -> Backend:
    if request.param == "triton":
        pytest.importorskip("triton")
    return Backend(request.param)


@pytest.fixture
def loops() -> Backend:
    return Backend("loops")


def inputs(dtype: torch.dtype, lengths: tuple[int, ...]) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(1)
    limit = torch.finfo(dtype).max
    for numel in lengths:
        x = torch.randn(numel, generator=generator, dtype=torch.float64)
        sparse = torch.where(torch.rand(numel, generator=generator) < 0.5, x, 0.0)
        kinds = (x, x.relu(), sparse, -sparse.relu(), x * 1e-42, x * 1e-4 + 1000, x.sign() * limit, x * 0)
        kinds = (*kinds, x.sign() * (x.abs() < 1) * limit + (x > 2))
        for kind in kinds:
            yield kind.clamp(-limit, limit).to(dtype).nan_to_num(0, limit, -limit)


def same(first: Any, second: Any) -> bool:
    pairs = ((first, second),) if isinstance(first, Tensor) else zip(first, second, strict=True)
    return all(a.dtype == b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in pairs)


def decoded_alike(ours: Backend, name: str, packed: Any, options: tuple[Any, ...], like: Tensor) -> bool:
    one, other = torch.empty_like(like), torch.empty_like(like)
    ours(name)(*packed, *options, one)
    REFERENCE[name](*packed, *options, other)
    return same(one + 0.0, other + 0.0)  # the sign of a zero is not part of the promise


@pytest.mark.every(5)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("bits", (8, 4, 3, 2))
@pytest.mark.parametrize("stochastic", (False, True))
@pytest.mark.parametrize("family", ("zero", "minmax"))
def test_groups(ours: Backend, dtype: torch.dtype, bits: int, stochastic: bool, family: str) -> None:
    for x in ours.inputs(dtype):
        packed = ours(f"pack_{family}")(x, bits, stochastic, 5)
        expected = REFERENCE[f"pack_{family}"](x.cpu(), bits, stochastic, 5)  # a device divides otherwise
        assert same([part.cpu() for part in packed], expected)
        options = (bits, stochastic) if family == "zero" else (bits,)
        assert decoded_alike(ours, f"unpack_{family}", packed, options, x)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("family", ("zero", "minmax"))
def test_groups_with_nan_say_so(ours: Backend, dtype: torch.dtype, family: str) -> None:
    x = torch.randn(1100, generator=torch.Generator().manual_seed(6)).to(ours.device, dtype)
    x[3], x[300], x[600] = torch.nan, torch.inf, -torch.inf
    for stochastic in (False, True):
        codes, scales = ours(f"pack_{family}")(x, 4, stochastic, 5)
        known, expected = REFERENCE[f"pack_{family}"](x, 4, stochastic, 5)
        assert same(codes, known) and torch.equal(scales.isfinite(), expected.isfinite())


def canonical(arena: Tensor, table: Tensor) -> list[tuple[int, list[int]]]:
    """Headers and words of the blocks, wherever they lie."""
    rows = table.view(-1, 2).tolist()
    order = sorted(start for start, _ in rows)
    ends = dict(zip(order, [*order[1:], arena.numel() // _blocks.UNIT], strict=False))
    return [
        (header, arena[start * _blocks.UNIT : ends[start] * _blocks.UNIT].tolist()) for start, header in rows
    ]


def places(device: torch.device, words: int, spill: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Arena, spill and counters with two slots."""
    arena, other = (torch.zeros(count, dtype=torch.int32, device=device) for count in (words, spill))
    return arena, other, torch.zeros(_blocks.COUNTERS + 2, dtype=torch.int64, device=device)


@pytest.mark.every(3)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("scaled", (False, True))
@pytest.mark.parametrize("dither", (0, 100))
def test_blocks(ours: Backend, dtype: torch.dtype, scaled: bool, dither: int) -> None:
    scale = torch.tensor([0.5, 3.0, 1e-3], device=ours.device) if scaled else None
    kinds = [torch.cat([x, x.flip(0)]) for x in ours.inputs(dtype) if x.numel() > 255]
    hostile = torch.tensor([torch.nan, torch.inf, -torch.inf, 0.0], device=ours.device, dtype=dtype)
    for x in (*kinds, hostile, hostile[:0]):
        for bound in (1e-3, 0.2, 1e38):
            made = []
            for pack in (ours("pack_blocks"), REFERENCE["pack_blocks"]):
                arena, spill, counters = places(ours.device, 8192)
                table = pack(x, bound, scale, 7, dither, arena, spill, counters, 1)
                made.append((table, arena, counters.tolist()))
            (table, arena, counted), (expected, whole, known) = made
            assert counted == known == [known[0], 0, 0, 0, known[0]]
            assert canonical(arena[: known[0]], table) == canonical(whole[: known[0]], expected)
            options = (bound, scale, 7, dither)
            assert decoded_alike(ours, "unpack_blocks", (arena, spill, table), options, x)


def test_blocks_without_room_go_elsewhere_or_are_counted(ours: Backend) -> None:
    x = torch.randn(5000, generator=torch.Generator().manual_seed(7)).to(ours.device)
    for spill_words, lost in ((400, 1), (4000, 0)):
        arena, spill, counters = places(ours.device, 512, spill_words)
        arena.fill_(77)
        table = ours("pack_blocks")(x, 0.1, None, 1, 0, arena[:500], spill, counters, 0)
        back = torch.empty_like(x)
        ours("unpack_blocks")(arena[:500], spill, table, 0.1, None, 1, 0, back)
        starts = table.view(-1, 2)[:, 0]
        assert int((starts < -1).sum()) > 0 and int((starts == -1).sum()) == int(counters[2]) >= lost
        assert (int(counters[2]) == 0) == (lost == 0)
        assert bool(((back - x).abs() <= 0.1).logical_or(back.isnan()).all())
        assert (int(back.isnan().sum()) > 0) == (lost > 0)
        assert bool((arena[500:] == 77).all())


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("scaled", (False, True))
@pytest.mark.parametrize("keep_sign", (False, True))
def test_planes(ours: Backend, dtype: torch.dtype, scaled: bool, keep_sign: bool) -> None:
    scale = torch.tensor([0.5, 3.0, 1e-3, 1e-39], device=ours.device) if scaled else None
    hostile = torch.tensor([torch.nan, torch.inf, -torch.inf, 0.0], device=ours.device, dtype=dtype)
    kinds = [*ours.inputs(dtype), torch.cat([hostile, hostile.new_ones(600) * 70])]
    if ours.name == "triton":  # few programs, for the interpreter
        kinds = [torch.cat([x[:300] for x in kinds])]
    for x in (*kinds, hostile[:0]):
        for bound in (1e-3, 0.2, 0.0, 1e38):
            options = (bound, keep_sign, scale, 7)
            packed = ours("pack_planes")(x, *options)
            assert same(packed, REFERENCE["pack_planes"](x, *options))
            assert decoded_alike(ours, "unpack_planes", packed, options, x)


@pytest.mark.parametrize("dtype", FLOATS)
def test_flags(ours: Backend, dtype: torch.dtype) -> None:
    for x in ours.inputs(dtype):
        assert same(ours("pack_positive")(x), REFERENCE["pack_positive"](x))
        for inclusive in (False, True):
            for ends in ((-0.5, 0.7), (1 - 2.0**-16, 1 + 2.0**-16), (1e-320, 1e308)):
                options = (*ends, inclusive)
                assert same(ours("pack_between")(x, *options), REFERENCE["pack_between"](x, *options))
        for negative in (False, True):
            packed = ours("pack_nonzero")(x, 1.0, negative)
            assert same(packed, REFERENCE["pack_nonzero"](x, 1.0, negative))
        assert decoded_alike(ours, "unpack_bits", packed[:1], (0.0, 2.5), x)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("keep_sign", (False, True))
@pytest.mark.parametrize("lag", (0, 1, 17))
def test_chunks(loops: Backend, dtype: torch.dtype, keep_sign: bool, lag: int) -> None:
    for x in loops.inputs(dtype):
        for bound in (1e-3, 0.2):
            options = (keep_sign, lag, None, 1, 3 * lag)
            packed = loops("pack_chunks")(x, bound, *options)
            assert same(packed, REFERENCE["pack_chunks"](x, bound, *options))
            assert decoded_alike(loops, "unpack_chunks", packed, options, x)


@pytest.mark.every(5)
@pytest.mark.parametrize("inner", (1, 7, 300_000))
@pytest.mark.parametrize("keep_sign", (False, True))
@pytest.mark.parametrize("dither", (0, 1, 100, 70_000))
def test_scaled_chunks(loops: Backend, inner: int, keep_sign: bool, dither: int) -> None:
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(600_000, generator=generator)
    scale = torch.rand(5, generator=generator) * 10 + 1e-3
    options = (keep_sign, 7, scale, inner, dither)
    packed = loops("pack_chunks")(x, 0.3, *options)
    assert same(packed, REFERENCE["pack_chunks"](x, 0.3, *options))
    assert decoded_alike(loops, "unpack_chunks", packed, options, x)


@pytest.mark.parametrize("spread", (0.3, 2.0, 12.0))
@pytest.mark.parametrize("numel", (4096, 5001))
def test_huffman_coded_chunks(loops: Backend, spread: float, numel: int) -> None:
    x = spread * torch.randn(numel, generator=torch.Generator().manual_seed(2))
    packed = loops("pack_chunks")(x, 0.5, True, 1, None, 1, 0)
    assert same(packed, REFERENCE["pack_chunks"](x, 0.5, True, 1, None, 1, 0))
    assert decoded_alike(loops, "unpack_chunks", packed, (True, 1, None, 1, 0), x)


@pytest.mark.parametrize("dtype", FLOATS[:-1])
def test_masks_of_either_zero(ours: Backend, dtype: torch.dtype) -> None:
    for zero, value, other in ((0.0, 1.0, 1.0), (-0.0, 1.0, 1.0), (0.0, -2.0, -0.0), (-0.0, -2.0, 0.0)):
        x = torch.tensor([zero, value, zero] * 100 + [other], dtype=dtype, device=ours.device)
        for negative in (False, True):
            packed = ours("pack_nonzero")(x, value, negative)
            assert same(packed, REFERENCE["pack_nonzero"](x, value, negative))
            assert bool(packed[1]) == (other == value and negative == (str(zero) == "-0.0"))


def test_pool_offsets(ours: Backend) -> None:
    x = torch.randn(2, 3, 9, 11, generator=torch.Generator().manual_seed(3))
    _, indices = torch.nn.functional.max_pool2d(x, 2, return_indices=True)
    rows, columns = indices.shape[-2:]
    base = (torch.arange(rows)[:, None] * 22 + torch.arange(columns) * 2).reshape(-1).to(ours.device)
    places = torch.tensor([0, 1, 11, 12], device=ours.device)
    flat = indices.reshape(-1).to(ours.device)
    packed = ours("pack_offsets")(flat, base, places, 1)
    assert same(packed, REFERENCE["pack_offsets"](flat, base, places, 1))
    for bits in (1, 2, 3, 4, 8):
        codes = packed[0] & ((1 << bits) - 1)
        lanes = ours("pack_codes")(codes, bits)
        assert same(lanes, REFERENCE["pack_codes"](codes, bits))
        assert same(ours("unpack_codes")(lanes, bits, codes.numel()), codes)


@pytest.mark.parametrize("name", ("pack_zero", "pack_minmax"))
def test_shapes_for_tracing(name: str) -> None:
    torch.library.opcheck(
        getattr(torch.ops.squeezebox, name).default,
        (torch.randn(300), 4, False, 0),
        test_utils=("test_schema", "test_faketensor"),
    )

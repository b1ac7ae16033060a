"""The compiled CPU loops against the plain-torch reference, to the bit."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from squeezebox.codecs._ops import OPERATORS

REFERENCE: dict[str, Callable[..., Any]] = {name: kernel for name, _, kernel, _ in OPERATORS}
FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def ours(name: str) -> Callable[..., Any]:
    return getattr(torch.ops.squeezebox, name)


def inputs(dtype: torch.dtype) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(1)
    limit = torch.finfo(dtype).max
    for numel in (0, 1, 255, 256, 1100):
        x = torch.randn(numel, generator=generator, dtype=torch.float64)
        sparse = torch.where(torch.rand(numel, generator=generator) < 0.5, x, 0.0)
        kinds = (x, x.relu(), sparse, -sparse.relu(), x * 1e-42, x * 1e-4 + 1000, x.sign() * limit, x * 0)
        for kind in kinds:
            yield kind.clamp(-limit, limit).to(dtype).nan_to_num(0, limit, -limit)


def same(first: Any, second: Any) -> bool:
    pairs = ((first, second),) if isinstance(first, Tensor) else zip(first, second, strict=True)
    return all(a.dtype == b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in pairs)


def decoded_alike(name: str, packed: Any, options: tuple[Any, ...], like: Tensor) -> bool:
    one, other = torch.empty_like(like), torch.empty_like(like)
    ours(name)(*packed, *options, one)
    REFERENCE[name](*packed, *options, other)
    return same(one + 0.0, other + 0.0)  # the sign of a zero is not part of the promise


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("bits", (8, 4, 3, 2))
@pytest.mark.parametrize("stochastic", (False, True))
@pytest.mark.parametrize("family", ("zero", "minmax"))
def test_groups(dtype: torch.dtype, bits: int, stochastic: bool, family: str) -> None:
    for x in inputs(dtype):
        packed = ours(f"pack_{family}")(x, bits, stochastic, 5)
        assert same(packed, REFERENCE[f"pack_{family}"](x, bits, stochastic, 5))
        options = (bits, stochastic) if family == "zero" else (bits,)
        assert decoded_alike(f"unpack_{family}", packed, options, x)


@pytest.mark.parametrize("dtype", FLOATS)
def test_flags(dtype: torch.dtype) -> None:
    for x in inputs(dtype):
        assert same(ours("pack_positive")(x), REFERENCE["pack_positive"](x))
        for inclusive in (False, True):
            options = (-0.5, 0.7, inclusive)
            assert same(ours("pack_between")(x, *options), REFERENCE["pack_between"](x, *options))
        packed = ours("pack_nonzero")(x, 1.0)
        assert same(packed, REFERENCE["pack_nonzero"](x, 1.0))
        assert decoded_alike("unpack_bits", packed[:1], (0.0, 2.5), x)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("keep_sign", (False, True))
@pytest.mark.parametrize("lag", (0, 1, 17))
def test_chunks(dtype: torch.dtype, keep_sign: bool, lag: int) -> None:
    for x in inputs(dtype):
        for bound in (1e-3, 0.2):
            options = (keep_sign, lag, None, 1, 3 * lag)
            packed = ours("pack_chunks")(x, bound, *options)
            assert same(packed, REFERENCE["pack_chunks"](x, bound, *options))
            assert decoded_alike("unpack_chunks", packed, options, x)


@pytest.mark.parametrize("inner", (1, 7, 300_000))
@pytest.mark.parametrize("keep_sign", (False, True))
@pytest.mark.parametrize("dither", (0, 1, 100, 70_000))
def test_scaled_chunks(inner: int, keep_sign: bool, dither: int) -> None:
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(600_000, generator=generator)
    scale = torch.rand(5, generator=generator) * 10 + 1e-3
    options = (keep_sign, 7, scale, inner, dither)
    packed = ours("pack_chunks")(x, 0.3, *options)
    assert same(packed, REFERENCE["pack_chunks"](x, 0.3, *options))
    assert decoded_alike("unpack_chunks", packed, options, x)


@pytest.mark.parametrize("spread", (0.3, 2.0, 12.0))
@pytest.mark.parametrize("numel", (4096, 5001))
def test_huffman_coded_chunks(spread: float, numel: int) -> None:
    x = spread * torch.randn(numel, generator=torch.Generator().manual_seed(2))
    packed = ours("pack_chunks")(x, 0.5, True, 1, None, 1, 0)
    assert same(packed, REFERENCE["pack_chunks"](x, 0.5, True, 1, None, 1, 0))
    assert decoded_alike("unpack_chunks", packed, (True, 1, None, 1, 0), x)


def test_pool_offsets() -> None:
    x = torch.randn(2, 3, 9, 11, generator=torch.Generator().manual_seed(3))
    _, indices = torch.nn.functional.max_pool2d(x, 2, return_indices=True)
    rows, columns = indices.shape[-2:]
    base = (torch.arange(rows)[:, None] * 22 + torch.arange(columns) * 2).reshape(-1)
    places = torch.tensor([0, 1, 11, 12])
    flat = indices.reshape(-1)
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

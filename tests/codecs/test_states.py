"""Optimizer state in 16 and 8 bits: within its bound, right on average, equal on every backend."""

import pytest
import torch
from torch import Tensor

from squeezebox.codecs import StateCodes
from squeezebox.codecs._ops import OPERATORS

REFERENCE = {name: kernel for name, _, kernel, _ in OPERATORS}
LENGTHS = (1, 255, 256, 1000, 5000)
KEY = 77


def squares_of(length: int, *, odd: bool = False) -> Tensor:
    random = torch.Generator().manual_seed(length)
    spread = torch.exp(3 * torch.randn(length, generator=random))
    found = (torch.randn(length, generator=random) * spread).square()
    found[::7] = 0.0
    if odd:
        found[::300] = torch.inf
        found[1::500] = torch.nan
        found[2::400] = 1e-45
    return found


def values_of(squares: Tensor, *, odd: bool = False) -> Tensor:
    random = torch.Generator().manual_seed(1)
    found = 0.2 * torch.randn(len(squares), generator=random) * squares.sqrt()
    if odd:
        found[3::600] = torch.inf
        found[4::700] = torch.nan
    return found


@pytest.mark.parametrize("odd", [False, True], ids=["finite", "odd"])
@pytest.mark.parametrize("length", LENGTHS)
def test_loops_equal_the_reference_to_the_bit(length, odd):
    squares = squares_of(length, odd=odd)
    values, blocks = values_of(squares, odd=odd), -(-length // 256)

    def both(name: str, *given: object, out: tuple[tuple[int, torch.dtype], ...]) -> list[Tensor]:
        made = [[torch.zeros(count, dtype=dtype) for count, dtype in out] for _ in range(2)]
        REFERENCE[name](*given, *made[0])
        getattr(torch.ops.squeezebox, name)(*given, *made[1])
        for one, other in zip(*made, strict=True):
            assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))
        return made[1]

    floats = ((length, torch.float32),)
    codes, heads = both("pack_squares", squares, KEY, 512, out=((length, torch.uint8), (blocks, torch.int32)))
    (back,) = both("unpack_squares", codes, heads, out=floats)
    for unit in (None, back):
        signed = both(
            "pack_signed", values, unit, KEY, 256, out=((length, torch.int8), (blocks, torch.float32))
        )
        both("unpack_signed", *signed, unit, out=floats)
    (short,) = both("pack_short", values, KEY, 0, out=((length, torch.int16),))
    both("unpack_short", short, out=floats)


def there_and_back(values: Tensor, bits: int, *, squares: bool, unit: Tensor | None = None, key: int = KEY):
    codes = StateCodes(values, bits, squares=squares, key=key)
    codes.pack(values, 0, unit)
    return codes.unpack(0, len(values), torch.empty_like(values), unit)


@pytest.mark.parametrize("length", LENGTHS)
def test_errors_are_bounded_and_zeros_stay_zero(length):
    squares = squares_of(length)
    values = values_of(squares)
    tops = torch.nn.functional.pad(squares, (0, -length % 256)).view(-1, 256).amax(1)
    tops = tops.repeat_interleave(256)[:length]
    back = there_and_back(squares, 8, squares=True)
    assert ((back - squares).abs() <= torch.maximum(squares / 8, tops * 2.0**-31)).all()
    assert ((back == 0) == (squares == 0)).all()
    for unit, size in ((None, values.abs()), (back, values.abs() / back.sqrt())):
        size = size.nan_to_num(0.0)
        steps = torch.nn.functional.pad(size, (0, -length % 256)).view(-1, 256).amax(1) / 127
        steps = steps.repeat_interleave(256)[:length] * (1.0 if unit is None else unit.sqrt())
        found = there_and_back(values, 8, squares=False, unit=unit)
        assert ((found - values).abs() <= 1.0001 * steps).all()
        assert (found[values == 0] == 0).all()
    for given in (values, squares):
        found = there_and_back(given, 16, squares=given is squares)
        assert ((found - given).abs() <= given.abs() * 2.0**-7).all()
        assert ((found == 0) == (given == 0)).all()


@pytest.mark.parametrize(("bits", "squares"), [(8, True), (8, False), (16, True), (16, False)])
def test_the_mean_over_many_roundings_is_the_value(bits, squares):
    values = squares_of(2000) if squares else values_of(squares_of(2000))
    found = torch.stack(
        [there_and_back(values, bits, squares=squares, key=key) for key in range(400)]
    ).double()
    large = values.abs() > values.abs().max() * 1e-4
    errors = (found - values)[:, large] / values[large].abs()
    assert errors.abs().max() > 0.0
    # Also of those near a code, which are seldom rounded to the other one: all are looked at together.
    assert abs(errors.mean()) < 5 * errors.std() / errors.numel() ** 0.5
    worst = (errors.mean(0).abs() / (errors.std(0) / 20 + errors.abs().max() / 40)).max()
    assert worst < 5


def test_pieces_are_packed_as_the_whole_is_and_codes_are_kept_as_they_are():
    squares = squares_of(3000)
    whole, pieces = (StateCodes(squares, 8, squares=True, key=KEY) for _ in range(2))
    whole.pack(squares)
    for start in range(0, 3000, 768):
        pieces.pack(squares[start : start + 768], start)
    assert all(map(torch.equal, whole.parts, pieces.parts))
    once = whole.unpack(0, 3000, torch.empty(3000))
    large = squares > squares.max() * 1e-6  # a block's smallest code may move with its largest
    assert torch.equal(pieces.unpack(256, 900, torch.empty(644)), once[256:900])
    whole.pack(once)  # with other random numbers
    assert torch.equal(whole.unpack(0, 3000, torch.empty(3000))[large], once[large])


def test_what_is_not_finite_is_not_made_finite():
    for bits, squares in ((8, True), (8, False), (16, True), (16, False)):
        values = torch.ones(1024)
        values[5], values[300] = torch.inf, torch.nan
        found = there_and_back(values, bits, squares=squares)
        assert not found[5].isfinite() and found[300].isnan()
        assert found[512:].isfinite().all()

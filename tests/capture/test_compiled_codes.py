"""Values in few bits: every element within half a step of its row, zeros and signs as they were."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from squeezebox.capture._compiled import _codes

SHAPES = [(8, 16, 4, 4), (6, 130), (4, 10, 64), (3, 5, 7), (2, 4, 16, 16), (4096,)]


@st.composite
def tensors(draw):
    shape = draw(st.sampled_from(SHAPES))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    x = torch.randn(shape, generator=generator) * 10.0 ** draw(st.integers(-30, 30))
    x = x + draw(st.sampled_from([0.0, 2.0, -3.0])) * x.abs().mean()
    x = x * (torch.rand(shape, generator=generator) > draw(st.sampled_from([0.0, 0.3, 1.0])))
    if draw(st.booleans()):
        x = x.relu()
    if draw(st.booleans()) and x.dim() == 4:
        x = x.to(memory_format=torch.channels_last)
    return x.to(draw(st.sampled_from([torch.float32, torch.bfloat16])))


def packed(x, bits):
    channel = 1 if x.dim() == 4 else None
    layout = _codes.layout_of(tuple(x.shape), _codes.memory_order(x.stride()), bits, channel=channel)
    codes, step, below = _codes.pack(x, layout)
    assert codes.numel() == x.numel() * layout.bits // 8
    return _codes.unpack(codes, step, below, layout, x.dtype), _codes.half_steps(x, bits, channel=channel)


@given(x=tensors(), bits=st.sampled_from(_codes.BITS))
def test_every_element_is_within_half_a_step(x, bits):
    found, half_step = packed(x, bits)
    rounding = 4 * torch.finfo(x.dtype).eps * x.float().abs()
    assert ((found.float() - x.float()).abs() <= half_step + rounding).all()
    assert torch.equal(found.sign(), x.sign())
    assert (found.dtype, found.shape, found.stride()) == (x.dtype, x.shape, x.stride())


@given(x=tensors(), bits=st.sampled_from(_codes.BITS))
def test_half_a_step_is_a_share_of_the_row_range(x, bits):
    span = x.float().max().clamp(min=0) - x.float().min().clamp(max=0)
    half_step = _codes.half_steps(x, bits, channel=1 if x.dim() == 4 else None)
    assert (half_step <= span / (2**bits - 2) / 2 * 1.0001).all()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_row_that_is_not_finite_comes_back_as_nothing_finite(value):
    x = torch.randn(4, 256)
    x[2, 7] = value
    found, _ = packed(x, 8)
    assert not found[2].isfinite().any()
    assert found[[0, 1, 3]].isfinite().all()


def test_eight_bits_where_no_dim_divides():
    assert _codes.layout_of((3, 5), (0, 1), 4).bits == 8
    assert _codes.layout_of((3, 6), (0, 1), 4).bits == 4


@pytest.mark.parametrize(("bits", "split"), [(4, 0), (4, 1), (2, 0), (2, 1), (1, 0)])
def test_lanes_come_back(bits, split):
    codes = torch.randint(1 << bits, (8, 12, 3)).float()
    lanes = _codes.pack_lanes(codes, bits, split)
    assert lanes.numel() == codes.numel() * bits // 8
    assert torch.equal(_codes.unpack_lanes(lanes, bits, split).float(), codes)


@pytest.mark.parametrize("shape", [(3, 5, 7, 2), (8, 5, 7, 3), (2, 8, 3, 3)])
def test_flags_come_back_in_their_layout(shape):
    flags = (torch.rand(shape) > 0.5).to(memory_format=torch.channels_last)
    layout = _codes.layout_of(shape, _codes.memory_order(flags.stride()), 1)
    packed = _codes.pack_flags(flags, layout)
    assert packed.numel() == (-(-flags.numel() // 256) * 32 if 8 not in shape else flags.numel() // 8)
    found = _codes.unpack_flags(packed, shape, layout)
    assert torch.equal(found, flags)
    assert found.stride() == flags.stride()

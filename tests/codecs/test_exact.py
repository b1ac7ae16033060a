"""What the exact codecs and the one-bit codecs promise, against what backward passes read."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from squeezebox import codecs
from squeezebox.schema import CodecError, OptionError

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def round_trip(name: str, x: Tensor, **options: object) -> Tensor:
    codec = codecs.get(name)
    packed = codec.pack(x, **options)  # type: ignore[arg-type]
    back = codec.unpack(codecs.loads(codecs.dumps(packed)))
    assert back.dtype == x.dtype and back.shape == x.shape
    assert torch.equal(back, codec.unpack(packed))
    return back


@pytest.mark.parametrize("shape", ((), (0,), (1,), (3, 5, 7), (1000,)))
def test_mask_of_booleans(shape: tuple[int, ...]) -> None:
    x = torch.rand(shape) > 0.5
    assert torch.equal(round_trip("mask", x), x)
    assert codecs.get("mask").pack(x).nbytes == -(-x.numel() // 256) * 32


@pytest.mark.parametrize("dtype", (*FLOATS, torch.uint8, torch.int64))
@pytest.mark.parametrize("value", (0, 1, 3))
def test_mask_of_one_value(dtype: torch.dtype, value: int) -> None:
    x = ((torch.rand(700) > 0.3) * value).to(dtype)
    assert torch.equal(round_trip("mask", x), x)
    assert torch.equal(round_trip("mask", -x), -x) or dtype == torch.uint8


@pytest.mark.parametrize("bad", ((0.0, 1.0, 2.0), (0.0, math.nan), (math.inf, 0.0), (-1.0, 1.0)))
def test_mask_refuses_other_values(bad: tuple[float, ...]) -> None:
    with pytest.raises(CodecError):
        codecs.get("mask").pack(torch.tensor(bad))


@pytest.mark.parametrize("dtype", FLOATS)
def test_sign_serves_the_backward_of_relu(dtype: torch.dtype) -> None:
    x = torch.randn(999).to(dtype).relu()
    x[3], x[4], x[5] = math.nan, math.inf, 1e-7
    grad = torch.randn(999).to(dtype)
    expected = torch.ops.aten.threshold_backward(grad, x, 0)
    assert torch.equal(torch.ops.aten.threshold_backward(grad, round_trip("sign", x), 0), expected)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("edges", ((-1.0, 1.0), (0.0, 6.0), (-math.inf, 2.0), (0.5, math.inf), (1000, 1001)))
def test_interval_serves_the_backwards_that_branch(dtype: torch.dtype, edges: tuple[float, float]) -> None:
    lower, upper = edges
    x = (3 * torch.randn(999)).to(dtype)
    x[:4] = torch.tensor([lower, upper, -1.0, 1.0]).nan_to_num(0, 0, 0).to(dtype)
    grad = torch.randn(999).to(dtype)
    back = round_trip("interval", x, lower=lower, upper=upper)
    backward = torch.ops.aten.hardtanh_backward
    assert torch.equal(backward(grad, back, lower, upper), backward(grad, x, lower, upper))
    back = round_trip("interval", x, lower=lower, upper=upper, inclusive=True)
    assert torch.equal((back >= lower) & (back <= upper), (x >= lower) & (x <= upper))
    with pytest.raises(OptionError):
        codecs.get("interval").pack(x, lower=1.0, upper=1.0)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(-(2**63), 2**63 - 1), max_size=20), st.sampled_from((1, 2**20, 2**40, 2**60)))
def test_narrow_is_exact(values: list[int], divisor: int) -> None:
    x = torch.tensor(values, dtype=torch.int64) // divisor
    assert torch.equal(round_trip("narrow", x), x)


@pytest.mark.parametrize("span", [0, 200, 60_000, 2**32 - 1])
def test_narrow_comes_back_from_bytes_at_the_ends_of_its_dtype(span: int) -> None:
    for low in (-(2**63), 2**63 - 1 - span):
        x = torch.tensor([low, low + span])
        found = codecs.loads(codecs.dumps(codecs.get("narrow").pack(x)))
        assert torch.equal(codecs.get("narrow").unpack(found), x)


def test_narrow_takes_the_smallest_width() -> None:
    for span, width in ((255, 1), (256, 2), (65535, 2), (65536, 4), (2**32 - 1, 4), (2**32, 8)):
        x = torch.tensor([7_000_000, 7_000_000 + span])
        assert codecs.get("narrow").pack(x).nbytes == 2 * width
        assert torch.equal(round_trip("narrow", x), x)
    with pytest.raises(CodecError):
        codecs.get("narrow").pack(torch.ones(3))


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_pool_index_is_exact(data: st.DataObject) -> None:
    kernel = data.draw(st.tuples(st.integers(1, 5), st.integers(1, 5)))
    stride = data.draw(st.tuples(st.integers(1, 3), st.integers(1, 3)))
    padding = (kernel[0] // 2, kernel[1] // 2)
    dilation = data.draw(st.tuples(st.integers(1, 2), st.integers(1, 2)))
    shape = data.draw(
        st.tuples(*(st.integers(low, high) for low, high in ((1, 3), (1, 5), (9, 14), (9, 14))))
    )
    x = torch.randn(shape)
    if data.draw(st.booleans()):
        x = x.to(memory_format=torch.channels_last)
    options = {"kernel_size": kernel, "stride": stride, "padding": padding, "dilation": dilation}
    _, indices = F.max_pool2d(x, **options, return_indices=True)
    back = round_trip("pool-index", indices, input_shape=x.shape, **options)
    assert torch.equal(back, indices) and back.stride() == indices.stride()


def test_pool_index_sizes_and_refusals() -> None:
    x = torch.randn(4, 8, 32, 32)
    for kernel, bits in ((2, 2), (4, 4), (8, 8)):
        _, indices = F.max_pool2d(x, kernel, return_indices=True)
        packed = codecs.get("pool-index").pack(indices, kernel_size=kernel, input_shape=x.shape)
        assert packed.nbytes == -(-indices.numel() // 256) * 32 * bits
    with pytest.raises(CodecError, match="outside its pooling window"):
        codecs.get("pool-index").pack(indices, kernel_size=2, input_shape=x.shape)
    with pytest.raises(CodecError):
        codecs.get("pool-index").pack(indices, kernel_size=17, input_shape=x.shape)
    with pytest.raises(CodecError):
        codecs.get("pool-index").pack(indices, kernel_size=8)


@pytest.mark.parametrize("name", ("keep", "lossless"))
@pytest.mark.parametrize("dtype", (*FLOATS, torch.bool, torch.uint8, torch.int32, torch.int64))
def test_every_bit_is_kept(name: str, dtype: torch.dtype) -> None:
    size = dtype.itemsize
    patterns = torch.randint(0, 2 if dtype == torch.bool else 256, (600 * size,), dtype=torch.uint8)
    x = patterns.view(dtype)
    codec = codecs.get(name)
    back = codec.unpack(codecs.loads(codecs.dumps(codec.pack(x))))
    assert torch.equal(back.view(torch.uint8), x.view(torch.uint8))


def test_keep_is_safe_from_later_changes() -> None:
    x = torch.zeros(5)
    packed = codecs.get("keep").pack(x)
    x += 1
    assert torch.equal(codecs.get("keep").unpack(packed), torch.zeros(5))


def test_unknown_names_list_the_known() -> None:
    with pytest.raises(OptionError, match="entropy-sign"):
        codecs.get("zip")


def test_a_byte_that_is_not_0_is_true() -> None:
    mask = torch.tensor([4, 0, 2, 1, 255] * 2000, dtype=torch.uint8).view(torch.bool)
    codec = codecs.get("mask")
    assert torch.equal(codec.unpack(codec.pack(mask)), mask.view(torch.uint8) != 0)

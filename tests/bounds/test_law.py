"""The error law against injected errors, and the counted share of padding."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from squeezebox.bounds import law
from squeezebox.capture._statistics import _fan

LAYERS = {
    "linear": (lambda: nn.Linear(20, 30), (64, 20)),
    "linear, 3 dims": (lambda: nn.Linear(20, 30), (8, 9, 20)),
    "1x1": (lambda: nn.Conv2d(8, 16, 1), (4, 8, 9, 9)),
    "3x3": (lambda: nn.Conv2d(8, 16, 3), (4, 8, 12, 12)),
    "3x3, padded": (lambda: nn.Conv2d(8, 16, 3, padding=1), (4, 8, 7, 7)),
    "5x5, much padded": (lambda: nn.Conv2d(4, 8, 5, padding=4), (4, 4, 5, 5)),
    "3x3, strided": (lambda: nn.Conv2d(8, 16, 3, stride=2, padding=1), (4, 8, 13, 13)),
    "3x3, dilated": (lambda: nn.Conv2d(8, 16, 3, padding=2, dilation=2), (4, 8, 9, 9)),
    "depthwise": (lambda: nn.Conv2d(16, 16, 3, padding=1, groups=16), (4, 16, 9, 9)),
    "groups": (lambda: nn.Conv2d(16, 8, 3, stride=2, padding=1, groups=4), (4, 16, 10, 10)),
    "unequal": (lambda: nn.Conv2d(8, 8, (1, 5), stride=(1, 3), padding=(0, 2)), (4, 8, 6, 17)),
    "1 dim": (lambda: nn.Conv1d(8, 16, 5, padding=2), (8, 8, 30)),
    "3 dims": (lambda: nn.Conv3d(4, 8, 3, padding=1), (2, 4, 6, 6, 6)),
    "transposed": (lambda: nn.ConvTranspose2d(8, 16, 3), (4, 8, 12, 12)),
    "transposed, strided": (lambda: nn.ConvTranspose2d(8, 16, 2, stride=2), (4, 8, 9, 9)),
    "transposed, groups": (
        lambda: nn.ConvTranspose2d(8, 16, 4, stride=2, padding=1, groups=2),
        (4, 8, 12, 12),
    ),
}
ATTRIBUTES = {"AddmmBackward": "mat1", "MmBackward": "self", "ConvolutionBackward": "input"}


def weight_gradient(layer, x, delta):
    return torch.autograd.grad(layer(x), layer.weight, delta)[0]


@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse"])
@pytest.mark.parametrize("name", LAYERS)
def test_measured_error_is_the_predicted(name, sparse):
    torch.manual_seed(0)
    torch.set_num_threads(1)
    make, shape = LAYERS[name]
    layer, x = make(), torch.randn(shape)
    x = x.relu() if sparse else x
    out = layer(x)
    node = out.grad_fn
    while node.name().rstrip("0123456789") not in (*ATTRIBUTES, "LinearBackward"):
        node = node.next_functions[0][0]
    delta = torch.randn_like(out)
    expected = weight_gradient(layer, x, delta)
    measured, trials = 0.0, 60
    for _ in range(trials):
        error = torch.empty_like(x).uniform_(-0.01, 0.01) * (x != 0)
        measured += float((weight_gradient(layer, x + error, delta) - expected).square().sum()) / trials
    nonzero = float((x != 0).float().mean())
    fan = _fan(node, node.name().rstrip("0123456789"))
    predicted = 0.01**2 * law.linear(nonzero, fan, float(delta.square().sum()))
    assert 0.8 < measured / predicted < 1.25


sizes = st.integers(1, 12)


@given(sizes, sizes, st.integers(1, 5), st.integers(1, 4), st.integers(0, 6), st.integers(1, 3))
def test_valid_fraction_is_what_counting_finds(size_in, size_out, taps, stride, padding, dilation):
    reads = [
        0 <= position * stride + tap * dilation - padding < size_in
        for position in range(size_out)
        for tap in range(taps)
    ]
    found = law.valid_fraction(size_in, size_out, taps, stride, padding, dilation)
    assert found == pytest.approx(sum(reads) / len(reads))


def test_valid_fraction_of_nothing():
    assert law.valid_fraction(4, 0, 3, 1, 1, 1) == law.valid_fraction(4, 4, 0, 1, 1, 1) == 0.0

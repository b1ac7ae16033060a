"""Messages in few bits: without bias, within the law of their error, in the bytes that they may take."""

import itertools

import pytest
import torch

from squeezebox.streaming._messages import allotted, packed, unpacked

BITS = (2, 4, 8)


def through(x, squared, mean_bits):
    message = packed(x, squared, mean_bits)
    return message, unpacked(message, *x.shape, x.dtype, mean_bits)


@pytest.mark.parametrize("shape", [(0, 5), (1, 1), (7, 5), (40, 64), (3, 0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_exact_messages_are_the_rows(shape, dtype):
    x = torch.randn(shape, dtype=dtype)
    message, found = through(x, torch.ones(len(x)), None)
    assert torch.equal(found, x) and len(message) == x.nbytes


@pytest.mark.parametrize("shape", [(1, 1), (7, 5), (40, 64)])
@pytest.mark.parametrize("mean_bits", [2, 3.5, 4, 8])
def test_every_element_is_within_a_step_and_bytes_are_as_said(shape, mean_bits):
    torch.manual_seed(0)
    x = torch.randn(shape, dtype=torch.float64) * torch.rand(len(torch.empty(shape)), 1).double().exp()
    x[0] = 3.25
    squared = torch.rand(len(x))
    message, found = through(x, squared, mean_bits)
    bits = message[: len(x)].double()
    low, high = x.aminmax(dim=1, keepdim=True)
    assert ((found - x).abs() <= (high - low) / (2 ** bits[:, None] - 1) * (1 + 1e-5) + 1e-6).all()
    assert bits.mean() <= mean_bits and set(bits.tolist()) <= set(BITS)
    assert len(message) == sum(9 + -(-shape[1] * int(each) // 8) for each in bits)


def test_rounding_has_no_bias_and_the_error_of_the_law():
    """Targets add a row's error by the sum of squared weights, where several take the same row."""
    torch.manual_seed(0)
    x = torch.rand(4, 500, dtype=torch.float64) * torch.tensor([[1.0], [2], [4], [8]])
    weights = torch.tensor([[1.0, 1, 0, 2], [0, 1, 3, 1], [1, 1, 1, 1]], dtype=torch.float64)
    squared = weights.square().sum(0)
    errors, targets = torch.zeros_like(x), 0.0
    for _ in range(400):
        message, found = through(x, squared, 4)
        errors += (found - x) / 400
        targets += (weights @ (found - x)).square().sum().item() / 400
    steps = (x.amax(1) - x.amin(1)) / (2 ** message[:4].double() - 1)
    assert (errors.abs() < 5 * steps[:, None] / 2 / 400**0.5).all()
    places = (x - x.amin(1, keepdim=True)) / steps[:, None] % 1  # within a step; 1/6 is the mean of f (1 - f)
    law = (steps.square() * (places * (1 - places)).sum(1) * squared).sum().item()
    assert targets == pytest.approx(law, rel=0.02)
    assert law == pytest.approx((steps.square() / 6 * 500 * squared).sum().item(), rel=0.05)


def test_bits_are_the_best_that_the_budget_allows():
    torch.manual_seed(1)
    for count, mean_bits in itertools.product((1, 4, 6), (2, 3, 4.5, 7, 8)):
        energies = torch.rand(count).mul(6).exp()
        found = allotted(energies, mean_bits)
        choices = [torch.tensor(each) for each in itertools.product(BITS, repeat=count)]
        allowed = [each for each in choices if each.sum() <= mean_bits * count]
        error, best = (
            min(float((energies / (2.0**each - 1) ** 2).sum()) for each in of) for of in ([found], allowed)
        )
        assert found.sum() <= mean_bits * count
        room = mean_bits * count - found.sum()
        assert error <= best * (1 + 1e-6) or room < 4  # the last step may not fit

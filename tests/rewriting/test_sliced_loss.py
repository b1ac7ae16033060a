"""Cross-entropy in slices equals plain PyTorch's, whatever is asked of it."""

import itertools

import pytest
import torch
from torch.nn import functional

from squeezebox.rewriting import sliced_cross_entropy

ROWS, FEATURES, CLASSES = 100, 24, 517


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("ignored", [-100, 3])
def test_losses_and_gradients_are_plain_torchs(reduction, smoothing, ignored):
    for weighted, biased, frozen in itertools.product([False, True], repeat=3):
        torch.manual_seed(0)
        x = torch.randn(ROWS, FEATURES, dtype=torch.float64, requires_grad=True)
        weight = torch.randn(CLASSES, FEATURES, dtype=torch.float64, requires_grad=not frozen)
        bias = torch.randn(CLASSES, dtype=torch.float64, requires_grad=True) if biased else None
        class_weight = torch.rand(CLASSES, dtype=torch.float64) if weighted else None
        target = torch.randint(CLASSES, (ROWS,))
        target[::7] = ignored
        options = {"ignore_index": ignored, "reduction": reduction, "label_smoothing": smoothing}
        plain = functional.cross_entropy(functional.linear(x, weight, bias), target, class_weight, **options)
        sliced = sliced_cross_entropy(x, weight, target, bias, class_weight=class_weight, **options)
        torch.testing.assert_close(sliced, plain, rtol=1e-12, atol=1e-12)
        trained = [each for each in (x, weight, bias) if each is not None and each.requires_grad]
        given = torch.randn_like(plain)
        expected = torch.autograd.grad(plain, trained, given, retain_graph=True)
        for _ in range(2):  # the first takes what forward made, the second computes it again
            found = torch.autograd.grad(sliced, trained, given, retain_graph=True)
            torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


def test_a_target_that_is_all_ignored_gives_what_torch_gives():
    x, weight = torch.randn(4, 8, requires_grad=True), torch.randn(40, 8, requires_grad=True)
    target = torch.full((4,), -100)
    sliced = sliced_cross_entropy(x, weight, target)
    assert sliced.isnan()
    sliced.backward()
    assert not x.grad.any() and not weight.grad.any()


def test_sixteen_bits_are_summed_up_in_more():
    torch.manual_seed(0)
    x, weight = torch.randn(300, 64).bfloat16(), torch.randn(2000, 64).bfloat16()
    target = torch.randint(2000, (300,))
    exact = [each.double().requires_grad_() for each in (x, weight)]
    functional.cross_entropy(exact[0] @ exact[1].t(), target).backward()
    plain, sliced = ([each.clone().requires_grad_() for each in (x, weight)] for _ in range(2))
    functional.cross_entropy(functional.linear(*plain), target).backward()
    sliced_cross_entropy(*sliced, target).backward()
    for reference, one, other in zip(exact, plain, sliced, strict=True):
        errors = [float((each.grad.double() - reference.grad).norm()) for each in (one, other)]
        assert errors[1] <= errors[0]


def test_a_class_that_does_not_exist_is_refused():
    with pytest.raises((RuntimeError, IndexError), match="out of bounds"):
        sliced_cross_entropy(torch.randn(2, 8), torch.randn(40, 8), torch.tensor([0, 40]))


def test_rows_that_are_ignored_count_nothing_with_infinite_logits_either():
    x, weight = torch.randn(4, 8, requires_grad=True), torch.randn(40, 8, requires_grad=True)
    bias = torch.zeros(40)
    bias[0] = -torch.inf
    target = torch.tensor([-100, 5, -100, 7])
    plain = functional.cross_entropy(functional.linear(x, weight, bias), target)
    sliced = sliced_cross_entropy(x, weight, target, bias)
    torch.testing.assert_close(sliced, plain)
    expected = torch.autograd.grad(plain, (x, weight))
    torch.testing.assert_close(torch.autograd.grad(sliced, (x, weight)), expected)

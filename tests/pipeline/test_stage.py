"""One microbatch's way through a stage and back."""

import torch
from torch import nn

from squeezebox.pipeline import Passage


def test_two_parts_of_backward_begin_at_views_and_at_what_was_given():
    torch.manual_seed(0)
    linear, given = nn.Linear(4, 6), torch.randn(3, 4, requires_grad=True)
    outputs = [given, linear(given).view(6, 3)]
    gradients = [torch.randn_like(output) for output in outputs]
    weights = [*linear.parameters()]
    expected = torch.autograd.grad(outputs, [given, *weights], gradients, retain_graph=True)

    passage = Passage(0, [], [given], outputs, gradients)
    (found,) = passage.backward_to_inputs(weights)
    passage.backward_to_weights(weights)

    assert torch.equal(found, expected[0])
    assert all(torch.equal(w.grad, e) for w, e in zip(weights, expected[1:], strict=True))
    assert given.grad is None  # it has been handed over

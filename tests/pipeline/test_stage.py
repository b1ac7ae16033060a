"""One microbatch's way through a stage and back."""

import pytest
import torch
from torch import nn

from squeezebox.pipeline import Passage, Piece, Stage


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


class _Averaging(nn.Module):
    """Divides by a mean that its forward moves, in place or by another tensor."""

    def __init__(self, way):
        super().__init__()
        self.linear, self.way = nn.Linear(4, 4), way
        self.register_buffer("mean", torch.ones(4))
        self.register_buffer("fixed", torch.eye(4).to_sparse())

    @torch.no_grad()
    def move(self, x):
        moved = 0.5 * self.mean + x.square().mean(0)
        if self.way == "in place":
            self.mean.copy_(moved)
        elif self.way == "data":
            self.mean.data.copy_(moved)
        else:
            self.mean = moved

    def forward(self, x):
        self.move(x)
        return ((self.linear((self.fixed @ x.T).T) / self.mean.clone()).tanh(),)


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("way", ["in place", "data", "another tensor"])
def test_what_runs_again_begins_with_the_buffers_of_its_forward(way, parts):
    found = []
    for recompute in (False, True):
        torch.manual_seed(0)
        module = _Averaging(way)
        stage, weights = Stage([Piece("it", module)], recompute=recompute), [*module.parameters()]
        inputs = [torch.randn(3, 4, requires_grad=True) for _ in range(3)]
        outputs = [stage(x) for x in inputs]
        for x, output in zip(inputs, outputs, strict=True):
            passage = Passage(0, [], [x], [*output], [torch.ones(3, 4)])
            if parts == 1:
                passage.backward()
            else:
                passage.backward_to_inputs(weights)
                passage.backward_to_weights(weights)
        found.append([*(each.grad for each in weights), module.mean])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_two_parts_of_backward_reach_weights_that_are_handed_on():
    torch.manual_seed(0)
    linear, table, scale = nn.Linear(4, 4), nn.Embedding(3, 4), nn.Parameter(torch.randn(4))
    given, bias = torch.randn(3, 4, requires_grad=True), table(torch.arange(3)).tanh()
    outputs = [linear(given + bias), bias, scale]
    gradients = [torch.randn_like(output) for output in outputs]
    weights = [*linear.parameters(), table.weight, scale]
    expected = torch.autograd.grad(outputs, [given, *weights], gradients, retain_graph=True)

    passage = Passage(0, [], [given], outputs, gradients)
    (found,) = passage.backward_to_inputs(weights)
    passage.backward_to_weights(weights)

    assert torch.equal(found, expected[0])
    for weight, wanted in zip(weights, expected[1:], strict=True):
        torch.testing.assert_close(weight.grad, wanted)

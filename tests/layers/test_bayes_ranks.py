"""Ranks draw other samples of the same sequence, or the same ones where they are told to."""

import pytest
import torch
from torch import nn

from squeezebox import layers
from tests.pipeline import ranks


def outputs_and_gradients(samples, same):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
    layers.bayesian_(model, samples=samples, seed=3, same_on_ranks=same)
    out = model(torch.randn(4, 6, generator=torch.Generator().manual_seed(1)))
    out.square().mean().backward()
    gradients = [each.grad for each in model.parameters()]
    return out.detach().reshape(samples, 4, 3), gradients


def on_rank(rank, samples, same):
    return outputs_and_gradients(samples, same)


@pytest.mark.slow
def test_two_ranks_draw_the_samples_that_one_would():
    one, gradients = outputs_and_gradients(4, False)
    found = ranks.run(on_rank, 2, 2, False)
    assert torch.equal(torch.cat([out for out, _ in found]), one)
    assert not torch.equal(found[0][0], found[1][0])
    for number, expected in enumerate(gradients):
        mean = sum(each[number] for _, each in found) / 2
        torch.testing.assert_close(mean, expected, rtol=1e-6, atol=1e-7)


@pytest.mark.slow
def test_ranks_that_are_told_to_draw_the_same():
    (first, _), (second, _) = ranks.run(on_rank, 2, 2, True)
    assert torch.equal(first, second)


def test_a_ranks_samples_follow_on_those_of_the_rank_before_it(monkeypatch):
    whole, _ = outputs_and_gradients(4, False)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 1)
    part, _ = outputs_and_gradients(2, False)
    assert torch.equal(part, whole[2:])
    told, _ = outputs_and_gradients(2, True)
    assert torch.equal(told, whole[:2])

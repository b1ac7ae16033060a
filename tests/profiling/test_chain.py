"""Costs of a model's parts: bytes exact, and seconds where they are spent."""

import time
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from squeezebox.profiling import measure_parts

WIDTH, ROWS = 256, 64
KIB = 1024


class Slow(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        time.sleep(0.02)
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        time.sleep(0.04)
        return gradient.clone()


def measured(parts, inputs, parameters):
    return measure_parts(
        parts, inputs, lambda outputs: outputs[0].sum(), parameters, device=torch.device("cpu"), repeats=3
    )


def test_bytes_are_those_that_stay():
    first, second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
    parts = [lambda x: (first(x).relu(),), lambda x: (second(x).sigmoid(),)]
    parameters = [*first.parameters(), *second.parameters()]
    before, after = measured(parts, (torch.randn(ROWS, WIDTH),), parameters)
    tensor = ROWS * WIDTH * 4
    assert before.output_bytes == after.output_bytes == tensor
    assert tensor <= before.saved_bytes <= tensor + KIB  # ReLU keeps its result, Linear its input, which is x
    assert tensor <= after.saved_bytes <= tensor + KIB
    assert before.working_bytes >= WIDTH * WIDTH * 4  # a gradient, before it is added up
    assert all(parameter.grad is None for parameter in parameters)


def test_seconds_are_where_they_are_spent(monkeypatch):
    elapsed = [0.0]  # other programs take none of it
    monkeypatch.setattr(time, "sleep", lambda seconds: elapsed.append(elapsed[-1] + seconds))
    clock = SimpleNamespace(perf_counter=lambda: elapsed[-1])
    monkeypatch.setattr("squeezebox.profiling._ledgers.time", clock)
    linear = nn.Linear(4, 4)
    parts = [lambda x: (linear(x),), lambda x: (Slow.apply(x),), lambda x: (x * 2.0,)]
    costs = measured(parts, (torch.randn(2, 4),), [*linear.parameters()])
    seconds = [each for cost in costs for each in (cost.forward_seconds, cost.backward_seconds)]
    assert seconds == pytest.approx([0.0, 0.0, 0.02, 0.04, 0.0, 0.0])


def test_gradients_that_were_there_stay():
    linear = nn.Linear(4, 4)
    linear.weight.grad = torch.full((4, 4), 7.0)
    measured([lambda x: (linear(x),)], (torch.randn(2, 4),), [*linear.parameters()])
    assert torch.equal(linear.weight.grad, torch.full((4, 4), 7.0))

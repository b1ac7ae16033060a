"""Two calls that are computed as one give what they gave, and stay two where something else reads between."""

import pytest
import torch
from torch import nn
from torch.nn import functional

import squeezebox


class Skip(nn.Module):
    """As a U-Net's: features from above next to those from below."""

    def __init__(self, read=lambda x: 0.0):
        super().__init__()
        self.first, self.read = nn.Conv2d(3, 8, 3, padding=1), read
        self.second, self.third = nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(16, 4, 3, padding=1)

    def forward(self, x):
        skip = self.first(x)
        joined = torch.cat((skip, self.second(skip.relu())), dim=1)
        return self.third(joined) + self.read(joined)


class Gate(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, x):
        for _ in range(3):
            x = self.linear(x)
            x = x * torch.sigmoid(x)
        return x


def sample_of(model):
    torch.manual_seed(0)
    return (torch.randn(2, 3, 32, 32) if isinstance(model, Skip) else torch.randn(512, 64)), None


def loss_fn(output, target):
    return output.square().mean()


def gradients(model, inputs):
    model.zero_grad()
    loss_fn(model(inputs), None).backward()
    return [each.grad.clone() for each in model.parameters()]


@pytest.mark.parametrize(("make", "rule", "where"), [(Skip, "split conv", ""), (Gate, "silu", "")])
def test_the_pattern_is_found_and_its_gradients_are_the_models(make, rule, where):
    model = make()
    sample = sample_of(model)
    plain = gradients(model, sample[0])
    rewritten = squeezebox.rewrite(model, sample=sample, loss_fn=loss_fn)
    assert [(row.rule, row.where) for row in rewritten.rewrites.applied] == [(rule, (where,))]
    torch.testing.assert_close(gradients(model, sample[0]), plain, rtol=1e-4, atol=1e-6)
    before = squeezebox.estimate(make(), sample=sample, loss_fn=loss_fn)
    after = squeezebox.estimate(model, sample=sample, loss_fn=loss_fn)
    assert (after.peak_bytes, after.saved_bytes) < (before.peak_bytes, before.saved_bytes)


@pytest.mark.parametrize("read", [lambda x: x.mean(), lambda x: functional.relu(x).sum()])
def test_a_concatenation_that_is_read_otherwise_is_there(read):
    model = Skip(read)
    inputs, _ = sample_of(model)
    plain = gradients(model, inputs)
    found = squeezebox.rewrite(Skip(), sample=(inputs, None), loss_fn=loss_fn).rewrites
    squeezebox.rewrite(model, rewrites=found)
    torch.testing.assert_close(gradients(model, inputs), plain, rtol=1e-4, atol=1e-6)


class Changed(nn.Module):
    """Changes a part of a concatenation before that is read."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 1), nn.Conv2d(16, 4, 1)

    def forward(self, x):
        part = self.first(x)
        joined = torch.cat((part, part), dim=1)
        part.mul_(2.0)
        return self.second(joined) + part.mean()


def test_an_input_that_is_changed_in_place_is_read_before():
    model, (inputs, _) = Changed(), sample_of(Skip())
    plain = gradients(model, inputs)
    found = squeezebox.rewrite(Skip(), sample=(inputs, None), loss_fn=loss_fn).rewrites
    squeezebox.rewrite(model, rewrites=found)
    torch.testing.assert_close(gradients(model, inputs), plain)

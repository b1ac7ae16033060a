"""The largest batch fits, one sample more does not, and bad samples are refused."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import squeezebox
from squeezebox.planning import _profiles
from squeezebox.schema import BudgetError, OptionError


def network():
    torch.manual_seed(1)
    layers = [
        layer for _ in range(3) for layer in (nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
    ]
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), *layers, nn.Flatten(), nn.Linear(8 * 256, 10))


def batch(size):
    generator = torch.Generator().manual_seed(2)
    return torch.randn(size, 3, 16, 16, generator=generator), torch.randint(10, (size,), generator=generator)


@pytest.mark.parametrize(("size", "budget"), [(8, "100%"), (16, 900_000)])
def test_the_answer_fits_and_little_more_does_not(size, budget):
    model = network()
    options = {"loss_fn": F.cross_entropy, "exact": True}
    found = squeezebox.max_batch(model, sample=batch(size), budget=budget, **options)
    limit = found.plan.budget_bytes
    assert found.measured and found.predicted_peak_bytes <= limit
    more = int(1.05 * found.batch) + 1
    with pytest.raises(BudgetError, match="smallest plan"):
        squeezebox.plan(model, sample=batch(more), budget=limit, **options)
    plain = [
        squeezebox.plan(model, sample=batch(n), **options).plain_peak_bytes for n in (found.plain_batch, more)
    ]
    assert plain[0] <= limit < plain[1]
    assert f"batch {found.batch} " in str(found) and f"batch {found.plain_batch}." in str(found)
    session = squeezebox.attach(model, plan=found.plan)
    F.cross_entropy(model(batch(found.batch)[0]), batch(found.batch)[1]).backward()
    session.detach()


def test_what_does_not_fit_at_all_and_samples_without_a_batch():
    model = network()
    with pytest.raises(BudgetError, match="bytes"):
        squeezebox.max_batch(model, sample=batch(2), loss_fn=F.cross_entropy, budget=60_000, exact=True)
    with pytest.raises(OptionError, match="no batch to make larger"):
        squeezebox.max_batch(model, sample=("x", None), loss_fn=F.cross_entropy, budget="1GiB")
    for noise in (0.0, -1.0, float("nan")):
        with pytest.raises(OptionError, match="positive"):
            squeezebox.max_batch(model, sample=batch(2), loss_fn=F.cross_entropy, budget="1GiB", noise=noise)
        with pytest.raises(OptionError, match="positive"):
            squeezebox.plan(model, sample=batch(2), loss_fn=F.cross_entropy, noise=noise)
    with pytest.raises(OptionError, match="is known by sample"):
        squeezebox.max_batch(model, sample=None, loss_fn=F.cross_entropy, budget="1GiB")
    with pytest.raises(OptionError, match="budget"):
        squeezebox.max_batch(model, sample=batch(2), loss_fn=F.cross_entropy, budget="much")
    squeezebox.attach(model).detach()


class Sequence(nn.Module):
    """Two inputs, one of them without a batch, and a target with one row a token."""

    def __init__(self):
        super().__init__()
        self.embedding, self.layer = nn.Embedding(50, 64), nn.Linear(64, 50)

    def forward(self, inputs, scale):
        return self.layer(torch.tanh(self.embedding(inputs["tokens"])) * scale).flatten(0, 1)


def test_samples_of_several_tensors_are_repeated_row_by_row():
    model = Sequence()
    sample = (({"tokens": torch.randint(50, (4, 32))}, torch.ones(64)), torch.randint(50, (4 * 32,)))
    found = squeezebox.max_batch(model, sample=sample, loss_fn=F.cross_entropy, budget="300%", exact=True)
    assert found.batch >= 12
    assert 11 <= found.plain_batch <= 13


def test_what_plain_training_cannot_hold_is_planned_from_smaller_batches(monkeypatch):
    own, sizes = _profiles.run_step, []

    def limited(subject, *others, **named):
        sizes.append(len(subject.sample[0]))
        if sizes[-1] > 16:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return own(subject, *others, **named)

    monkeypatch.setattr(_profiles, "run_step", limited)
    model, (x, y) = network(), batch(8)
    found = squeezebox.max_batch(model, sample=(x, y), loss_fn=F.cross_entropy, budget="400%", noise=1e-2)
    assert found.batch > 16 and not found.measured
    assert max(sizes) == found.batch
    with pytest.raises(squeezebox.BudgetError, match=r"too little memory for the steps .*CUDA out"):
        squeezebox.plan(model, sample=batch(24), loss_fn=F.cross_entropy)


def test_a_budget_for_less_than_two_is_refused_where_batch_normalisation_takes_no_single_sample():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 1024), nn.BatchNorm1d(1024), nn.ReLU(), nn.Linear(1024, 8))
    inputs, target = torch.randn(3, 64), torch.arange(3)
    for rows in (2, 3):
        sample = inputs[:rows], target[:rows]
        with pytest.raises(BudgetError, match="smallest plan"):
            squeezebox.max_batch(model, sample=sample, loss_fn=F.cross_entropy, budget=627_500, exact=True)


def test_a_system_that_does_not_say_what_is_free_has_the_budget(monkeypatch):
    def silent(device):
        raise OptionError("this system does not say")

    monkeypatch.setattr("squeezebox.planning._max_batch.free_bytes", silent)
    model = network()
    found = squeezebox.max_batch(model, sample=batch(8), loss_fn=F.cross_entropy, budget="150%", exact=True)
    assert found.batch >= 8

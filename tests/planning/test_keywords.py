"""Inputs in a dict: by the model's keywords, or whole where the model takes a dict."""

import pytest
import torch
from torch import nn

import squeezebox
from squeezebox.schema import OptionError, arguments


class Reader(nn.Module):
    """Takes its inputs as language models do, and returns what they return."""

    def __init__(self):
        super().__init__()
        self.embedding, self.body = nn.Embedding(50, 32), nn.Sequential(nn.Linear(32, 64), nn.GELU())
        self.head = nn.Linear(64, 50)

    def forward(self, tokens=None, mask=None, labels=None):
        logits = self.head(self.body(self.embedding(tokens)) * mask.unsqueeze(-1))
        loss = None if labels is None else nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return {"logits": logits, "loss": loss}


class Whole(nn.Module):
    """Takes a batch of a loader as it is."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 4))

    def forward(self, batch):
        return self.body(batch["features"])


def batch_of(rows):
    tokens = torch.randint(50, (rows, 24))
    return {"tokens": tokens, "mask": torch.ones(rows, 24), "labels": tokens}


def own_loss(output, _):
    return output["loss"]


def train(model, optimizer, inputs):
    for _ in range(3):
        optimizer.zero_grad()
        model(**inputs)["loss"].backward()
        optimizer.step()


@pytest.fixture
def reader():
    torch.manual_seed(0)
    model = Reader()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


@pytest.mark.parametrize(
    ("inputs", "wanted"),
    [
        (1, ((1,), {})),
        ((1, 2), ((1, 2), {})),
        ({"tokens": 1, "labels": 2}, ((), {"tokens": 1, "labels": 2})),
        ({"features": 1}, (({"features": 1},), {})),
        ({1: 2}, (({1: 2},), {})),
    ],
)
def test_how_inputs_go_into_a_call(inputs, wanted):
    assert arguments(Reader(), inputs) == wanted


def test_a_plan_of_a_dict_trains_as_plain_does(reader):
    model, optimizer = reader
    inputs = batch_of(16)
    plan = squeezebox.plan(
        model,
        optimizer=optimizer,
        sample=(inputs, None),
        loss_fn=own_loss,
        states=True,
        exact=True,
    )
    estimate = squeezebox.estimate(model, sample=(inputs, None), loss_fn=own_loss, optimizer=optimizer)
    assert estimate.peak_bytes == pytest.approx(plan.plain_peak_bytes, rel=0.02)
    twin = Reader()
    twin.load_state_dict(model.state_dict())
    other = torch.optim.AdamW(twin.parameters(), lr=1e-2)
    session = squeezebox.attach(model, optimizer=optimizer, plan=plan)
    train(model, optimizer, inputs)
    assert session.report().peak_bytes <= plan.predicted_peak_bytes * 1.05
    session.detach()
    train(twin, other, inputs)
    assert all(map(torch.equal, model.parameters(), twin.parameters()))


def test_a_model_that_takes_a_dict_gets_it():
    model, batch = Whole(), {"features": torch.randn(64, 16)}
    plan = squeezebox.plan(
        model,
        sample=(batch, torch.randint(4, (64,))),
        loss_fn=nn.functional.cross_entropy,
        noise=1e-2,
    )
    assert 0 < plan.predicted_peak_bytes <= plan.plain_peak_bytes


def test_the_largest_batch_and_other_batches_of_a_dict(reader):
    model, optimizer = reader
    found = squeezebox.find_batch(
        model, (batch_of(4), None), loss_fn=own_loss, optimizer=optimizer, memory="4MiB"
    )
    assert found.batch >= 4
    session = squeezebox.attach(
        model,
        optimizer=optimizer,
        sample=(batch_of(8), None),
        loss_fn=own_loss,
        budget="1GiB",
        noise=1e-2,
        on_mismatch="replan",
    )
    for rows in (8, 12):
        optimizer.zero_grad()
        model(**batch_of(rows))["loss"].backward()
        optimizer.step()
    report = session.report()
    session.detach()
    assert not [note for note in report.record.notes if "no plan of their own" in note]


def test_rewritten_and_measured_with_a_dict(reader):
    model, _ = reader
    sample = (batch_of(4), None)
    squeezebox.rewrite(model, sample=sample, loss_fn=own_loss)
    with pytest.raises(OptionError, match=r"fails on the sample.*KeyError.*by the model's keywords"):
        squeezebox.plan(
            Whole(),
            sample=({"other": torch.randn(4, 16)}, torch.zeros(4, dtype=torch.long)),
            loss_fn=nn.functional.cross_entropy,
            budget="90%",
            noise=1e-2,
        )

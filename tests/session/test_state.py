"""state_dict(): a resumed run equals an uninterrupted one to the bit."""

import copy
import io
import json
import math

import pytest
import torch

import squeezebox
from squeezebox.bounds import Comet
from squeezebox.schema import FormatError
from tests.capture.nets import NETS, images, plain_step


def through_torch(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def through_json(state):
    return json.loads(json.dumps(state))


def steps(model, optimizer, first, last):
    losses = []
    for number in range(first, last):
        torch.manual_seed(number)
        optimizer.zero_grad()
        losses.append(plain_step(model, images()).item())
        optimizer.step()
    return losses


@pytest.mark.every(2)
@pytest.mark.parametrize("through", [through_torch, through_json])
@pytest.mark.parametrize(
    "options", [{"noise": 1e-2}, {"controller": Comet(interval=4)}], ids=["noise", "comet"]
)
def test_a_resumed_run_equals_an_uninterrupted_one(options, through):
    model = NETS["activations"][0]()
    twin = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    session = squeezebox.attach(model, optimizer=optimizer, **options)
    uninterrupted = steps(model, optimizer, 0, 8)
    report = session.report()
    session.detach()

    optimizer = torch.optim.SGD(twin.parameters(), lr=1e-3, momentum=0.9)
    first = squeezebox.attach(twin, optimizer=optimizer, **options)
    losses = steps(twin, optimizer, 0, 5)
    state = through(first.state_dict())
    first.detach()
    second = squeezebox.attach(twin, optimizer=optimizer, **options)
    second.load_state_dict(state)
    losses += steps(twin, optimizer, 5, 8)
    assert all(math.isfinite(loss) for loss in losses) and losses == uninterrupted
    resumed = second.report()
    assert [row.bound for row in resumed.tensors] == [row.bound for row in report.tensors]
    assert resumed.record.step == 7
    assert second.state_dict() == session.state_dict()
    second.detach()


@pytest.mark.parametrize("more", [1, 2, 18])
def test_a_session_that_has_run_goes_back(more):
    model = NETS["activations"][0]()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    session = squeezebox.attach(model, optimizer=optimizer, noise=1e-2)
    steps(model, optimizer, 0, 3)
    weights, state = copy.deepcopy(model.state_dict()), session.state_dict()
    losses, after = steps(model, optimizer, 3, 8), session.state_dict()
    steps(model, optimizer, 50, 50 + more)
    model.load_state_dict(weights)
    session.load_state_dict(state)
    assert session.state_dict() == state
    assert steps(model, optimizer, 3, 8) == losses and session.state_dict() == after
    model(images())  # without a backward
    session.load_state_dict(state)
    assert session.state_dict() == state


def damaged(**changes):
    def damage(state):
        return {key: value for key, value in {**state, **changes}.items() if value is not ...}

    return damage


@pytest.mark.parametrize(
    "damage",
    [
        damaged(version=1),
        damaged(version=...),
        damaged(step=...),
        damaged(step="soon"),
        damaged(counts=...),
        damaged(counts=[1]),
        damaged(counts=3),
        damaged(controller=...),
        damaged(controller={}),
        damaged(controller=[1, 2]),
        damaged(controller={"bounds": {}, "sensitivities": {}, "corrections": {}, "updates": "many"}),
        damaged(controller={"bounds": {"a": "wide"}, "sensitivities": {}, "corrections": {}, "updates": 1}),
        damaged(late_values=...),
        damaged(late_values=1),
        lambda _: None,
        lambda _: [1],
    ],
)
def test_a_newer_or_damaged_state_is_refused_whole(damage):
    model = NETS["resnet"][0]()
    session = squeezebox.attach(model, noise=1e-2)
    plain_step(model, images())
    state = session.state_dict()
    with pytest.raises(FormatError, match="state"):
        session.load_state_dict(damage(state))
    assert session.state_dict() == state
    session.detach()


def test_another_version_is_named():
    session = squeezebox.attach(NETS["resnet"][0]())
    with pytest.raises(FormatError, match="version 99; this Squeezebox reads version 2"):
        session.load_state_dict({"version": 99})
    session.detach()

"""Optimizer state in 16 and 8 bits: updates as wrong as predicted, checkpoints of plain tensors."""

import copy

import pytest
import torch
from torch import nn

from squeezebox.memory import StoredTensor, parts_of
from squeezebox.optim import Updates
from squeezebox.planning._state_costs import state_costs

OPTIMIZERS = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=1e-2, momentum=0.9, weight_decay=1e-2),
    "Adam": lambda parameters: torch.optim.Adam(parameters, lr=1e-3),
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, foreach=True),
    "NAdam": lambda parameters: torch.optim.NAdam(parameters, lr=1e-3),
    "RAdam": lambda parameters: torch.optim.RAdam(parameters, lr=1e-3),
    "RMSprop": lambda parameters: torch.optim.RMSprop(parameters, lr=1e-3, momentum=0.9),
    "Adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=1e-3),
}
CPU = torch.device("cpu")


def network(dtype=torch.float32):
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 40, 5),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(40 * 16, 600),  # 384,000 elements: two pieces
        nn.Tanh(),
        nn.Linear(600, 10),
    )
    return model.to(memory_format=torch.channels_last).to(dtype)


def held(model, optimizer, bits, *, in_backward=True):
    names = [name for name, parameter in model.named_parameters() if parameter.numel() > 2000]
    return Updates(
        model,
        optimizer,
        in_backward=in_backward,
        states=(),
        packed=dict.fromkeys(names, bits),
        gradients=(),
        folder=None,
    )


def train(model, optimizer, steps=60, first=0, *, clip=None):
    losses = []
    for number in range(first, first + steps):
        random = torch.Generator().manual_seed(number)
        images = torch.randn(16, 3, 8, 8, generator=random).to(next(model.parameters()).dtype)
        classes = (images.float().mean((1, 2, 3)) > 0).long()
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(images), classes)
        loss.backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses)


@pytest.mark.every(5)
@pytest.mark.parametrize("bits", [16, 8])
@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_updates_are_at_most_as_wrong_as_predicted(make, bits):
    model = network()
    optimizer = make(model.parameters())
    updates = held(model, optimizer, bits)
    train(model, optimizer)
    predicted = {code.bits: code.noise for code in state_costs(optimizer, 1.0, CPU)[0]}[bits]
    assert 0.0 < updates.noise() < 2 * predicted
    updates.close()


@pytest.mark.parametrize("bits", [16, 8])
def test_state_is_as_small_as_said_and_training_goes_as_well(bits):
    plain, model = network(), network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    updates = held(model, optimizer, bits)
    wanted = train(plain, torch.optim.AdamW(plain.parameters(), lr=1e-3))
    found = train(model, optimizer)
    assert found[0] == wanted[0] and not torch.equal(found, wanted)
    assert float(found[-20:].mean()) == pytest.approx(float(wanted[-20:].mean()), abs=0.05)
    weight = model[3].weight
    state = optimizer.state[weight]
    nbytes = sum(part.nbytes for key in ("exp_avg", "exp_avg_sq") for part in parts_of(state[key]))
    assert nbytes == weight.numel() * bits // 4 + (weight.numel() // 256 * 8 if bits == 8 else 0)
    updates.close()
    assert not any(isinstance(each, StoredTensor) for each in state.values())
    train(model, optimizer, 2)


def test_the_same_numbers_come_out_again_and_torch_s_own_are_not_drawn():
    found = []
    for _ in range(2):
        model = network()
        optimizer = torch.optim.Adam(model.parameters())
        updates, before = held(model, optimizer, 8), torch.get_rng_state()
        train(model, optimizer, 5)
        assert torch.equal(torch.get_rng_state(), before)
        found.append(model.state_dict())
        updates.close()
    assert all(torch.equal(value, found[1][name]) for name, value in found[0].items())


def test_a_checkpoint_has_plain_tensors_and_goes_on_with_and_without(tmp_path):
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    updates = held(model, optimizer, 8)
    train(model, optimizer, 10)
    torch.save([model.state_dict(), optimizer.state_dict()], tmp_path / "checkpoint.pt")
    copied = copy.deepcopy(optimizer.state_dict())
    assert not any(isinstance(each, StoredTensor) for s in copied["state"].values() for each in s.values())
    losses = train(model, optimizer, 5, 10)
    updates.close()
    for packs in (False, True):
        again = network()
        other = torch.optim.AdamW(again.parameters(), lr=1e-3)
        updates = held(again, other, 8) if packs else None
        weights, state = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
        again.load_state_dict(weights)
        other.load_state_dict(state)
        own = other.state[again[3].weight]["exp_avg"]
        assert isinstance(own, StoredTensor) == packs
        assert torch.allclose(train(again, other, 5, 10), losses, atol=0.01)
        if updates is not None:
            assert 0.0 < updates.noise() < 0.02
            updates.close()


def test_state_that_is_read_or_changed_in_place_is_that_of_the_optimizer():
    model = network()
    optimizer = torch.optim.Adam(model.parameters())
    updates = held(model, optimizer, 8)
    train(model, optimizer, 3)
    first, second = (optimizer.state[model[3].weight][key] for key in ("exp_avg", "exp_avg_sq"))
    before, squares = first.clone(), second.clone()
    second.mul_(4.0)
    assert torch.equal(second.clone(), 4.0 * squares)
    assert torch.allclose(first.clone(), before, atol=float(before.abs().max()) / 100)
    first.zero_()
    assert not first.clone().any()
    updates.close()


@pytest.mark.parametrize("clip", [None, 0.1])
def test_in_the_optimizer_s_step_and_in_bfloat16(clip):
    model = network(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    updates = held(model, optimizer, 8, in_backward=False)
    losses = train(model, optimizer, 40, clip=clip)
    assert losses[-10:].mean() < losses[:10].mean()
    assert optimizer.state[model[3].weight]["exp_avg"].clone().dtype is torch.bfloat16
    updates.close()


def test_codes_are_offered_where_their_updates_are_good_enough():
    model = network()
    adam = torch.optim.AdamW(model.parameters())
    assert [code.bits for code in state_costs(adam, 0.02, CPU)[0]] == [16, 8]
    assert [code.bits for code in state_costs(adam, 1e-3, CPU)[0]] == [16]
    assert state_costs(adam, 1e-5, CPU) == [()]
    centered = torch.optim.RMSprop(model.parameters(), centered=True)
    assert state_costs(centered, 0.5, CPU) == [()]


def test_noise_is_measured_once_for_groups_that_differ_in_what_is_not_the_optimizer_s():
    groups = [{"params": [nn.Parameter(torch.zeros(4))], "lr_scale": scale} for scale in (1.0, 0.5)]
    first, second = state_costs(torch.optim.AdamW(groups, capturable=True), 0.02, CPU)
    assert [code.bits for code in first] == [16, 8] and second is first


def test_training_begins_again_after_an_update_that_failed():
    model = network()
    optimizer = torch.optim.AdamW(model.parameters())
    updates = held(model, optimizer, 8)
    train(model, optimizer, 1)
    saved = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    (group,) = optimizer.param_groups
    betas, group["betas"] = group["betas"], None
    with pytest.raises(TypeError):
        train(model, optimizer, 1)
    group["betas"] = betas
    assert optimizer.state_dict()["state"].keys() == saved[1]["state"].keys()
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    train(model, optimizer, 1)
    updates.close()

"""Weights as bfloat16 and a rest: to the bit those of float32, wherever the rest is and whoever asks."""

import copy
import io
import weakref

import pytest
import torch
from torch import nn

from squeezebox.memory import TensorFile, disk_folder
from squeezebox.optim import SplitWeight, SplitWeights, Updates, splittable
from squeezebox.optim._split_weight import Halves
from squeezebox.schema import AttachError, CaptureError

MAKE = {
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=1e-2, momentum=0.9),
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=1e-2),
}


def network():
    torch.manual_seed(0)
    layers = [nn.Conv2d(1, 300, 9), nn.ReLU(), nn.Flatten(), nn.Linear(4800, 150), nn.Linear(150, 150)]
    model = nn.Sequential(*layers)
    model[0].to(memory_format=torch.channels_last)
    return model


def sample(number):
    return torch.randn(4, 1, 12, 12, generator=torch.Generator().manual_seed(number))


def train(model, optimizer, steps=3, *, autocast=True, clip=None, accumulate=1):
    """Losses; where several backward passes add up, all of them are in one context of autocast."""
    losses = []
    for number in range(steps):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            for each in range(accumulate):
                loss = model(sample(7 * number + each)).float().square().mean()
                losses.append(loss.item())
                if accumulate > 1:
                    loss.backward()
        if accumulate == 1:
            loss.backward()
        if clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
    return losses


def split(model, optimizer, names=("0.weight", "3.weight", "4.weight"), **options):
    given = {"in_backward": True, "states": (), "packed": {}, "gradients": (), "folder": None}
    return Updates(model, optimizer, **{**given, "split": names, **options})


def same(first, second):
    return all(map(torch.equal, first.parameters(), second.parameters()))


def bits(value):
    return value.contiguous().view(-1).view(torch.int32)


def codes_of_all_kinds():
    """Random bits, all ties, and what is not finite or rounds to infinity."""
    upper = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32) << 16
    chosen = torch.tensor([0x7F7FFFFF, 0x7F800000, 0x7F800001, 0x7FC00000, -1, 0, 1, 0x80], dtype=torch.int32)
    drawn = torch.randint(-(1 << 31), (1 << 31) - 1, (1 << 20,), generator=torch.Generator().manual_seed(0))
    return torch.cat([drawn.int(), upper, upper + 0x8000, upper + 0x7FFF, upper - 0x8001 + 0x10000, chosen])


@pytest.fixture(params=[False, True], ids=["memory", "file"])
def file(request):
    made = TensorFile(disk_folder()) if request.param else None
    yield made
    if made is not None:
        made.close()


def test_halves_give_every_pattern_of_bits_back(file):
    value = codes_of_all_kinds().view(torch.float32)
    halves = Halves(value, file)
    halves.store(value)
    assert torch.equal(bits(halves.load()), bits(value))
    finite = ~value.isnan()
    assert torch.equal(halves.code[finite], value.bfloat16()[finite]) and halves.code[~finite].isnan().all()


@pytest.mark.parametrize("pattern", [0x3F808000, 0x7FC01234, 1, 0x3F818000], ids=hex)
def test_what_cannot_be_split_takes_no_more_than_itself_besides(pattern):
    value = torch.full((700_000,), pattern, dtype=torch.int32).view(torch.float32)
    halves = Halves(value)
    halves.store(value)
    assert torch.equal(bits(halves.load()), bits(value))
    assert sum(each.nbytes for each in halves.parts()) <= 2 * value.nbytes
    halves.store(torch.zeros_like(value))
    assert sum(each.nbytes for each in halves.parts()) == value.nbytes


@pytest.mark.parametrize("in_file", [False, True], ids=["memory", "file"])
@pytest.mark.parametrize("clip", [None, 0.1], ids=["in backward", "clipped"])
@pytest.mark.parametrize("make", MAKE.values(), ids=MAKE)
def test_training_is_plain_pytorch_s_to_the_bit(make, clip, in_file):
    plain, model = network(), network()
    optimizer, other = make(plain.parameters()), make(model.parameters())
    wanted = train(plain, optimizer, clip=clip, accumulate=1 + bool(clip))
    identities = list(map(id, model.parameters()))
    options = {"states": ("3.weight", "0.weight"), "folder": disk_folder()} if in_file else {}
    updates = split(model, other, in_backward=not clip, **options)
    assert train(model, other, clip=clip, accumulate=1 + bool(clip)) == wanted
    assert same(model, plain)
    assert list(map(id, model.parameters())) == identities
    updates.close()
    assert same(model, plain) and all(type(each) is nn.Parameter for each in model.parameters())
    assert train(model, other) == train(plain, optimizer)
    assert list(map(id, model.parameters())) == identities


def test_no_step_has_a_whole_weight_in_float32(monkeypatch):
    model = network()
    optimizer = MAKE["AdamW"](model.parameters())
    updates = split(model, optimizer)
    with monkeypatch.context() as changed:
        changed.setattr(Halves, "load", None)
        train(model, optimizer)
    updates.close()


def test_packed_state_is_as_noisy_as_with_weights_in_float32():
    found = []
    for names in ((), ("3.weight", "4.weight")):
        model = network()
        optimizer = MAKE["AdamW"](model.parameters())
        updates = split(model, optimizer, names, packed={"3.weight": 8, "4.weight": 16})
        found.append((train(model, optimizer), updates.noise()))
        updates.close()
    assert found[0] == found[1] and 0.0 < found[0][1] < 0.02


def test_everybody_but_autocast_sees_float32():
    plain, model = network(), network()
    optimizer, other = MAKE["AdamW"](plain.parameters()), MAKE["AdamW"](model.parameters())
    updates = split(model, other)
    weight = model[3].weight
    assert isinstance(weight, SplitWeight) and isinstance(weight, nn.Parameter) and weight.is_leaf
    train(plain, optimizer)
    train(model, other)
    assert torch.equal(model(sample(0)), plain(sample(0)))
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(model(sample(0)), plain(sample(0)))
    with torch.inference_mode():
        assert torch.equal(model(sample(0)), plain(sample(0)))
    assert same(copy.deepcopy(model), plain) and type(copy.deepcopy(model)[3].weight) is nn.Parameter
    kept = io.BytesIO()
    torch.save(model.state_dict(), kept)
    kept.seek(0)
    loaded = torch.load(kept)
    assert all(torch.equal(value, loaded[name]) for name, value in plain.state_dict().items())
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in plain.state_dict().items())
    assert torch.equal(weight.square().sum(), plain[3].weight.square().sum())
    assert torch.equal(weight[0], plain[3].weight[0])
    assert torch.equal(weight.bfloat16(), plain[3].weight.bfloat16())
    updates.close()


def test_without_autocast_it_trains_as_well():
    plain, model = network(), network()
    optimizer, other = MAKE["AdamW"](plain.parameters()), MAKE["AdamW"](model.parameters())
    wanted = train(plain, optimizer, autocast=False)
    updates = split(model, other)
    assert train(model, other, autocast=False) == wanted and same(model, plain)
    updates.close()


@pytest.mark.parametrize(
    "view", [lambda weight: weight[0], lambda weight: weight.data[0], lambda weight: weight.detach().view(-1)]
)
def test_changes_in_place_arrive_and_those_through_views_are_refused(view):
    model = network()
    value = torch.randn(150, 4800)
    updates = split(model, MAKE["SGD"](model.parameters()))
    weight = model[3].weight
    with torch.no_grad():
        weight.copy_(value)
        weight.mul_(3.0)
        weight.detach().add_(1.0)
        weight.data.neg_()
        torch._foreach_add_([weight, model[3].bias], 1.0)
        weight.bfloat16().zero_()  # a copy
    wanted = value.mul(3.0).add(1.0).neg().add(1.0)
    assert torch.equal(weight, wanted)
    state = model.state_dict()
    model.load_state_dict({**state, "3.weight": value})
    assert torch.equal(weight, value) and torch.equal(state["3.weight"], value)
    weight.data = wanted
    assert torch.equal(weight, wanted)
    with pytest.raises(CaptureError, match="cannot become"):
        weight.data = value[0]
    with torch.no_grad():
        view(weight).zero_()
    with pytest.raises(CaptureError, match="through a view"):
        weight.sum()
    with pytest.raises(CaptureError, match="through a view"):
        train(model, MAKE["SGD"](model.parameters()))
    updates.close()


def test_hooks_gradients_and_attributes_stay():
    model = network()
    weight, seen = model[4].weight, []
    weight.mark = "mine"
    weight.register_hook(lambda gradient: seen.append("gradient"))
    handle = weight.register_post_accumulate_grad_hook(lambda each: seen.append(each is weight))
    loss = model(sample(0)).sum()
    loss.backward()
    gradient = weight.grad
    weights = SplitWeights({"4.weight": weight})
    assert weight.grad is gradient and weight.mark == "mine"
    model(sample(0)).sum().backward()
    weights.close()
    assert weight.grad is gradient and weight.mark == "mine" and not hasattr(weight, "halves")
    handle.remove()
    model(sample(0)).sum().backward()
    assert seen == ["gradient", True, "gradient", True, "gradient"]


def test_a_graph_that_waits_for_its_backward_is_named():
    model = network()
    waiting = model[4].weight.view(-1)
    with pytest.raises(AttachError, match=r"'4\.weight'"):
        split(model, MAKE["SGD"](model.parameters()))
    del waiting
    assert all(type(each) is nn.Parameter for each in model.parameters())
    split(model, MAKE["SGD"](model.parameters())).close()


def test_a_cast_that_somebody_holds_stays_as_it_was():
    """As the copy that plain PyTorch makes: here autocast's cache outlives the update."""
    plain, model = network(), network()
    optimizer, other = MAKE["AdamW"](plain.parameters()), MAKE["AdamW"](model.parameters())
    updates = split(model, other)
    found = []
    for each, own in ((plain, optimizer), (model, other)):
        with torch.autocast("cpu", torch.bfloat16):
            found.append(train(each, own))
    assert found[0] == found[1] and same(model, plain)
    code = model[3].weight.halves.code.data_ptr()
    train(model, other)
    assert model[3].weight.halves.code.data_ptr() == code  # nobody held it
    updates.close()


def test_only_ordinary_float32_weights_are_split():
    model = nn.ModuleDict(
        {
            "linear": nn.Linear(128, 128),
            "wider": nn.Linear(128, 128).double(),
            "frozen": nn.Linear(128, 128).requires_grad_(False),
            "attention": nn.MultiheadAttention(128, 4),
            "small": nn.Linear(8, 8),
        }
    )
    assert list(splittable(model, 1 << 16)) == ["linear.weight"]


def test_what_cannot_be_given_back_is_said_before_and_once_it_can_it_is():
    model = network()
    optimizer = MAKE["SGD"](model.parameters())
    updates = split(model, optimizer)
    reference = weakref.ref(model[3].weight)
    with pytest.raises(AttachError, match=r"has hold of a weight of \(150, 4800\)"):
        updates.weights.require_exchangeable()
    assert isinstance(model[3].weight, SplitWeight)
    del reference
    updates.weights.require_exchangeable()
    updates.close()
    assert not any(isinstance(each, SplitWeight) for each in model.parameters())


def test_inference_mode_sees_and_changes_the_weight():
    model = network()
    optimizer, weight = MAKE["SGD"](model.parameters()), model[3].weight
    updates, wanted = split(model, optimizer), weight.detach().clone()
    with torch.inference_mode():
        state = model.state_dict()
        assert torch.equal(state["3.weight"], wanted)
        weight.data.mul_(2.0)
        weight.add_(1.0)
    assert torch.equal(weight, wanted.mul(2.0).add(1.0))
    assert torch.equal(state["3.weight"], weight) and torch.equal(weight.data, weight)
    train(model, optimizer, 1)
    updates.close()


def test_a_gradient_of_another_layout_is_updated_without_state():
    plain, model = network(), network()
    optimizer, other = MAKE["SGD"](plain.parameters()), MAKE["SGD"](model.parameters())
    updates = split(model, other, in_backward=False)
    for each, own in ((plain, optimizer), (model, other)):
        each[4].weight.grad = torch.randn(150, 150, generator=torch.Generator().manual_seed(0)).t()
        own.step()
    assert not other.state_dict()["state"]
    updates.close()
    assert same(model, plain)

"""A weight in a file is the parameter that it was, for every way to read, copy, save and change it."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from squeezebox.memory import (
    FileTensor,
    MovedWeight,
    TensorFile,
    Weights,
    disk_folder,
    movable_weights,
    show_whole,
)
from squeezebox.memory._spill import Successors
from squeezebox.schema import CaptureError


def stack():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 36, 40))
    model[0].weight.data = model[0].weight.data.to(memory_format=torch.channels_last)
    return model.requires_grad_(False)


def into_a_file(model, folder):
    file = TensorFile(disk_folder(folder), reads_on=True)
    return Weights(movable_weights(model, 256), lambda _, value: FileTensor(value, file), file)


@pytest.fixture
def moved(tmp_path):
    model = stack()
    weights = into_a_file(model, tmp_path)
    yield model
    weights.close()
    assert {type(each) for each in model.parameters()} == {nn.Parameter}


def weight_of(model):
    found = model[3].weight
    assert type(found) is MovedWeight
    return found


def test_it_holds_no_memory_and_says_what_it_was(moved):
    plain = stack()
    for mine, own in zip(moved.parameters(), plain.parameters(), strict=True):
        assert (mine.shape, mine.stride(), mine.dtype, mine.device) == (
            own.shape,
            own.stride(),
            own.dtype,
            own.device,
        )
        assert (mine.nbytes, mine.numel(), len(mine), mine.is_contiguous()) == (
            own.nbytes,
            own.numel(),
            len(own),
            own.is_contiguous(),
        )
        assert isinstance(mine, nn.Parameter) and not mine.requires_grad and mine.is_leaf
        assert mine.grad is None
    assert str(moved) == str(plain) and repr(weight_of(moved)) == repr(plain[3].weight)


READERS = {
    "forward": lambda model: model(torch.ones(2, 3, 8, 8)),
    "operator": lambda model: model[3].weight @ torch.ones(576),
    "keyword": lambda model: F.linear(input=torch.ones(576), weight=model[3].weight),
    "list": lambda model: torch.cat([model[3].weight, model[3].weight]),
    "view": lambda model: model[3].weight.t()[5:],
    "rows": lambda model: torch.stack(list(model[3].weight)),
    "clone": lambda model: model[3].weight.clone(),
    "deepcopy": lambda model: copy.deepcopy(model)[3].weight,
    "pickle": lambda model: pickle.loads(pickle.dumps(model[3].weight)),
    "state_dict": lambda model: model.state_dict()["3.weight"],
    "data": lambda model: model[3].weight.data,
    "vector": lambda model: nn.utils.parameters_to_vector(model[3].parameters()),
    "functional_call": lambda model: torch.func.functional_call(model, {}, torch.ones(1, 3, 8, 8)),
}


@pytest.mark.parametrize("read", READERS.values(), ids=READERS)
def test_reading_it_gives_the_same(read, moved):
    assert torch.equal(read(moved), read(stack()))


def test_copies_and_files_have_plain_tensors(moved):
    copied = copy.deepcopy(moved)
    assert {type(each) for each in copied.parameters()} == {nn.Parameter}
    for saved in (moved, moved.state_dict()):
        file = io.BytesIO()
        torch.save(saved, file)
        file.seek(0)
        loaded = torch.load(file, weights_only=False)
        state = loaded if isinstance(loaded, dict) else loaded.state_dict()
        assert {type(each) for each in state.values()} == {torch.Tensor}
        assert all(torch.equal(state[name], each) for name, each in stack().state_dict().items())


def half(model):
    return {name: 0.5 * each for name, each in stack().state_dict().items()}


CHANGES = {
    "in place": lambda model: model[3].weight.mul_(0.5),
    "operator": lambda model: model[3].weight.__imul__(0.5),
    "data": lambda model: model[3].weight.data.mul_(0.5),
    "other data": lambda model: setattr(model[3].weight, "data", 0.5 * model[3].weight),
    "out": lambda model: torch.mul(model[3].weight, 0.5, out=model[3].weight),
    "list": lambda model: torch._foreach_mul_([model[3].weight], 0.5),
    "load_state_dict": lambda model: model.load_state_dict(half(model)),
    "same device": lambda model: model.to("cpu").load_state_dict(half(model)),
    "initialised": lambda model: nn.init.constant_(model[3].weight, 0.25),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_changing_it_reaches_the_file(change, moved):
    plain, weight = stack(), weight_of(moved)
    with torch.no_grad():
        change(moved)
        change(plain)
    assert moved[3].weight is weight
    assert torch.equal(weight, plain[3].weight)
    assert torch.equal(moved(torch.ones(1, 3, 8, 8)), plain(torch.ones(1, 3, 8, 8)))


REFUSED = {
    "trained": (lambda model: model.requires_grad_(True), "requires_grad_"),
    "trained too": (lambda model: setattr(model[3].weight, "requires_grad", True), "requires_grad_"),
    "another dtype": (lambda model: model.double(), "torch.float64"),
    "an address": (lambda model: model[3].weight.data_ptr(), "data_ptr"),
    "numpy": (lambda model: model[3].weight.numpy(), "numpy"),
    "processes": (lambda model: model.share_memory(), "share_memory_"),
    "an item": (lambda model: model[3].weight.__setitem__(0, 0.0), "view"),
}


@pytest.mark.parametrize(("ask", "named"), REFUSED.values(), ids=REFUSED)
def test_what_it_cannot_be_is_refused(ask, named, moved):
    with pytest.raises(CaptureError, match=named), torch.no_grad():
        ask(moved)
    assert torch.equal(weight_of(moved), stack()[3].weight)


def test_a_change_of_a_view_is_refused_once_somebody_reads(moved):
    with torch.no_grad():
        weight_of(moved)[0].zero_()
    with pytest.raises(CaptureError, match=r"'3\.weight' was changed through a view"):
        moved(torch.ones(1, 3, 8, 8))
    assert torch.equal(weight_of(moved), stack()[3].weight)


def test_closing_gives_every_parameter_its_elements(tmp_path):
    model = stack()
    before = dict(model.named_parameters())
    weights = into_a_file(model, tmp_path)
    with torch.no_grad():
        model[3].weight.mul_(2.0)
    weights.close()
    assert all(each is before[name] for name, each in model.named_parameters())
    assert torch.equal(model[3].weight, 2.0 * stack()[3].weight)
    assert model[0].weight.stride() == stack()[0].weight.stride()
    assert not vars(model[3].weight)


def test_only_frozen_ones_of_their_own_memory_are_movable():
    model = nn.ModuleList([nn.Linear(64, 64, bias=False) for _ in range(6)]).requires_grad_(False)
    model[0].requires_grad_(True)
    model[1].weight.data = model[2].weight.data
    model[3].weight = nn.Parameter(torch.zeros(64, 64, dtype=torch.int32), requires_grad=False)
    model[4].weight.data = torch.zeros(128, 64)[::2]
    model.append(nn.MultiheadAttention(64, 2).requires_grad_(False))
    assert list(movable_weights(model, 1)) == ["5.weight"]
    assert not movable_weights(model, 1 << 20)


def test_what_comes_next_is_what_came_next_after_the_same_two():
    order = Successors()
    for _ in range(2):
        for each in "abcdcb":
            order.note(each)
    assert list(order.following(8)) == list("abcdcbab")
    order.note("a")
    order.note("b")
    assert list(order.following(3)) == list("cdc")


def test_what_is_shown_whole_is_read_when_its_memory_is_asked_for_and_takes_changes(moved):
    moved.append(moved[3])  # of two names
    wanted = stack()[3].weight
    handle = moved.register_state_dict_post_hook(show_whole)
    state = moved.state_dict(prefix="module.")
    handle.remove()
    value = state["module.3.weight"]
    assert value is state["module.4.weight"] and value.load() is not value.load()
    with pytest.raises(CaptureError):
        moved.state_dict()["3.weight"].data_ptr()
    assert value.untyped_storage().nbytes() == wanted.nbytes
    assert value.data_ptr() == value.untyped_storage().data_ptr() == value.view(-1)[:9].data_ptr()
    assert torch.equal(value[1], wanted[1]) and torch.equal(pickle.loads(pickle.dumps(value)), wanted)
    value.mul_(2.0)
    assert torch.equal(value, 2.0 * wanted) and torch.equal(weight_of(moved), 2.0 * wanted)

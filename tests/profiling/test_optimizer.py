"""What an optimizer's step takes for a moment, against the allocator's count."""

import pytest
import torch
from torch.utils._pytree import tree_leaves

from squeezebox.profiling import PeakMeter, state_bytes, transient_bytes
from squeezebox.schema import OptionError
from squeezebox.steps import tensors_in

SETTINGS = {
    "SGD": [{}, {"momentum": 0.9}, {"momentum": 0.9, "nesterov": True}, {"weight_decay": 0.1}],
    "Adam": [{}, {"amsgrad": True}, {"weight_decay": 0.1}],
    "AdamW": [{}, {"weight_decay": 0.0}],
    "NAdam": [{}, {"weight_decay": 0.1}],
    "RAdam": [{}, {"weight_decay": 0.1}],
    "Adamax": [{}],
    "RMSprop": [{}, {"momentum": 0.9}, {"weight_decay": 0.1}],
    "Adagrad": [{}, {"weight_decay": 0.1}],
}
WAYS = [{}, {"foreach": False}, {"foreach": True}, {"fused": True}, {"maximize": True}]
FUSED = ("SGD", "Adam", "AdamW", "Adagrad")
SIZES = [(100, 100), (50, 50), (300, 100), (1000,)]


@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("name", SETTINGS)
def test_what_a_step_takes_for_a_moment(name, way):
    if way.get("fused") and name not in FUSED:
        pytest.skip("there is no such kernel")
    for settings in SETTINGS[name]:
        parameters = [torch.nn.Parameter(torch.randn(size)) for size in SIZES]
        for parameter in parameters:
            parameter.grad = torch.randn_like(parameter)
        optimizer = getattr(torch.optim, name)(parameters, lr=1e-3, **settings, **way)
        optimizer.step()
        meter = PeakMeter(torch.device("cpu"))
        assert meter.start()
        optimizer.step()
        taken = meter.stop(()).total_bytes
        predicted = transient_bytes([parameter.grad for parameter in parameters], optimizer)
        largest = max(parameter.nbytes for parameter in parameters)
        assert taken - largest // 4 <= predicted <= taken + 1.01 * largest, settings


class Mine(torch.optim.AdamW):
    """One's own, with torch's step."""


class Sum(torch.optim.Optimizer):
    """None of torch's: it holds two sums of each parameter's size, and a small one."""

    def __init__(self, parameters):
        super().__init__(parameters, {})

    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                for name in ("first", "second"):
                    state[name] = state.get(name, torch.zeros_like(parameter)) + parameter.grad
                state["count"] = torch.zeros(3)


class Asking(Sum):
    def step(self, closure=None):
        assert closure is not None, "a closure is needed"
        super().step()


@pytest.mark.parametrize("kind", [torch.float32, torch.float64])
@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("name", [*SETTINGS, "ASGD"])
def test_state_before_the_first_step_has_every_byte_of_it(name, way, kind):
    if way.get("fused") and name not in FUSED:
        pytest.skip("there is no such kernel")
    before = torch.get_default_dtype()
    torch.set_default_dtype(kind)
    try:
        for settings in SETTINGS.get(name, [{}]):
            model = torch.nn.Linear(20, 30)
            optimizer = getattr(torch.optim, name)(model.parameters(), lr=1e-3, **settings, **way)
            first = state_bytes(model, optimizer)
            for parameter in model.parameters():
                parameter.grad = torch.ones_like(parameter)
            optimizer.step()
            assert first == sum(each.nbytes for each in tensors_in(list(optimizer.state.values()))), settings
    finally:
        torch.set_default_dtype(before)


@pytest.mark.parametrize(
    "make",
    [
        Mine,
        Sum,
        lambda parameters: torch.optim.SGD(parameters, momentum=0.9),
        torch.optim.Adadelta,
        torch.optim.ASGD,
        torch.optim.Rprop,
        torch.optim.Adafactor,
        lambda parameters: torch.optim.Muon([each for each in parameters if each.dim() == 2]),
    ],
)
def test_state_is_known_before_the_first_step_and_where_some_parameters_have_none(make):
    model = torch.nn.Sequential(torch.nn.Linear(200, 300), torch.nn.Linear(300, 100))
    optimizer = make([*model.parameters()])
    first = state_bytes(model, optimizer)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    made = [value for state in optimizer.state.values() for value in state.values()]
    real = sum(value.nbytes for value in made if isinstance(value, torch.Tensor))
    assert state_bytes(model, optimizer) == real
    assert real - 16 * len(made) <= first <= real
    half = torch.nn.Sequential(torch.nn.Linear(200, 300), torch.nn.Linear(300, 100))
    known = torch.optim.AdamW(half.parameters())
    half[0].weight.grad = torch.ones_like(half[0].weight)
    known.step()
    assert state_bytes(half, known) == 2 * sum(each.nbytes for each in half.parameters()) + 4 * 4


def test_an_optimizer_that_has_to_step_first_is_refused_until_then():
    model = torch.nn.Linear(20, 30)
    optimizer = Asking(model.parameters())
    with pytest.raises(OptionError, match=r"Asking will have is not known .*: a closure is needed. Call opt"):
        state_bytes(model, optimizer)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step(lambda: None)
    assert state_bytes(model, optimizer) == 2 * (model.weight.nbytes + model.bias.nbytes) + 2 * 12


def test_lists_in_the_state_count_and_the_history_that_lbfgs_will_have():
    model, x = torch.nn.Linear(20, 30), torch.randn(64, 20)
    optimizer = torch.optim.LBFGS(model.parameters(), history_size=3)
    first = state_bytes(model, optimizer)

    def closure():
        optimizer.zero_grad()
        loss = model(x).square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    (state,) = optimizer.state.values()
    assert len(state["old_dirs"]) == 3
    real = sum(each.nbytes for each in tree_leaves(state) if isinstance(each, torch.Tensor))
    assert first <= real == state_bytes(model, optimizer) <= first + 100


def test_an_optimizer_within_another_is_not_stepped():
    class Around(Sum):
        def step(self, closure=None):
            self.base.step()

    model = torch.nn.Linear(20, 30)
    optimizer, before = Around(model.parameters()), model.weight.clone()
    optimizer.base = torch.optim.SGD(model.parameters(), lr=1.0)
    model.weight.grad = torch.ones_like(model.weight)
    with pytest.raises(OptionError, match="Around will have is not known .*: it steps another optimizer"):
        state_bytes(model, optimizer)
    assert torch.equal(model.weight, before)

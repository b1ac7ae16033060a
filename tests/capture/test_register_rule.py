"""Rules of one's own: what operators of torch save that the table does not know is held within bounds too."""

from functools import partial

import pytest
import torch
from torch import nn

import squeezebox
from squeezebox.bounds import Fixed
from squeezebox.capture import Rule, register_rule
from squeezebox.capture._rules import OTHER, row, rule_for
from squeezebox.schema import OptionError, Reads, Role

VALUES = Rule(role=Role.ACTIVATION, reads=Reads.VALUES, dense=True)
OPERATORS = {  # function, node, and the most that the slope changes with the input
    "softplus": (nn.Softplus, "SoftplusBackward0", 0.25),
    "mish": (nn.Mish, "MishBackward", 0.65),
    "elu": (nn.ELU, "EluBackward", 1.0),
}
ROWS, WIDTH, BOUND = 256, 64, 1e-2


class Elementwise(nn.Module):
    """A function of each element, of a copy of the input that nobody else holds."""

    def __init__(self, function) -> None:
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x.clone())


def gradient(model, x, given):
    x = x.detach().requires_grad_()
    return torch.autograd.grad(model(x), x, given)[0]


def of_session(model, x, given):
    """The gradient in a session with a fixed bound, and what its report says of the one saved tensor."""
    session = squeezebox.attach(model, controller=Fixed(value=BOUND, relative=False))
    try:
        found = gradient(model, x, given)
        (saved,) = session.report().record.tensors
        return found, saved
    finally:
        session.detach()


@pytest.mark.parametrize("name", OPERATORS)
def test_bytes_fall_and_gradients_stay_within_the_bound(name):
    make, operator, steepest = OPERATORS[name]
    model, x, given = Elementwise(make()), torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH)
    plain = gradient(model, x, given)
    exact, before = of_session(model, x, given)
    with register_rule(operator, "self", VALUES):
        lossy, saved = of_session(model, x, given)
    again, after = of_session(model, x, given)
    assert before.packed_bytes == before.saved_bytes == after.packed_bytes == x.nbytes
    assert saved.packed_bytes < x.nbytes / 2 and saved.role is Role.ACTIVATION and saved.bound == BOUND
    assert torch.equal(exact, plain) and torch.equal(again, plain)
    assert not torch.equal(lossy, plain)
    assert bool(((lossy - plain).abs() <= steepest * BOUND * given.abs() + 1e-6).all())


@pytest.mark.parametrize("name", OPERATORS)
def test_every_element_is_within_the_bound(name):
    make, operator, _ = OPERATORS[name]
    model, x = Elementwise(make()), torch.randn(ROWS, WIDTH, requires_grad=True)
    session = squeezebox.attach(model, controller=Fixed(value=BOUND, relative=False))
    with register_rule(operator, "self", VALUES):
        held = model(x).grad_fn._saved_self
    session.detach()
    assert 0.0 < float((held.double() - x.double()).abs().max().detach()) <= BOUND


def test_the_noise_of_a_registered_operator_is_kept():
    layers = [nn.Linear(WIDTH, WIDTH), nn.Softplus(), nn.Linear(WIDTH, WIDTH), nn.Mish(), nn.Linear(WIDTH, 8)]
    model, x = nn.Sequential(*layers), torch.randn(ROWS, WIDTH)

    def step():
        model.zero_grad()
        model(x).square().mean().backward()

    def measured():
        session = squeezebox.attach(model, noise=1e-2)
        try:
            for _ in range(3):
                step()
            return session.measure_noise(step), session.report().record.packed_bytes
        finally:
            session.detach()

    _, before = measured()
    with register_rule("SoftplusBackward", "self", VALUES), register_rule("MishBackward", "self", VALUES):
        noise, after = measured()
    assert 0.0 < noise < 3e-2 and after < 0.7 * before


def test_an_exact_codec_loses_nothing():
    model, given = Elementwise(torch.erf), torch.randn(ROWS, WIDTH)
    x = torch.randn(ROWS, WIDTH).relu()
    with register_rule("ErfBackward", "self", Rule(role=Role.OTHER, reads=Reads.EXACT, codec="lossless")):
        found, saved = of_session(model, x, given)
    assert torch.equal(found, gradient(model, x, given))
    assert saved.codec == "lossless" and saved.packed_bytes < 0.8 * x.nbytes


def test_a_row_of_the_table_may_be_replaced():
    exact = Rule(role=Role.CONV_INPUT, reads=Reads.EXACT)
    find = partial(rule_for, "ConvolutionBackward", "input", "conv2d", kind="float")
    own = find()
    first = register_rule("ConvolutionBackward", "input", exact, replace=True)
    second = register_rule("ConvolutionBackward", "input", own, replace=True)
    assert find() == own
    second.remove()
    assert find() == exact
    second.remove()
    first.remove()
    assert find() is own


def test_one_that_is_not_the_last_may_be_taken_back():
    first = register_rule("MishBackward", "self", VALUES)
    second = register_rule("MishBackward", "self", VALUES, replace=True)
    first.remove()
    assert row("MishBackward", "self") == VALUES
    second.remove()
    assert rule_for("MishBackward", "self", "mish", kind="float") is OTHER


REFUSED = {
    "a function's name": (("softplus", "self", VALUES), "'softplus' is no autograd node of torch"),
    "a near name": (("SoftPlusBackward0", "self", VALUES), "which has SoftplusBackward"),
    "an attribute that is not there": (
        ("SoftplusBackward", "result", VALUES),
        "no tensor 'result'; it saves self",
    ),
    "one that is no tensor": (("SoftplusBackward", "beta", VALUES), "no tensor 'beta'"),
    "one that saves nothing": (("AddBackward", "self", VALUES), "it saves none"),
    "a row of the table": (("GeluBackward", "self", VALUES), "has a rule already.*replace=True"),
    "no codec": (
        ("MishBackward", "self", Rule(role=Role.OTHER, reads=Reads.EXACT, codec="zip")),
        "no codec 'zip'; there are keep",
    ),
    "a lossy codec": (
        ("MishBackward", "self", Rule(role=Role.OTHER, reads=Reads.EXACT, codec="bf16")),
        "codec 'bf16' is not exact",
    ),
    "a codec for values": (
        ("MishBackward", "self", Rule(role=Role.OTHER, reads=Reads.VALUES, codec="lossless")),
        "'lossless' is for Reads.EXACT, and this rule reads VALUES",
    ),
    "another operator's codec": (
        ("MishBackward", "self", Rule(role=Role.OTHER, reads=Reads.EXACT, codec="pool-index")),
        "only its own operators save",
    ),
    "another operator's role": (
        ("MishBackward", "self", Rule(role=Role.NORM_INPUT, reads=Reads.VALUES)),
        "role 'norm input' needs",
    ),
    "dense signs": (("MishBackward", "self", Rule(role=Role.OTHER, reads=Reads.SIGN, dense=True)), "dense"),
    "values without NaN": (
        ("MishBackward", "self", Rule(role=Role.OTHER, reads=Reads.VALUES, nan=False)),
        "nan=False is for Reads.SIGN",
    ),
    "a scale": (
        ("MishBackward", "self", Rule(role=Role.OTHER, reads=Reads.VALUES, scaled=True)),
        "found with each tensor",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_in_one_sentence(case):
    given, message = REFUSED[case]
    before = row(given[0], given[1])
    with pytest.raises(OptionError, match=message) as refused:
        register_rule(*given)
    assert str(refused.value).endswith(".") and "\n" not in str(refused.value)
    assert row(given[0], given[1]) is before


def test_a_rule_registered_twice_is_refused():
    with register_rule("MishBackward", "self", VALUES), pytest.raises(OptionError, match="already"):
        register_rule("MishBackward", "self", VALUES)
    register_rule("MishBackward", "self", VALUES).remove()


class Scattered(nn.Module):
    """The largest of the rows of each group, of a copy that nobody else holds."""

    def forward(self, x):
        index = (torch.arange(ROWS)[:, None] % 7).expand(ROWS, WIDTH)
        return torch.zeros(7, WIDTH).scatter_reduce(0, index, x * 1.0, "amax", include_self=False)


def test_a_rule_of_a_reduction_is_for_those_without_a_row():
    model, x = Scattered(), torch.randn(ROWS, WIDTH, requires_grad=True)

    def roles():
        session = squeezebox.attach(model, exact=True)
        try:
            model(x).sum().backward()
            return {each.key: each.role for each in session.report().record.tensors if "src" in each.key}
        finally:
            session.detach()

    with register_rule("ScatterReduceBackward0", "src", Rule(role=Role.ACTIVATION, reads=Reads.EXACT)):
        assert [*roles().values()] == [Role.ACTIVATION]
    assert Role.ACTIVATION not in roles().values()

"""squeezebox.compile: a compiled step saves less, and everything else is as torch.compile leaves it.

Compilation takes seconds, so few networks are compiled, each once a module.
"""

import copy
import dataclasses

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import squeezebox
from squeezebox.compiling._compile import (
    _bit_profile,
    _fewest_bits,
    _half_steps,
    _planned_bits,
)
from squeezebox.schema import Action, AttachError, Option, OptionError, PlanError, UnsupportedModelError
from squeezebox.steps import TrainingStep
from tests.compiling.conftest import needs_compiler


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.relu = nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()
        self.dropout, self.head = nn.Dropout(0.2), nn.Linear(16, 10)

    def forward(self, x):
        return self.head(self.dropout(self.relu(self.norm(self.conv(x)))).mean((2, 3)))


class Perceptron(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.expand, self.head = nn.LayerNorm(64), nn.Linear(64, 256), nn.Linear(256, 10)

    def forward(self, x):
        return self.head(F.gelu(self.expand(self.norm(x))))


def labels(x):
    return torch.arange(len(x)) % 10


def run(model, step, x):
    """(gradients, bytes that autograd holds and nobody else owns) of one training step."""
    torch.manual_seed(1)
    output = step(x)
    owned = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers(), x, output)}
    held = {
        t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in output.grad_fn.saved_tensors
    }
    F.cross_entropy(output, labels(x)).backward()
    return [p.grad for p in model.parameters()], sum(held[key] for key in held.keys() - owned)


def error(found, exact):
    energy = sum(float(b.square().sum()) for b in exact)
    return (sum(float((a - b).square().sum()) for a, b in zip(found, exact, strict=True)) / energy) ** 0.5


@pytest.fixture(scope="module")
def arms():
    """One network and batch; (model, step, gradients, held bytes) compiled plain and in 8 bits."""
    torch.manual_seed(0)
    model = Net().to(memory_format=torch.channels_last)
    x = torch.randn(16, 3, 16, 16).to(memory_format=torch.channels_last)
    found = {}
    for arm in ("plain", "packed", "plain again"):
        torch._dynamo.reset()
        own = copy.deepcopy(model)
        build = squeezebox.compile if arm == "packed" else torch.compile
        step = build(own, fullgraph=True)
        found[arm] = own, step, *run(own, step, x)
    return found


@pytest.mark.slow
@needs_compiler
def test_gradients_are_close_at_a_quarter_of_the_bytes(arms):
    _, _, exact, plain_bytes = arms["plain"]
    _, _, found, held_bytes = arms["packed"]
    assert 0.0 < error(found, exact) < 0.01
    assert 3.8 * held_bytes <= plain_bytes


@pytest.mark.slow
@needs_compiler
def test_the_report_names_the_copies_of_another_layout():
    torch._dynamo.reset()
    model = nn.Sequential(
        nn.Conv2d(8, 24, 3), nn.ReLU(), nn.Conv2d(24, 8, 3), nn.Flatten(), nn.Linear(1152, 10)
    )
    x = torch.randn(16, 8, 16, 16)
    step = squeezebox.compile(model, bits=8)
    _, held_bytes = run(model, step, x)
    report = step.report()
    assert report.copied_bytes == model[0].weight.nbytes + model[2].weight.nbytes + x.nbytes
    assert held_bytes == report.packed_bytes + report.copied_bytes
    assert "channels_last" in str(report)


@pytest.mark.slow
@needs_compiler
def test_the_report_says_what_autograd_holds(arms):
    report = arms["packed"][1].report()
    assert report.packed_bytes == arms["packed"][3]
    assert report.saved_bytes == arms["plain"][3]
    assert report.copied_bytes == 0 and "channels_last" not in str(report)
    assert report.packed_bytes == sum(tensor.packed_bytes for tensor in report.tensors)
    assert {8, 1} <= {tensor.bits for tensor in report.tensors}
    assert str(report).count("\n") > len(report.tensors)
    assert report.to_dict()["tensors"][0]["module"] == report.tensors[0].module


@pytest.mark.slow
@needs_compiler
def test_masks_and_buffers_are_those_of_plain_compilation(arms):
    plain, packed = arms["plain"], arms["packed"]
    buffers = dict(packed[0].named_buffers())
    for name, buffer in plain[0].named_buffers():
        torch.testing.assert_close(buffers[name], buffer)
    torch.testing.assert_close(packed[0].norm.bias.grad, plain[0].norm.bias.grad)  # masked gradients alone


@pytest.mark.slow
@needs_compiler
def test_nothing_is_left_patched(arms):
    assert arms["plain again"][3] == arms["plain"][3]
    assert error(arms["plain again"][2], arms["plain"][2]) == 0.0
    assert torch._inductor.config.custom_partitioner_fn is None
    assert torch._functorch.config.ban_recompute_materialized_backward
    assert torch._functorch.config.enable_autograd_cache


@pytest.mark.slow
@needs_compiler
def test_noise_and_plans_choose_the_bits_and_are_not_mistaken_for_each_other():
    """Both compile the same graph with the same cache."""
    torch.manual_seed(0)
    model, x = Perceptron(), torch.randn(256, 64)
    loss_of = F.cross_entropy
    loss_of(model(x), labels(x)).backward()
    exact = [p.grad for p in model.parameters()]
    model.zero_grad()
    before = copy.deepcopy(model.state_dict())
    sample = x, labels(x)

    noisy = squeezebox.compile(model, noise=2e-2, sample=sample, loss_fn=loss_of, fullgraph=True)
    assert all(p.grad is None for p in model.parameters())
    found, noisy_bytes = run(model, noisy, x)
    assert 1e-4 < error(found, exact) ** 2 <= 2e-2
    assert noisy.report().noise == pytest.approx(error(found, exact) ** 2, rel=1e-3)
    assert 4 in {tensor.bits for tensor in noisy.report().tensors}
    model.zero_grad()

    plan = squeezebox.plan(model, sample=sample, loss_fn=loss_of, exact=True)
    planned = squeezebox.compile(model, plan=plan, fullgraph=True)
    found, planned_bytes = run(model, planned, x)
    assert error(found, exact) < 1e-5
    assert {tensor.bits for tensor in planned.report().tensors} <= {None, 1}
    assert planned_bytes == planned.report().packed_bytes > noisy.report().packed_bytes == noisy_bytes
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.slow
@needs_compiler
def test_where_the_law_promises_too_little_noise_the_step_is_compiled_with_less():
    torch.manual_seed(0)
    model, x = Perceptron(), torch.randn(256, 64)
    example = TrainingStep(model=model, sample=(x, labels(x)), loss_fn=F.cross_entropy)
    first, _ = _fewest_bits(_bit_profile(example), 1e-2)
    assert 4 in first.by_key.values()  # and with it, the step has more noise than that
    step = squeezebox.compile(model, noise=1e-2, sample=example.sample, loss_fn=F.cross_entropy)
    assert 4 not in {tensor.bits for tensor in step.report().tensors}
    found, _ = run(model, step, x)
    model.zero_grad()
    exact = example.gradients(model)
    assert error(found, exact) ** 2 == pytest.approx(step.report().noise, rel=1e-3)
    assert step.report().noise < 1e-2


@pytest.mark.slow
@needs_compiler
def test_noise_is_measured_against_a_compiled_step_where_forward_is_random():
    """Compiled dropout draws other numbers than eager dropout, a difference that is no noise of packing."""
    torch.manual_seed(0)
    model, x = (
        nn.Sequential(nn.Linear(64, 256), nn.Dropout(0.5), nn.GELU(), nn.Linear(256, 10)),
        torch.randn(256, 64),
    )
    step = squeezebox.compile(model, noise=1e-2, sample=(x, labels(x)), loss_fn=F.cross_entropy)
    assert 0.0 < step.report().noise <= 1e-2
    assert {tensor.bits for tensor in step.report().tensors} & {4, 8}


def test_a_plan_gives_the_fewest_bits_within_each_bound():
    torch.manual_seed(0)
    model, x = Perceptron(), torch.randn(256, 64)
    made = squeezebox.plan(model, sample=(x, labels(x)), loss_fn=F.cross_entropy, noise=1e-2)
    tensors = {tensor.key: tensor for tensor in made.tensors}
    known = _half_steps(model, made, (x,), {}).by_key
    key = "head:Addmm.mat1"
    expected = {0.9 * known[key][8]: None, known[key][8]: 8, 1.1 * known[key][4]: 4, 2 * known[key][2]: 2}
    for bound, bits in expected.items():
        option = Option(action=Action.COMPRESS, codec="entropy", bound=bound, held_bytes=1)
        tensors[key] = dataclasses.replace(tensors[key], option=option)
        plan = dataclasses.replace(made, tensors=tuple(tensors.values()))
        assert _planned_bits(plan, _half_steps(model, plan, (x,), {})).by_key[key] == bits
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bits": 3}, "bits is 3.*8, 4, 2"),
        ({"noise": -1.0, "sample": (1, 1), "loss_fn": print}, "noise is -1.0.*positive"),
        ({"noise": 1e-2}, "goes with"),
        ({"sample": (1, 1)}, "goes with"),
        ({"bits": 8, "noise": 1e-2}, "noise and bits exclude"),
    ],
)
def test_options_out_of_range(options, message):
    with pytest.raises(OptionError, match=message):
        squeezebox.compile(Net(), **options)


def test_a_plan_for_another_model_is_refused():
    torch.manual_seed(0)
    x = torch.randn(32, 64)
    plan = squeezebox.plan(Perceptron(), sample=(x, labels(x)), loss_fn=F.cross_entropy)
    with pytest.raises(PlanError, match="this Net has no module 'expand'.*another model"):
        squeezebox.compile(Net(), plan=plan)


def test_a_compiled_model_is_refused():
    with pytest.raises(UnsupportedModelError, match="compiled by torch.compile already.*Pass the eager"):
        squeezebox.compile(torch.compile(Net()))
    with pytest.raises(UnsupportedModelError, match="compiled by torch.compile"):
        squeezebox.attach(torch.compile(Net()))


def test_an_attached_model_is_refused():
    model = Net()
    step = squeezebox.compile(model)
    session = squeezebox.attach(model)
    with pytest.raises(AttachError, match="hooks cannot be compiled.*detach"):
        squeezebox.compile(model)
    with pytest.raises(AttachError, match="hooks cannot be compiled.*detach"):
        step(torch.randn(2, 3, 8, 8))
    session.detach()


def test_there_is_no_report_before_the_first_call():
    with pytest.raises(AttachError, match="nothing to report"):
        squeezebox.compile(Net()).report()

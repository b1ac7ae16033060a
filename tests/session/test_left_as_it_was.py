"""Making a plan leaves every gradient as it was, and says what is wrong with a sample or a loss."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import squeezebox
from squeezebox.schema import OptionError, PlanError
from tests.planning.test_max_batch import batch, network


class Weighted(nn.Module):
    """A loss with a parameter, and a buffer that it changes."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, output, target):
        self.seen += 1
        return self.scale * F.cross_entropy(output, target)


@pytest.mark.parametrize("graded", (True, False))
@pytest.mark.parametrize("wrapped", (True, False))
def test_gradients_outside_the_model(graded, wrapped):
    model, loss, (x, y) = network(), Weighted(), batch(8)
    x.requires_grad_()
    if graded:
        loss(model(x), y).backward()
    before = {id(t): None if t.grad is None else (t.grad, t.grad.clone()) for t in (x, loss.scale)}
    squeezebox.plan(
        model, sample=(x, y), loss_fn=(lambda out, target: loss(out, target)) if wrapped else loss
    )
    for tensor in (x, loss.scale):
        held = before[id(tensor)]
        assert tensor.grad is (held[0] if held else None)
        assert held is None or torch.equal(*held)
    assert wrapped or float(loss.seen) == float(graded)


def test_a_sample_that_another_network_made_keeps_its_graph():
    first, model, (x, y) = nn.Conv2d(3, 3, 1), network(), batch(8)
    made = first(x)
    squeezebox.plan(model, sample=(made, y), loss_fn=F.cross_entropy)
    assert first.weight.grad is None
    F.cross_entropy(model(made), y).backward()
    assert first.weight.grad is not None


@pytest.mark.parametrize(
    ("loss_fn", "message"),
    [
        (lambda out, _: out.argmax(1).float().sum(), "does not depend on any parameter"),
        (lambda out, _: out.detach().sum(), "does not depend on any parameter"),
        (lambda out, _: out.sum(1), r"a tensor float32\[8\]"),
        (lambda out, _: 3.0, "returned a float"),
        (lambda out, _: None, "returned a NoneType"),
    ],
)
def test_losses_that_backward_cannot_start_from(loss_fn, message):
    model = network()
    with pytest.raises(OptionError, match=message):
        squeezebox.plan(model, sample=batch(8), loss_fn=loss_fn)
    squeezebox.attach(model).detach()


@pytest.mark.parametrize(
    ("sample", "message"),
    [
        (
            (torch.zeros(8, 4, 16, 16), torch.zeros(8).long()),
            r"inputs float32\[8, 4, 16, 16\] and target int64\[8\]",
        ),
        ((torch.zeros(8, 3, 16, 16), torch.zeros(7).long()), r"target int64\[7\]: ValueError"),
        (((torch.zeros(8, 3, 16, 16),) * 2, None), r"TypeError"),
        (("words", None), r"inputs no tensor \(str\)"),
        (torch.zeros(8, 3, 16, 16), "is known by sample"),
        ((1, 2, 3), "is known by sample"),
    ],
)
def test_samples_that_do_not_match(sample, message):
    model = network()
    with pytest.raises(OptionError, match=message):
        squeezebox.plan(model, sample=sample, loss_fn=F.cross_entropy)
    squeezebox.attach(model).detach()


def test_measuring_noise_leaves_the_optimizer_s_other_gradients():
    model, head, (x, y) = network(), nn.Linear(10, 10), batch(8)
    optimizer = torch.optim.SGD([*model.parameters(), *head.parameters()], lr=0.1)
    session = squeezebox.attach(model, optimizer=optimizer, noise=1e-2)

    def step():
        F.cross_entropy(head(model(x)), y).backward()

    session.measure_noise(step)
    assert head.weight.grad is None
    step()
    before, values = head.weight.grad, head.weight.grad.clone()
    assert session.measure_noise(step) > 0.0
    assert head.weight.grad is before and torch.equal(before, values)
    session.detach()


def test_a_refused_plan_leaves_the_optimizer_to_itself():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 8))
    model[0].requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    sample = torch.randn(64, 256), torch.randint(8, (64,))
    options = {"noise": 1e-2, "weight_noise": 0.02, "update_noise": 0.02, "offload": False}
    plan = squeezebox.plan(
        model, optimizer=optimizer, states=True, sample=sample, loss_fn=F.cross_entropy, **options
    )
    assert plan.weights is not None and plan.weights.packed
    model[0].requires_grad_(True)
    with pytest.raises(PlanError, match="frozen"):
        squeezebox.attach(model, optimizer=optimizer, plan=plan)
    assert not optimizer._optimizer_step_pre_hooks and not optimizer._optimizer_step_post_hooks
    F.cross_entropy(model(sample[0]), sample[1]).backward()
    assert type(model[2].weight.grad) is torch.Tensor
    model[0].requires_grad_(False)
    squeezebox.attach(model, optimizer=optimizer, plan=plan).detach()

"""Transforms, threads, hooks and autocast around an attached model: left alone, or refused by name."""

import threading
import warnings

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.autograd.graph import disable_saved_tensors_hooks, save_on_cpu
from torch.func import functional_call, grad, jvp, vmap
from torch.nn import functional as F

import squeezebox


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 4))


def sample():
    torch.manual_seed(1)
    return torch.randn(32, 64), torch.randint(4, (32,))


def weighted(model):
    parameters = {name: value.detach() for name, value in model.named_parameters()}
    return lambda values, x: functional_call(model, values, (x,)).square().sum(), parameters


def by_grad(model, x):
    loss, parameters = weighted(model)
    return list(grad(loss)(parameters, x).values())


def by_vmap_grad(model, x):
    loss, parameters = weighted(model)
    return list(vmap(grad(loss), (None, 0))(parameters, x).values())


def by_vmap(model, x):
    out = vmap(model)(x)
    return [out, *torch.autograd.grad(out.sum(), list(model.parameters()))]


def by_jvp(model, x):
    return list(jvp(model, (x,), (torch.ones_like(x),)))


def by_dual(model, x):
    with forward_ad.dual_level():
        return list(forward_ad.unpack_dual(model(forward_ad.make_dual(x, torch.ones_like(x)))))


def without_hooks(model, x):
    with disable_saved_tensors_hooks("none here"):
        return list(torch.autograd.grad(model(x).sum(), list(model.parameters())))


TRANSFORMS = {
    "torch.func": [by_grad, by_vmap_grad, by_vmap, by_jvp],
    "forward-mode AD": [by_dual],
    "disabled": [without_hooks],
}
CASES = [(why, transform) for why, transforms in TRANSFORMS.items() for transform in transforms]


@pytest.mark.filterwarnings("ignore:squeezebox captured nothing")
@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # torch's own, in jvp
@pytest.mark.parametrize("options", [{"exact": True}, {"noise": 1e-2}], ids=str)
@pytest.mark.parametrize(("why", "transform"), CASES)
def test_transforms_of_an_attached_model_are_left_alone(why, transform, options):
    model, (x, _) = network(), sample()
    expected = transform(model, x)
    session = squeezebox.attach(model, **options)
    torch.testing.assert_close(transform(model, x), expected, rtol=0, atol=0)
    with pytest.raises(squeezebox.AttachError, match=f"left alone.*{why}"):
        session.report()
    model(x).sum().backward()
    assert session.report().saved_bytes > 0
    assert any(why in note for note in session.report().record.notes)
    session.detach()


class Inside(nn.Module):
    def __init__(self, transform):
        super().__init__()
        self.body, self.transform = network(), transform

    def forward(self, x):
        return self.body(x) + self.transform(x).mean()


def test_vmap_within_a_model():
    model, (x, _) = Inside(vmap(lambda row: (row * row).exp().sum())), sample()
    x.requires_grad_()
    model(x).sum().backward()
    expected = [x.grad, *(parameter.grad for parameter in model.parameters())]
    x.grad = None
    model.zero_grad()
    session = squeezebox.attach(model, exact=True)
    model(x).sum().backward()
    found = [x.grad, *(parameter.grad for parameter in model.parameters())]
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    session.detach()


def test_gradients_by_torch_func_within_a_model_are_refused_by_name():
    model, (x, _) = Inside(grad(lambda x: x.square().sum())), sample()
    session = squeezebox.attach(model, exact=True)
    with pytest.raises(squeezebox.UnsupportedModelError, match=r"torch\.func"):
        model(x)
    session.detach()
    model(x)


def in_thread(do):
    found = []

    def run():
        try:
            found.append(do())
        except squeezebox.SqueezeboxError as error:
            found.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return found[0]


def test_a_forward_on_another_thread_is_refused_while_one_waits_for_its_backward():
    model, (x, _) = network(), sample()
    session = squeezebox.attach(model, exact=True)
    loss = model(x).sum()
    error = in_thread(lambda: model(x))
    assert isinstance(error, squeezebox.UnsupportedModelError)
    assert "thread" in str(error)
    with torch.no_grad():
        expected = model(x)

    def evaluate():
        with torch.no_grad():
            return model(x)

    assert torch.equal(in_thread(evaluate), expected)
    loss.backward()
    step = in_thread(lambda: model(x).sum().backward())  # one after the other is fine
    assert step is None
    model(x).sum().backward()
    session.detach()


class Meeting(nn.Module):
    """Its forwards begin on two threads at once."""

    def __init__(self):
        super().__init__()
        self.body, self.entered = network(), threading.Event()
        self.leave = threading.Event()

    def forward(self, x):
        self.entered.set()
        self.leave.wait(30)
        return self.body(x)


def test_two_forwards_at_once_are_refused_and_the_first_goes_on():
    model, (x, _) = Meeting(), sample()
    session = squeezebox.attach(model, exact=True)
    found = []
    thread = threading.Thread(target=lambda: found.append(model(x).sum().backward()))
    thread.start()
    model.entered.wait(30)
    with pytest.raises(squeezebox.UnsupportedModelError, match="thread"):
        model(x)
    model.leave.set()
    thread.join()
    assert found == [None]
    assert session.report().saved_bytes > 0
    session.detach()


def test_a_part_of_an_attached_model_is_refused_and_so_is_a_whole_with_an_attached_part():
    model = network()
    for first, second in ((model, model[0]), (model[0], model)):
        session = squeezebox.attach(first, exact=True)
        with pytest.raises(squeezebox.AttachError, match="Linear is part of Sequential"):
            squeezebox.attach(second, exact=True)
        session.detach()


class Hidden(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = network()

    def forward(self, x):
        with save_on_cpu():
            return self.body(x)


@pytest.mark.parametrize("options", [{"exact": True}, {"noise": 1e-2}], ids=str)
def test_hooks_within_that_take_everything_are_warned_of_once(options):
    model, (x, _) = Hidden(), sample()
    session = squeezebox.attach(model, **options)
    with pytest.warns(squeezebox.CaptureWarning, match="hooks that the model enters"):
        model(x).sum().backward()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(x).sum().backward()
    with pytest.raises(squeezebox.AttachError, match="taken by other hooks"):
        session.report()
    session.detach()


def planned(model, **options):
    return squeezebox.plan(model, sample=sample(), loss_fn=F.cross_entropy, exact=True, **options)


def test_a_plan_under_autocast_is_refused_by_name():
    model, (x, _) = network(), sample()
    session = squeezebox.attach(model, plan=planned(model))
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(squeezebox.PlanError, match="autocast"):
        model(x)
    F.cross_entropy(model(x), sample()[1]).backward()
    session.detach()


def test_a_plan_made_under_autocast_names_it_where_it_is_off():
    model, (x, _) = network(), sample()
    with torch.autocast("cpu", torch.bfloat16):
        plan = planned(model)
    session = squeezebox.attach(model, plan=plan)
    with pytest.raises(squeezebox.PlanError, match="within torch.autocast, which is off now"):
        model(x)
    session.detach()


def test_a_second_forward_before_a_plan_s_backward_is_refused_by_name():
    model, (x, y) = network(), sample()
    session = squeezebox.attach(model, plan=planned(model))
    with pytest.raises(squeezebox.PlanError, match="forward 2"):
        (F.cross_entropy(model(x), y) + F.cross_entropy(model(x), y)).backward()
    F.cross_entropy(model(x), y).backward()
    session.detach()


def test_parameters_that_were_computed_are_no_cause_for_warnings():
    """As meta-learning takes its inner steps."""
    model, (x, _) = network(), sample()
    leaves = [parameter for parameter in model.parameters()]
    session = squeezebox.attach(model, noise=1e-2, optimizer=torch.optim.SGD(leaves, lr=0.1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            inner = torch.autograd.grad(model(x).square().mean(), list(model.parameters()), create_graph=True)
            for module, name, value in list(named(model)):
                module._parameters[name] = value - 0.1 * inner[0].sum()
            model(x).square().mean().backward()
            for (module, name, _), leaf in zip(named(model), leaves, strict=True):
                module._parameters[name] = leaf
    session.report()
    session.detach()


def named(model):
    return [(m, name, value) for m in model.modules() for name, value in m._parameters.items()]


@pytest.mark.filterwarnings("ignore:.*torch.jit")  # deprecated
def test_a_model_that_torch_jit_has_compiled_is_refused():
    for made in (torch.jit.script(nn.Linear(4, 4)), torch.jit.trace(nn.Linear(4, 4), torch.ones(1, 4))):
        with pytest.raises(squeezebox.UnsupportedModelError, match="compiled by torch.jit"):
            squeezebox.attach(made, exact=True)


class Named(nn.Module):
    def forward(self, module):
        return module.exp()


def test_an_input_may_have_any_name():
    model, x = Named(), torch.randn(64, 64, requires_grad=True)
    session = squeezebox.attach(model, exact=True)
    model(module=x).sum().backward()
    assert session.report().saved_bytes == x.nbytes
    session.detach()


def test_torch_s_profiler_is_free_once_the_optimizer_has_stepped():
    model, (x, y) = network(), sample()
    optimizer = torch.optim.AdamW(model.parameters())
    session = squeezebox.attach(model, optimizer=optimizer, exact=True)

    def step():
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()

    step()
    with torch.profiler.profile() as profiler:
        step()
    assert profiler.key_averages()
    peak = session.report().peak_bytes
    held = sum(each.nbytes for each in model.parameters())
    assert peak > 4 * held  # weights, gradients and two averages
    session.detach()
    assert not optimizer._optimizer_step_post_hooks


def test_steps_on_threads_in_turn_are_measured_where_they_can_be():
    model, (x, _) = network(), sample()
    session = squeezebox.attach(model, exact=True)

    def step(rows):
        model(x.repeat(rows, *[1] * (x.dim() - 1))).sum().backward()

    step(1)
    assert in_thread(lambda: step(1)) is None
    step(2)
    step(4)
    assert session.report().record.peak_step == 3
    session.detach()

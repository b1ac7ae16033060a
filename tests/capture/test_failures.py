"""An exception anywhere leaves the model and autograd as they were."""

import contextlib
import copy
import gc
import weakref

import pytest
import torch
from torch import nn

import squeezebox
from squeezebox import codecs
from squeezebox.schema import PlanError
from tests.capture.conftest import assert_nothing_left
from tests.capture.nets import assert_equal, images, loss_of, plain_step, resnet, train


class Interrupting(nn.Module):
    """Raises what it was told, once, in forward or in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.error: BaseException | None = None
        self.in_backward = False

    def forward(self, x):
        if self.error is not None and self.in_backward:
            x.register_hook(lambda gradient: self.throw())
        elif self.error is not None:
            self.throw()
        return x * 1

    def throw(self):
        error, self.error = self.error, None
        raise error


def interrupted_net():
    net = resnet()
    net.insert(5, Interrupting())
    return net


def failing_steps(session, model, x, error):
    """Ways to fail: in a submodule, within step(), in the loss, in backward."""
    inner = model[5]

    def in_forward():
        inner.error, inner.in_backward = error, False
        plain_step(model, x)

    def in_step():
        inner.error, inner.in_backward = error, False
        with session.step():
            plain_step(model, x)

    def in_loss():
        with session.step():
            loss_of(model(x))
            raise error

    def in_backward():
        inner.error, inner.in_backward = error, True
        plain_step(model, x)

    return {"forward": in_forward, "step()": in_step, "loss": in_loss, "backward": in_backward}


def untouched(model):
    return all(
        not (m._forward_hooks or m._forward_pre_hooks or m._backward_hooks or m._forward_hooks_always_called)
        and "forward" not in m.__dict__
        for m in model.modules()
    )


@pytest.mark.parametrize("options", [{"noise": 1e-2}, {"exact": True}], ids=str)
@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("where", ["forward", "step()", "loss", "backward"])
def test_a_failure_leaves_nothing(where, kind, options):
    model, x = interrupted_net(), images()
    session = squeezebox.attach(model, **options)
    with pytest.raises(kind):
        failing_steps(session, model, x, kind("no"))[where]()
    assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None
    model.zero_grad()
    plain_step(model, x)  # the session goes on
    assert session.report().packed_bytes > 0
    session.detach()
    assert_nothing_left()
    assert untouched(model)


@pytest.mark.parametrize("where", ["forward", "step()", "loss", "backward"])
def test_training_goes_on_as_plain_after_a_failure(where):
    model = interrupted_net()
    session = squeezebox.attach(model, exact=True)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(KeyboardInterrupt):
        failing_steps(session, model, images(), KeyboardInterrupt())[where]()
    model.load_state_dict(before)
    model.zero_grad()
    session.detach()
    assert_equal(train(model, images, exact=True), train(model, images))


def test_a_broken_off_backward_sets_no_bounds():
    model, x = interrupted_net(), images()
    session = squeezebox.attach(model, noise=1e-2)
    plain_step(model, x)
    before = session.state_dict()["controller"]
    with pytest.raises(KeyError):
        failing_steps(session, model, x, KeyError("no"))["backward"]()
    assert session.state_dict()["controller"] == before
    plain_step(model, x)
    assert session.state_dict()["controller"] != before


def test_an_exception_that_the_model_handles_is_its_own_affair():
    class Handling(nn.Module):
        def __init__(self):
            super().__init__()
            self.net, self.breaks = resnet(), Interrupting()

        def forward(self, x):
            self.breaks.error, self.breaks.in_backward = ValueError("no"), False
            try:
                x = self.breaks(x)
            except ValueError:
                x = x + 1
            return self.net(x)

    model = Handling()
    assert_equal(train(model, images, exact=True), train(model, images))


def test_detach_between_forward_and_backward():
    model, x = resnet(), images()
    plain_step(model, x)
    expected = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    session = squeezebox.attach(model, exact=True)
    loss = loss_of(model(x))
    session.detach()
    assert untouched(model)
    loss.backward()
    torch.testing.assert_close([p.grad for p in model.parameters()], expected, rtol=0, atol=0)


def test_detach_gives_back_a_forward_that_was_replaced_before():
    model = resnet()
    model.forward = replaced = lambda x: type(model).forward(model, x) * 2
    session = squeezebox.attach(model, exact=True)
    plain_step(model, images())
    assert session.report().saved_bytes > 0
    session.detach()
    assert model.forward is replaced


def test_detach_leaves_a_forward_that_was_replaced_after():
    model, x = resnet().eval(), images()
    expected = model(x)
    session = squeezebox.attach(model, exact=True)
    squeezed = model.forward
    model.forward = replaced = lambda x: squeezed(x)
    session.detach()
    assert model.forward is replaced
    assert torch.equal(model(x), expected)


def test_hooks_of_others_stay():
    model = resnet()
    called = []
    model.register_forward_hook(lambda *args: called.append("model"))
    model[0].register_forward_pre_hook(lambda *args: called.append("conv"))
    session = squeezebox.attach(model, exact=True)
    session.detach()
    model(images())
    assert called == ["conv", "model"]


@contextlib.contextmanager
def interrupting(name):
    """A codec's method raises as Ctrl-C does."""

    def stop(*args, **kwargs):
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(codecs.get("entropy")), name, stop)
        with pytest.raises(KeyboardInterrupt):
            yield


def test_a_backward_after_an_interrupted_one_reads_what_was_saved():
    torch.manual_seed(0)
    net, x = nn.Sequential(nn.Linear(64, 64), nn.Sigmoid()), torch.randn(64, 64)
    session = squeezebox.attach(net, noise=1e-6)
    loss = net(x).sum()
    with interrupting("unpack"):
        loss.backward(retain_graph=True)
    net.zero_grad()
    loss.backward()
    session.detach()
    wanted = torch.autograd.grad(net(x).sum(), net[0].weight)[0]
    assert (net[0].weight.grad - wanted).norm() < 0.01 * wanted.norm()


def test_an_interrupted_forward_keeps_nothing():
    net, x = nn.Sequential(nn.Linear(64, 64), nn.Sigmoid(), nn.Linear(64, 8)), torch.randn(64, 64)
    outputs = []
    net[0].register_forward_hook(lambda module, inputs, output: outputs.append(weakref.ref(output)))
    session = squeezebox.attach(net, noise=1e-3)
    with interrupting("pack"):
        net(x)
    gc.collect()
    assert outputs[0]() is None and not session.engine.store.in_use
    session.detach()


def test_a_refused_batch_is_no_earlier_forward_of_the_next():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 8))
    x, y, loss_fn = torch.randn(512, 64), torch.randint(8, (512,)), nn.functional.cross_entropy
    plan = squeezebox.plan(net, sample=(x, y), loss_fn=loss_fn, noise=1e-2)
    session = squeezebox.attach(net, plan=plan)
    with pytest.raises(PlanError), session.step():
        loss_fn(net(x), nn.functional.one_hot(y, 8).float())
    with session.step():
        loss = loss_fn(net(x), y)
    loss.backward()
    session.detach()

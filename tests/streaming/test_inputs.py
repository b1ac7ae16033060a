"""Images and targets of other kinds, and models that have changed, are taken or refused with a reason."""

import dataclasses

import numpy as np
import pytest
import torch
from torch import nn

from squeezebox.schema import OptionError, UnsupportedModelError
from squeezebox.streaming import StreamedStep, _held, _step


def squares(output, target):
    return (output * target[0]).square().mean() * target[1]


def squared(output, target):
    return output.square().mean()


def conv():
    torch.manual_seed(0)
    return nn.Conv2d(3, 2, 3, padding=1).double()


def test_graphs_of_image_and_target_are_left_alone():
    image, weights = (torch.randn(1, *shape, dtype=torch.float64) for shape in ((3, 30, 12), (2, 30, 12)))
    given = [image.requires_grad_(), weights.requires_grad_() * 2, torch.tensor(3.0, requires_grad=True)]
    model, other = conv(), conv()
    StreamedStep(model, squares, height=7)(given[0], given[1:])
    assert image.grad is None and weights.grad is None and given[2].grad is None
    squares(other(image), given[1:]).backward()
    torch.testing.assert_close(model.weight.grad, other.weight.grad, rtol=1e-12, atol=0)


def test_a_model_converted_since_is_traced_again():
    model, image = conv().float(), torch.randint(0, 256, (1, 3, 30, 12), dtype=torch.uint8)
    step = StreamedStep(model, lambda output, _: output.square().mean(), height=7)
    single = step(image, None)
    model.double().zero_grad()
    loss = step(image, None)
    assert (single.dtype, loss.dtype, model.weight.grad.dtype) == (torch.float32, *[torch.float64] * 2)
    torch.testing.assert_close(loss, model(image.double() / 255).square().mean().detach(), rtol=1e-12, atol=0)


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.scale, self.calls = conv(), 1.0, 0

    def forward(self, x):
        self.calls += 1
        return self.scale * self.conv(x)


@dataclasses.dataclass
class Power:
    """A loss without a hash."""

    exponent: float = 2.0

    def __call__(self, output, target):
        return output.abs().pow(self.exponent).mean()


def test_numbers_that_change_between_steps_are_taken_and_counters_are_not():
    model, loss_fn, factor = Scaled(), Power(), 1.0
    image, losses = torch.randn(1, 3, 30, 12, dtype=torch.float64), []
    step = StreamedStep(model, lambda output, target: factor * loss_fn(output, target), height=7)
    direct = StreamedStep(model, loss_fn, height=7)
    for change in range(4):
        if change == 1:
            model.scale = 3.0
        elif change == 2:
            factor = 0.5
        else:
            loss_fn.exponent += 1
        for _ in range(2):
            losses.append(float(step(image, None)))
        wanted = loss_fn(model(image).detach(), None)
        assert losses[-2] == losses[-1] == pytest.approx(float(factor * wanted), rel=1e-12)
        assert float(direct(image, None)) == pytest.approx(float(wanted), rel=1e-12)


def test_what_changes_in_every_step_is_said(monkeypatch):
    traced = []
    monkeypatch.setattr(_step, "trace", lambda *given, real=_step.trace: traced.append(1) or real(*given))
    model, image = Scaled(), torch.randn(1, 3, 12, 6, dtype=torch.float64)
    step = StreamedStep(model, lambda output, _: output.mean(), height=7)
    for number in range(3 * 4):
        model.scale = float(number % 3)
        step(image, None)
    assert len(traced) == 3 * 2  # each once more, as calls are counted
    with pytest.warns(UserWarning, match=r"traced 9 times, as 0: Scaled.scale changed"):
        for number in range(3, 10):
            model.scale = float(number)
            step(image, None)
    assert len(step._plans) <= 8


def test_arrays_of_the_other_order_of_bytes():
    image = torch.randn(1, 3, 30, 12, dtype=torch.float64)
    step = StreamedStep(conv(), lambda output, scale: output.mean() * scale, height=7)
    target = np.float64(0.5)
    assert step(image.numpy().astype(">f8"), target.astype(">f8")) == step(image, target)


@pytest.mark.parametrize(
    ("image", "why"),
    [([[1.0]], "list of shape"), (torch.zeros(4, 4), "shape .4, 4."), (torch.zeros(0, 3, 4, 4), "zero")],
)
def test_what_is_no_image_is_refused(image, why):
    with pytest.raises(OptionError, match=why):
        StreamedStep(conv(), nn.MSELoss(), height=4)(image, None)


def test_modes_of_torch_that_change_the_gradients_are_refused():
    step, image = StreamedStep(conv(), nn.MSELoss(), height=4), torch.zeros(1, 3, 8, 8)
    with torch.inference_mode(), pytest.raises(OptionError, match="inference_mode"):
        step(image, None)


def test_an_image_of_inference_mode_is_taken():
    with torch.inference_mode():
        image = torch.randn(1, 3, 12, 6, dtype=torch.float64)
    model = conv()
    StreamedStep(model, lambda output, _: output.square().mean(), height=5)(image, None)
    assert model.weight.grad is not None


def test_an_image_and_a_target_that_are_written_into_stay_as_they_were():
    torch.manual_seed(0)
    model = nn.Sequential(nn.ReLU(inplace=True), nn.Conv2d(3, 2, 3, padding=1)).double()
    image, target = torch.randn(1, 3, 24, 8).double(), torch.randn(1, 2, 24, 8).double()

    def loss_fn(output, target):
        return nn.functional.mse_loss(output, target.clamp_(0, 1))

    given = image.clone(), target.clone()
    step = StreamedStep(model, loss_fn, height=8)
    loss = step(image, target)
    assert torch.equal(image, given[0]) and torch.equal(target, given[1])
    torch.testing.assert_close(loss, loss_fn(model(image.clone()), target.clone()).detach())
    torch.testing.assert_close(step.predict(image), model(image.clone()).detach())


class Cooling(nn.Module):
    """Changes a number, or a tensor that is no buffer, by which it computes."""

    def __init__(self, name):
        super().__init__()
        self.conv, self.name = conv(), name
        self.tau, self.mean = 0.8, torch.zeros(1, dtype=torch.float64)

    def forward(self, x):
        y = self.conv(x)
        if self.name == "tau":
            self.tau = max(0.5 * self.tau, 0.1)
        else:
            self.mean = 0.5 * self.mean + y.detach().mean()
        return y / self.tau - self.mean


class Warming(nn.Module):
    """A loss whose weight grows by its calls."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, output, target):
        self.calls += 1
        return output.square().mean() * min(self.calls / 10, 1.0)


class Plain:
    calls, __call__ = 0, Warming.forward


@pytest.mark.parametrize(
    ("model", "loss_fn", "name"),
    [
        (Cooling("tau"), squared, "0: Cooling.tau"),
        (Cooling("mean"), squared, "0: Cooling.mean"),
        (conv(), Warming(), "1: Warming.calls"),
        (conv(), Plain(), "0: Plain.calls"),
    ],
)
def test_what_a_forward_changes_and_computes_by_is_refused(model, loss_fn, name):
    before = dict(vars(model))
    with pytest.raises(UnsupportedModelError, match=f"itself changes {name}, .* Make it a buffer"):
        StreamedStep(model, loss_fn, height=7)(torch.randn(1, 3, 30, 12, dtype=torch.float64), None)
    assert vars(model) == before


def test_metrics_of_the_same_code_are_traced_once_and_few_graphs_are_kept(monkeypatch):
    traced = []
    monkeypatch.setattr(_step, "trace", lambda *given, real=_step.trace: traced.append(1) or real(*given))
    image, model = torch.randn(1, 3, 12, 6, dtype=torch.float64), conv()
    step = StreamedStep(model, squared, height=7)

    def metric(power, function):
        return lambda output, target, scale=2.0: function(output).pow(power).mean() * scale

    for power, function in [(1, torch.sin), (1, torch.sin), (2, torch.sin), (2, torch.cos), (1, torch.sin)]:
        (found,) = step.evaluate([(image, None)], metric(power, function))
        wanted = 2 * function(model(image).detach()).pow(power).mean()
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=0)
    assert len(traced) == 3
    monkeypatch.setattr(_held, "_MOST_GRAPHS", 2)
    for count, height in [(4, 9), (5, 10), (5, 9), (6, 11), (6, 9), (7, 10)]:
        step(image[:, :, :height], None)
        assert len(traced) == count
    assert len(step._plans) <= 2


def test_a_default_device_changes_nothing():
    torch.manual_seed(0)
    image, losses = torch.randn(1, 3, 12, 6), []
    layers = nn.Upsample(scale_factor=1.5, mode="bilinear"), nn.Upsample(size=(20, 9)), conv().float()
    for device in ("cpu", "meta"):
        with torch.device(device):
            losses.append(StreamedStep(nn.Sequential(*layers), squared, height=5)(image, None))
    assert torch.equal(*losses)

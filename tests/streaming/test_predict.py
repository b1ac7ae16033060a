"""Predictions, metrics and the image's gradient in strips are the whole image's."""

import copy
import os

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from squeezebox.schema import OptionError, UnsupportedModelError
from squeezebox.streaming import StreamedStep

TOLERANCE = 1e-12
IMAGE, TARGET = torch.rand(1, 3, 48, 20, dtype=torch.float64), torch.randint(2, (1, 48, 20))


def maps():
    layers = nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2)
    after = nn.Conv2d(4, 6, 3, padding=1), nn.GroupNorm(2, 6), nn.Upsample(scale_factor=2), nn.Conv2d(6, 2, 1)
    return nn.Sequential(*layers, *after).double()


class Several(nn.Module):
    """Maps, one of them merged with another axis, logits of the whole image, and a plain number."""

    def __init__(self):
        super().__init__()
        self.maps, self.head = maps(), nn.Linear(2, 5).double()

    def forward(self, x):
        y = self.maps(x)
        flat = y.permute(0, 2, 3, 1).reshape(-1, 2)
        return {
            "maps": y,
            "again": y,
            "flat": flat,
            "logits": self.head(y.mean((2, 3))),
            "classes": 5,
            "image": x,
        }


def close(found, wanted):
    torch.testing.assert_close(found, wanted, rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize("is_training", [False, True])
@pytest.mark.parametrize("options", [{"height": 7}, {"memory": "64KiB"}])
def test_a_prediction_is_the_models_output(options, is_training):
    model = Several().train(is_training)
    streamed = copy.deepcopy(model)
    with torch.no_grad():
        wanted = model(IMAGE)
    found = StreamedStep(streamed, functional.mse_loss, **options).predict(IMAGE)
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        if isinstance(value, torch.Tensor):
            close(found[name], value)
        else:
            assert found[name] == value
    for mine, theirs in zip(streamed.buffers(), model.buffers(), strict=True):
        close(mine, theirs)
    assert all(parameter.grad is None for parameter in streamed.parameters())


def test_a_prediction_goes_to_a_mapped_file(tmp_path):
    model = maps().eval()
    out = np.memmap(tmp_path / "out", np.float64, "w+", shape=(48, 20, 2)).transpose(2, 0, 1)[None]
    with torch.inference_mode():
        assert StreamedStep(model, functional.cross_entropy, height=7).predict(IMAGE, out) is out
    close(torch.from_numpy(np.array(out)), model(IMAGE).detach())


def test_a_metric_is_that_of_whole_images():
    def metric(output, target):
        found = output.argmax(1)
        return {"hits": [((found == k) & (target == k)).sum() for k in range(2)], "pixels": target.numel()}

    model, other = maps().eval(), 2 * IMAGE
    step = StreamedStep(model, functional.cross_entropy, height=7)
    found = step.evaluate([(IMAGE, TARGET), (other, TARGET)], metric)
    assert found == [metric(model(IMAGE), TARGET), metric(model(other), TARGET)]
    close(step.evaluate([(IMAGE, TARGET)])[0], functional.cross_entropy(model(IMAGE), TARGET).detach())


@pytest.mark.parametrize("options", [{}, {"recompute": True}, {"spool": True}])
@pytest.mark.parametrize("is_frozen", [False, True])
def test_the_gradient_by_the_image_is_added(options, is_frozen):
    model = maps().requires_grad_(not is_frozen)
    streamed, image = copy.deepcopy(model), IMAGE.clone().requires_grad_()
    loss = functional.cross_entropy(model(image), TARGET)
    loss.backward()
    found = torch.ones_like(IMAGE)
    step = StreamedStep(streamed, functional.cross_entropy, height=7, **options)
    close(step(IMAGE, TARGET, gradient=found), loss.detach())
    close(found - 1, image.grad)
    for mine, theirs in zip(streamed.parameters(), model.parameters(), strict=True):
        assert is_frozen or float((mine.grad - theirs.grad).abs().max()) < TOLERANCE


def test_the_gradient_by_bytes_is_that_by_what_they_are_scaled_to():
    model, pixels = maps().eval(), torch.randint(256, (1, 3, 48, 20), dtype=torch.uint8)
    image = (pixels.double() / 255).requires_grad_()
    functional.cross_entropy(model(image), TARGET).backward()
    found = np.zeros((1, 3, 48, 20))
    StreamedStep(model, functional.cross_entropy, height=7)(pixels.numpy(), TARGET, gradient=found)
    close(torch.from_numpy(found), image.grad)


@pytest.mark.parametrize(
    ("out", "why"),
    [
        (np.zeros(3), r"out is \(3,\) of torch.float64; it must be \(1, 2, 48, 20\) of torch.float64"),
        (torch.zeros(1, 2, 48, 20), "out is .* of torch.float32; it must be"),
        ([torch.zeros(1), None], "out is a list of 2 parts, and the model gives 1; give one array"),
        (np.broadcast_to(0.0, (1, 2, 48, 20)), "out is read-only"),
        (torch.zeros(1, 1, 48, 20).double().expand(1, 2, 48, 20), "out has one place for several elements"),
        ("out.npy", "out is a str; give a tensor or a numpy array"),
    ],
)
def test_what_an_output_does_not_fit_in_is_refused(out, why):
    with pytest.raises(OptionError, match=why):
        StreamedStep(maps().eval(), functional.cross_entropy, height=7).predict(IMAGE, out)


def test_what_cannot_be_given_is_refused(tmp_path):
    step = StreamedStep(maps(), functional.cross_entropy, height=7, checkpoint=tmp_path / "step.pt")
    with pytest.raises(OptionError, match="gradient= is not in a checkpoint"):
        step(IMAGE, TARGET, gradient=torch.zeros_like(IMAGE))
    step = StreamedStep(maps(), functional.cross_entropy, height=7)
    with pytest.raises(OptionError, match="the image is of torch.int64, by which there is no gradient"):
        step(IMAGE.long(), TARGET, gradient=torch.zeros_like(IMAGE))
    with pytest.raises(UnsupportedModelError, match="a value for every row"):
        step.evaluate([(IMAGE, TARGET)], lambda output, target: output)


def test_what_is_written_may_not_be_read_meanwhile(tmp_path):
    step, image = StreamedStep(nn.Conv2d(3, 3, 1).double(), functional.mse_loss, height=7), IMAGE.clone()
    maps = [np.memmap(tmp_path / "image", np.float64, mode, shape=(2, 3, 48, 20)) for mode in ("w+", "r+")]
    for given, out in [
        (image, image),
        (image, image.numpy()),
        (maps[0][:1], maps[1][:1]),
        (np.flip(maps[1], 0)[:1], maps[0][1:]),
    ]:
        with pytest.raises(OptionError, match="out shares memory with what the step reads"):
            step.predict(given, out)
    with pytest.raises(OptionError, match="gradient shares memory"):
        step(IMAGE, image, gradient=image)
    step.predict(maps[0][:1], maps[1][1:])


def test_an_image_is_read_where_the_system_reads_less_at_once(tmp_path, monkeypatch):
    image = np.memmap(tmp_path / "image", np.float64, "w+", shape=IMAGE.shape)
    image[:] = IMAGE.numpy()
    real = os.preadv
    monkeypatch.setattr(os, "preadv", lambda file, parts, offset: real(file, [parts[0][:1000]], offset))
    assert torch.equal(StreamedStep(nn.Identity(), functional.mse_loss, height=48).predict(image), IMAGE)


def test_elements_are_cast_before_they_are_added():
    torch.manual_seed(0)
    model, image = nn.Conv2d(3, 2, 3).double(), torch.rand(1, 3, 40, 16).double()
    step = StreamedStep(model, None, height=8)

    def counted(output, _):
        return output.detach().sigmoid().mul(255).sum(dtype=torch.int64)

    assert step.evaluate([(image, None)], counted) == [counted(model(image), None)]
    model, image = model.float(), image.float()
    (mean,) = StreamedStep(model, None, height=8).evaluate(
        [(image, None)], lambda output, _: (1e6 * output + 1e6).mean(dtype=torch.float64)
    )
    assert mean.dtype == torch.float64
    torch.testing.assert_close(mean, (1e6 * model(image) + 1e6).detach().double().mean(), rtol=1e-8, atol=0)

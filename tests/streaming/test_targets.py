"""Images and targets that do not fit do as in plain PyTorch, or are refused with advice."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from squeezebox.schema import UnsupportedModelError
from squeezebox.streaming import StreamedStep

cross_entropy = functional.cross_entropy


def conv():
    torch.manual_seed(0)
    return nn.Conv2d(3, 3, 3, padding=1).double()


@pytest.mark.parametrize("size", [{"memory": "8MiB"}, {"height": 8}, {"height": (8, 8)}])
@pytest.mark.parametrize("shape", [(1, 16, 24), (1, 32, 12), (1, 1, 24)])
def test_a_mask_of_another_size_is_refused(shape, size):
    model, image, mask = conv(), torch.rand(1, 3, 32, 24).double(), torch.randint(3, shape)
    with pytest.raises(RuntimeError, match="size mismatch"):
        cross_entropy(model(image), mask)
    with pytest.raises(
        UnsupportedModelError, match=r"\[1, 3, 32, 24\].*" + str([*shape]).replace("[", r"\[")
    ):
        StreamedStep(model, cross_entropy, **size)(image, mask)
    assert model.weight.grad is None


@pytest.mark.parametrize("dtype", [torch.int32, torch.uint8])
def test_a_mask_that_torch_refuses_is_refused(dtype):
    model, image, mask = conv(), torch.rand(1, 3, 32, 24).double(), torch.randint(3, (1, 32, 24))
    with pytest.raises(RuntimeError, match="Long"):
        cross_entropy(model(image), mask.to(dtype))
    with pytest.raises(UnsupportedModelError, match="int64"):
        StreamedStep(model, cross_entropy, height=8)(image, mask.to(dtype))
    found = StreamedStep(model, lambda output, target: cross_entropy(output, target.long()), height=8)
    torch.testing.assert_close(found(image, mask.to(dtype)), cross_entropy(model(image), mask).detach())


LOSSES = {
    "gathered": lambda output, target: output.log_softmax(1).gather(1, target[:, None]).mean(),
    "scattered": lambda output, target: output.scatter(1, target[:, None], 0.0).square().mean(),
    "resized": lambda output, target: cross_entropy(functional.interpolate(output, target.shape[1:]), target),
    "cropped": lambda output, target: cross_entropy(
        output[:, :, : target.shape[1], : target.shape[2]], target
    ),
    "nearest": lambda output, target: cross_entropy(
        output, functional.interpolate(target[None].double(), output.shape[2:])[0].long()
    ),
    "pooled": lambda output, target: cross_entropy(
        functional.adaptive_avg_pool2d(output, 1).flatten(1), target[:, 0, 0]
    ),
}


@pytest.mark.parametrize("shape", [(1, 32, 12), (1, 25, 20)])
@pytest.mark.parametrize("name", LOSSES)
def test_what_torch_takes_is_taken_with_its_results(name, shape):
    model, other, image = conv(), conv(), torch.rand(1, 3, 32, 24).double()
    mask = torch.randint(3, shape)
    expected = LOSSES[name](other(image), mask)
    expected.backward()
    loss = StreamedStep(model, LOSSES[name], height=8)(image, mask)
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-12, atol=0)
    torch.testing.assert_close(model.weight.grad, other.weight.grad, rtol=1e-11, atol=1e-14)


def test_places_in_a_larger_array_are_its_first_rows():
    model, image, values = conv(), torch.rand(1, 3, 32, 24).double(), torch.rand(1, 3, 64, 24).double()

    def chosen(output, target):
        return (target.gather(1, output.argmax(1, keepdim=True)) * output[:, :1]).mean()

    found = StreamedStep(model, chosen, height=8, axis=-2)(image, values)
    torch.testing.assert_close(found, chosen(model(image), values).detach(), rtol=1e-12, atol=0)


def test_one_row_meets_many():
    model, image, values = conv(), torch.rand(1, 3, 1, 24).double(), torch.rand(1, 3, 16, 24).double()

    def loss_fn(output, target):
        return (output - target).square().mean()

    found = StreamedStep(model, loss_fn, height=8, axis=-2)(image, values)
    torch.testing.assert_close(found, loss_fn(model(image), values).detach(), rtol=1e-12, atol=0)


MASK = torch.zeros(1, 16, 12, dtype=torch.int64)
FAILING = {
    "3 dimensions": ((3, 16, 12), torch.tensor([1]), r"give image\[None\]"),
    "channels last": ((16, 12, 3), torch.tensor([1]), r"\(16, 12, 3\) in float32.*array.transpose"),
    "an int": ((1, 3, 16, 12), 1, r"target of 1: .*torch.tensor\(\[1\]\)"),
    "bytes": ((1, 3, 16, 12), MASK.byte(), r"\(1, 16, 12\) in uint8: .*target.long\(\)"),
    "no batch": ((1, 3, 16, 12), MASK[0], "N x H x W"),
    "small": ((1, 3, 2, 2), torch.tensor([1]), r"Kernel size.*\. Try model and loss in plain PyTorch"),
}


@pytest.mark.parametrize("name", FAILING)
def test_what_plain_torch_refuses_is_refused_with_advice(name, caplog, capfd):
    shape, target, advice = FAILING[name]
    head = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3))
    is_mask = isinstance(target, torch.Tensor) and target.dim() > 1
    model = nn.Conv2d(3, 4, 3, padding=1) if is_mask else nn.Sequential(nn.Conv2d(3, 4, 3), *head)
    image = torch.rand(shape)
    with pytest.raises((RuntimeError, ValueError, TypeError)):
        cross_entropy(model(image), target)
    with pytest.raises(UnsupportedModelError, match=advice) as caught:
        StreamedStep(model, cross_entropy, height=8)(image, target)
    assert "\n" not in str(caught.value)
    assert not [each for each in caplog.records if each.levelname in ("WARNING", "ERROR")]
    assert not capfd.readouterr().err

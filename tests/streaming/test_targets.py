"""A target of another size than the output gives what it gives in plain PyTorch, or is refused as there."""

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

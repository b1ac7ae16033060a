"""What cannot be streamed exactly is refused, with the module's name and the reason."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from squeezebox.schema import OptionError, UnsupportedModelError
from squeezebox.streaming import StreamedStep


class Called(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


def unpooled(x):
    y, indices = functional.max_pool2d(x, 2, return_indices=True)
    return functional.max_unpool2d(y, indices, 2)


def attention(x):
    flat = x.flatten(2)
    return (flat.transpose(1, 2) @ flat).sum(-1)


def squared(x):
    return x[0, 0, :, :10][:10] @ x[0, 0, :, :10][:10]


REFUSED = {
    "drawn": (nn.Dropout(0.5), "random"),
    "across": (nn.Sequential(nn.Flatten(2), nn.Linear(12 * 10, 3)), "streamed axis"),
    "cumulated": (Called(lambda x: x.cumsum(2)), "along the streamed axis"),
    "attended": (
        Called(attention),
        "every pixel meets every other, as in self-attention.*keys and values of",
    ),
    "squared": (Called(squared), "more than one of what it multiplies"),
    "gram": (Called(lambda x: functional.linear(x[0, 0], x[0, 0])), "more than one of what it multiplies"),
    "alike": (Called(lambda x: (lambda y: functional.linear(y, y))(x[0, 0])), "what it multiplies"),
    "unpooled": (Called(unpooled), "indices"),
    "joined": (
        Called(lambda x: torch.cat([x, x.new_zeros(1, 2, 4, 10)], 2)),
        "does not have the streamed axis",
    ),
    "asked": (
        Called(lambda x: functional.scaled_dot_product_attention(*3 * [x.flatten(2).mT])),
        "self-attention|softmax",
    ),
    "averaged": (nn.BatchNorm2d(2, momentum=None), "has momentum=None"),
    "wide": (nn.Conv2d(2, 2, 1, padding=2), "as wide as its window"),
}


@pytest.mark.every(2)
@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    module, why = REFUSED[name]
    model = nn.Sequential()
    model.add_module("before", nn.Conv2d(2, 2, 1))
    model.add_module(name, module)
    step = StreamedStep(model, lambda output, _: output.mean(), memory="1KiB", axis=-2)
    with pytest.raises(UnsupportedModelError, match=f"module '{name}.*{why}"):
        step(torch.randn(1, 2, 12, 10), None)
    assert model.before.weight.grad is None


def test_a_loss_of_many_numbers():
    step = StreamedStep(nn.Conv2d(2, 2, 1), lambda output, _: output.mean((0, 1)), height=4)
    with pytest.raises(OptionError, match="single number"):
        step(torch.randn(1, 2, 12, 10), None)


def test_a_model_that_cannot_be_traced():
    step = StreamedStep(Called(lambda x: x if x.sum() > 0 else -x), lambda output, _: output.mean(), height=4)
    with pytest.raises(UnsupportedModelError, match="torch.export cannot trace Called"):
        step(torch.randn(1, 2, 12, 10), None)


@pytest.mark.parametrize(
    "loss_fn",
    [lambda output, mask: output[mask].mean(), lambda output, mask: output.masked_select(mask).mean()],
)
def test_a_mask_that_chooses_is_refused_with_the_product_that_works(loss_fn):
    model, image, mask = nn.Conv2d(2, 1, 1), torch.randn(1, 2, 12, 10), torch.rand(1, 1, 12, 10) > 0.5
    with pytest.raises(UnsupportedModelError, match=r"Write x\[mask\].mean\(\) as \(x \* mask\).sum\(\)"):
        StreamedStep(model, loss_fn, memory="512B", axis=-2)(image, mask)

    def rewritten(output, mask):
        return (output * mask).sum() / mask.sum()

    found = StreamedStep(model, rewritten, height=4, axis=-2)(image, mask)
    torch.testing.assert_close(found, loss_fn(model(image), mask).detach())


class Sign(torch.autograd.Function):
    """A straight-through estimator."""

    @staticmethod
    def forward(ctx, x):
        return x.sign()

    @staticmethod
    def backward(ctx, gradient):
        return gradient


def halved(x):
    with torch.no_grad():
        x.mul_(0.5)
    return x


@pytest.mark.parametrize("casts", [False, True])
@pytest.mark.parametrize(
    ("function", "why"),
    [
        (Sign.apply, r"straight-through estimator"),
        (lambda x: checkpoint(torch.exp, x, use_reentrant=True), r"checkpoint\(use_reentrant=False\)"),
        (halved, r"changed in place under torch.no_grad\(\)"),
    ],
)
def test_gradients_that_the_graph_would_lose_are_refused(function, why, casts):
    class Net(nn.Conv2d):
        def forward(self, x):
            with torch.autocast("cpu", torch.bfloat16, enabled=casts):
                return function(super().forward(x))

    image, model = torch.randn(1, 2, 12, 10), Net(2, 2, 3)
    step = StreamedStep(model, lambda output, _: output.float().mean(), height=4)
    with pytest.raises(UnsupportedModelError, match=why):
        step(image, None)


def test_predictions_need_no_gradient():
    image, model = torch.randn(1, 2, 12, 10), nn.Sequential(nn.Conv2d(2, 2, 3), Called(Sign.apply))
    assert torch.equal(StreamedStep(model, None, height=4).predict(image), model(image))


@pytest.mark.parametrize("options", [{}, {"memory": "1GiB", "height": 3}, {"height": 0}, {"memory": "much"}])
def test_options(options):
    with pytest.raises(OptionError):
        StreamedStep(nn.Conv2d(2, 2, 1), nn.MSELoss(), **options)


@pytest.mark.parametrize("height", [(5, 6, 7), (5,), 4.0, "5", (None, 6), 0, (0, 3)])
def test_what_is_no_height_is_refused(height):
    with pytest.raises(OptionError, match=r"give rows of a strip, or rows and columns of a tile"):
        StreamedStep(nn.Conv2d(2, 2, 3), functional.mse_loss, height=height)


def test_an_image_without_a_target_is_no_pair():
    step = StreamedStep(nn.Conv2d(2, 2, 3), functional.mse_loss, height=4)
    with pytest.raises(OptionError, match="pairs of image and target, not a Tensor"):
        step.evaluate([torch.zeros(1, 2, 12, 10)])


def test_a_height_may_be_any_whole_number():
    image = torch.rand(1, 2, 12, 10)
    losses = [
        StreamedStep(nn.Identity(), lambda x, _: x.square().mean(), height=height).evaluate([(image, None)])
        for height in (5, np.int64(5), [5, 4])
    ]
    assert all(loss[0] == pytest.approx(losses[0][0]) for loss in losses)


def test_pooling_in_three_dimensions_is_refused_with_what_to_write():
    volume, pooled = torch.rand(1, 3, 4, 12, 10), nn.Sequential(nn.Conv3d(3, 2, 1), nn.MaxPool3d(2))
    with pytest.raises(UnsupportedModelError, match=r"Write max_pool3d\(x, 2\) as max_pool2d"):
        StreamedStep(pooled, lambda output, _: output.mean(), memory="1KiB")(volume, None)


@pytest.mark.parametrize(
    ("head", "target"),
    [([], torch.full((1, 12, 10), 7)), ([nn.AdaptiveAvgPool2d(1), nn.Flatten()], torch.tensor([7]))],
)
def test_labels_out_of_range_are_named(head, target):
    model = nn.Sequential(nn.Conv2d(3, 4, 1), *head)
    with pytest.raises(OptionError, match="labels go from 7 to 7, but the model gives 4 classes, 0 to 3"):
        StreamedStep(model, functional.cross_entropy, height=4)(torch.rand(1, 3, 12, 10), target)


def test_a_tensor_computed_before_that_requires_a_gradient_is_refused():
    weight, image = nn.Parameter(torch.zeros(2)).exp(), torch.randn(1, 2, 12, 10)
    model = Called(lambda x: x * weight[:, None, None])
    with pytest.raises(UnsupportedModelError, match=r"a tensor of shape .2,. that was computed before"):
        StreamedStep(model, lambda output, _: output.mean(), height=5)(image, None)

"""Bags of images of different sizes have the loss and gradients of all images at once."""

import copy

import numpy as np
import pytest
import torch
from torch import nn

from squeezebox.schema import OptionError, UnsupportedModelError
from squeezebox.streaming import BagStep

SIZES = [(40, 24), (17, 30), (64, 21)]


class Pooled(nn.Module):
    """A vector of each image."""

    def __init__(self, *norms, drop=0.0):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 6, 3, stride=2, padding=1), *norms, nn.ReLU())
        self.dense = nn.Sequential(nn.Linear(6, 5), nn.Dropout(drop))

    def forward(self, x):
        return self.dense(self.body(x).mean((2, 3)))


class Scored(nn.Module):
    """An image's mean, weighed by attention over its pixels, and the logsumexp of their scores."""

    def __init__(self):
        super().__init__()
        self.body, self.score = nn.Conv2d(3, 5, 3, padding=1), nn.Conv2d(5, 1, 1)

    def forward(self, x):
        features = torch.tanh(self.body(x))
        scores = self.score(features)
        weights = torch.softmax(scores.flatten(2), 2)
        return (features.flatten(2) * weights).sum(2), scores.logsumexp((2, 3))


class Attention(nn.Module):
    """Gated attention over images, or the images' share of the attention over all pixels."""

    def __init__(self, drop=0.0):
        super().__init__()
        self.score = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 1))
        self.last = nn.Sequential(nn.Dropout(drop), nn.Linear(5, 2))

    def forward(self, encoded):
        if isinstance(encoded[0], tuple | list):
            rows, scores = (torch.cat(parts) for parts in zip(*encoded, strict=True))
        else:
            rows = torch.cat(encoded)
            scores = self.score(rows)
        return self.last((torch.softmax(scores, 0) * rows).sum(0)[None])


MODELS = {
    "pooled": lambda: (Pooled(), Attention()),
    "over all pixels": lambda: (Scored(), Attention()),
    "norms": lambda: (Pooled(nn.BatchNorm2d(6)), Attention()),
    "dropout": lambda: (Pooled(drop=0.5), Attention(drop=0.3)),
}


def bag():
    generator = torch.Generator().manual_seed(3)
    return [torch.rand(1, 3, *size, generator=generator).double() for size in SIZES], torch.tensor([1])


def models(name):
    torch.manual_seed(0)
    return [each.double() for each in MODELS[name]()]


def gradients(*modules):
    return [parameter.grad for module in modules for parameter in module.parameters()]


@pytest.mark.parametrize("name", MODELS)
def test_a_bag_is_all_images_at_once(name):
    """Twice, so that gradients add up; dropout draws alike, and running values are updated once an image."""
    (encoder, head), loss_fn = models(name), nn.CrossEntropyLoss()
    others, (images, target) = copy.deepcopy([encoder, head]), bag()
    step = BagStep(*others, loss_fn, height=7)
    for number in range(2):
        torch.manual_seed(number)
        loss = loss_fn(head([encoder(image) for image in images]), target)
        loss.backward()
        drawn = torch.rand(3)
        torch.manual_seed(number)
        found = step(images, target)
        assert torch.equal(torch.rand(3), drawn)
        torch.testing.assert_close(found, loss.detach(), rtol=1e-12, atol=1e-12)
    for one, other in zip(gradients(encoder, head), gradients(*others), strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            torch.testing.assert_close(other, one, rtol=1e-11, atol=1e-12)
    for one, other in zip(encoder.buffers(), others[0].buffers(), strict=True):
        torch.testing.assert_close(other, one, rtol=1e-12, atol=1e-12)


def test_a_bag_of_mapped_bytes_within_memory_trains_and_predicts(tmp_path):
    images = []
    for number, (height, width) in enumerate(SIZES):
        mapped = np.memmap(tmp_path / str(number), np.uint8, "w+", shape=(8 * height, 8 * width, 3))
        mapped[:] = np.random.default_rng(number).integers(0, 256, mapped.shape)
        images.append(mapped.transpose(2, 0, 1)[None])
    encoder, head = models("pooled")
    encoder, head = encoder.float(), head.float()
    optimizer = torch.optim.SGD([*encoder.parameters(), *head.parameters()], lr=0.5)
    step, losses = BagStep(encoder, head, nn.CrossEntropyLoss(), memory="24MiB"), []
    for _ in range(6):
        losses.append(float(step(images, torch.tensor([0]))))
        optimizer.step()
        optimizer.zero_grad()
    assert losses[-1] < 0.7 * losses[0]
    whole = head([encoder(torch.from_numpy(np.array(image)) / 255) for image in images])
    torch.testing.assert_close(step.predict(images), whole.detach(), rtol=1e-5, atol=1e-5)


def test_what_fails_changes_nothing():
    encoder, head = models("norms")
    images, target = bag()
    step = BagStep(encoder, head, nn.CrossEntropyLoss(), height=7)
    step(images, target)
    before = [each.clone() for each in [*gradients(encoder, head), *encoder.buffers()]]

    class Broken:
        shape, dtype, reads = (1, 3, 40, 24), np.dtype(np.float64), 0

        def __getitem__(self, place):
            self.reads += 1
            if self.reads > 30:
                raise OSError("gone")
            return images[0].numpy()[place]

    with pytest.raises(OSError, match="gone"):
        step([images[1], Broken()], target)
    with pytest.raises(OptionError, match="the bag has no image"):
        step([], target)
    with pytest.raises(IndexError):
        step(images, torch.tensor([7]))
    after = [*gradients(encoder, head), *encoder.buffers()]
    assert all(map(torch.equal, before, after))
    loss = nn.BatchNorm1d(2).double()
    own = BagStep(encoder, head, lambda output, _: loss(output.repeat(2, 1)).square().sum(), height=7)
    with torch.inference_mode(), pytest.raises(OptionError, match="leave torch.inference_mode out"):
        own(images, target)
    with pytest.raises(OSError, match="gone"):
        own([images[1], Broken()], target)
    assert loss.weight.grad is None and not loss.num_batches_tracked
    own(images, target)
    assert loss.weight.grad is not None and loss.num_batches_tracked == 1


def test_bad_options_are_refused():
    encoder, head = models("pooled")
    with pytest.raises(OptionError, match="leave it out"):
        BagStep(encoder, head, nn.CrossEntropyLoss(), height=7, checkpoint="step.pt")
    with pytest.raises(OptionError, match="memory="):
        BagStep(encoder, head, nn.CrossEntropyLoss())
    with pytest.raises(OptionError, match="2 numbers; give one"):
        BagStep(encoder, head, lambda output, _: output, height=7)(*bag())
    with pytest.raises(UnsupportedModelError, match="it has a value for every row; take its sum or mean"):
        BagStep(nn.Conv2d(3, 2, 1).double(), head, nn.CrossEntropyLoss(), height=7)(*bag())

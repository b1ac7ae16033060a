"""Volumes, and bags of images of one size as a batch, are those of the whole."""

import pytest
import torch
from torch import nn

from tests.streaming.test_exact import require_equal


class Bag(nn.Module):
    """Attention over all pixels of all images of a bag, or over the images' own means."""

    def __init__(self, pooled):
        super().__init__()
        self.body, self.pooled = nn.Sequential(nn.Conv2d(3, 4, 3, stride=2, padding=1), nn.Tanh()), pooled
        self.score, self.head = nn.Linear(4, 1), nn.Linear(4, 5)

    def forward(self, x):
        features = self.body(x)
        rows = features.mean((2, 3)) if self.pooled else features.movedim(1, 3).reshape(-1, 4)
        weights = torch.softmax(self.score(rows), 0)
        return self.head((weights * rows).sum(0)[None])


@pytest.mark.parametrize("pooled", [True, False])
def test_a_bag_of_images_is_a_batch(pooled):
    torch.manual_seed(0)
    require_equal(
        Bag(pooled).double(),
        nn.CrossEntropyLoss(),
        torch.rand(4, 3, 48, 20).double(),
        torch.tensor([2]),
        height=8,
    )


def test_a_volume_is_streamed_along_one_of_its_last_two_dimensions():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv3d(1, 4, 3, padding=1), nn.BatchNorm3d(4), nn.ReLU(), nn.Conv3d(4, 2, 3, stride=2, padding=1)
    ).double()
    require_equal(
        model, lambda output, _: output.square().mean(), torch.rand(1, 1, 6, 40, 12).double(), None, height=8
    )


def test_pooling_without_a_stride_takes_its_window():
    torch.manual_seed(0)
    volume = torch.rand(1, 3, 4, 32, 24).double()

    def loss_fn(output, _):
        return nn.functional.avg_pool3d(output, 2).square().mean()

    require_equal(nn.Conv3d(3, 2, 1), loss_fn, volume, None, height=8)

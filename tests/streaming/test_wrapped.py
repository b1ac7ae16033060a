"""Networks whose rows at one end read those of the other: circular padding, roll, cat and flip along rows."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from squeezebox.streaming import StreamedStep
from tests.streaming.test_exact import require_equal


class Wrapped(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        around = {"padding": 1, "padding_mode": "circular"}
        self.first = nn.Sequential(nn.Conv2d(2, 4, 3, **around), nn.BatchNorm2d(4), nn.GELU())
        self.second = nn.Sequential(nn.Conv2d(4, 4, 3, stride=2, **around), nn.MaxPool2d(3, 1, 1))
        self.last = nn.Conv2d(4, 2, 3, **around)

    def forward(self, x):
        x = self.second(self.first(x) + self.first(x.roll((5, -3), (2, 3))))
        x = x + x.flip(2) + functional.pad(x, (2, -2, -3, 3), mode="circular")
        return self.last(torch.cat([x[:, :, 4:], x.square(), x[:, :, :4]], 2))


@pytest.mark.every(2)
@pytest.mark.parametrize("spool", [False, True])
@pytest.mark.parametrize(("height", "axis"), [(5, -2), (1, -1), ((6, 9), -2), ((4, 5), -1)])
def test_a_wrapped_network(height, axis, spool):
    image = torch.randn(2, 2, 28, 24, dtype=torch.float64)
    weights = torch.randn(2, 2, 28, 12, dtype=torch.float64)
    options = {"height": height, "axis": axis, "spool": spool, "recompute": axis == -1}
    require_equal(
        Wrapped(), lambda output, weights: (output.sin() * weights).mean(), image, weights, **options
    )


def test_a_strip_at_an_end_reads_of_both_ends_and_nothing_between():
    read = []

    class Watched(torch.Tensor):
        def __getitem__(self, index):
            read.append((index[2].start, index[2].stop))
            return super().__getitem__(index).as_subclass(torch.Tensor)

    around = {"padding": 2, "padding_mode": "circular"}
    model = nn.Sequential(*[nn.Conv2d(1, 1, 5, **around) for _ in range(3)])
    step = StreamedStep(model, lambda output, _: output.mean(), height=10, axis=-2)
    step(torch.randn(1, 1, 100, 8).as_subclass(Watched), None)
    assert {(0, 16), (94, 100), (4, 26)} <= set(read)
    assert max(stop - start for start, stop in read) == 22

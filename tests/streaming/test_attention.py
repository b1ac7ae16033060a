"""Torch's own attention: between all pixels, of pixels to a few places, of a few queries to all pixels."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from squeezebox.schema import UnsupportedModelError
from squeezebox.streaming import StreamedStep
from tests.streaming.test_exact import require_equal

IMAGE = torch.rand(2, 3, 24, 20).double()


def squares(output, _):
    return output.square().mean()


def heads(x, count=2):
    """(N, places, channels) to (N, heads, places, channels of a head)."""
    return x.unflatten(2, (count, -1)).transpose(1, 2)


class Between(nn.Module):
    """All pixels of a smaller map attend to each other."""

    def __init__(self, **options):
        super().__init__()
        self.body, self.values = nn.Conv2d(3, 8, 3, stride=2, padding=1), nn.Linear(8, 24)
        self.last, self.options = nn.Conv2d(8, 1, 1), options

    def forward(self, x):
        small = self.body(x).tanh()
        parts = map(heads, self.values(small.flatten(2).mT).chunk(3, -1))
        seen = functional.scaled_dot_product_attention(*parts, **self.options)
        return self.last(small + seen.transpose(1, 2).flatten(2).mT.reshape(small.shape))


class Within(nn.Module):
    """Pixels attend to those of their row, or of their column."""

    def __init__(self, dim):
        super().__init__()
        self.body, self.values, self.dim = nn.Conv2d(3, 8, 3, padding=1), nn.Linear(8, 24), dim

    def forward(self, x):
        pixels = self.values(self.body(x).tanh().movedim(1, -1))
        if self.dim == -2:
            pixels = pixels.transpose(1, 2)
        return functional.scaled_dot_product_attention(*pixels.flatten(0, 1).chunk(3, -1)).cumsum(-1)


class Queries(nn.Module):
    """A few trained queries attend to all pixels, or to those that a mask of the image chooses or weighs."""

    def __init__(self, mask):
        super().__init__()
        self.body, self.values = nn.Conv2d(3, 8, 3, padding=1), nn.Linear(8, 16)
        self.queries, self.last, self.mask = nn.Parameter(torch.randn(3, 8)), nn.Linear(8, 2), mask

    def forward(self, x):
        keys, values = self.values(self.body(x).tanh().flatten(2).mT).chunk(2, -1)
        mask = None if self.mask is None else self.mask(x[:, :1].flatten(2))
        queries = self.queries.expand(len(x), -1, -1)
        return self.last(functional.scaled_dot_product_attention(queries, keys, values, attn_mask=mask))


class Padded(Queries):
    """As :class:`Queries`, of which the last may see nothing, and nobody anything of the second image."""

    def __init__(self):
        super().__init__(None)

    def forward(self, x):
        keys, values = self.values(self.body(x).tanh().flatten(2).mT).chunk(2, -1)
        seen = torch.tensor([[True, True, False], [False] * 3])[..., None] & (x[:, :1].flatten(2) > 0.2)
        queries = self.queries.expand(len(x), -1, -1)
        found = functional.scaled_dot_product_attention(queries, keys, values, attn_mask=seen)
        back = torch.where(x[:, :1].flatten(2).mT > 0.5, 0.0, -torch.inf)  # which pixels see the queries
        return self.last(functional.scaled_dot_product_attention(values, found, found, attn_mask=back))


class Places(nn.Module):
    """Every pixel attends to a few places."""

    def __init__(self):
        super().__init__()
        self.body, self.own, self.others = nn.Conv2d(3, 8, 3, padding=1), nn.Linear(8, 8), nn.Linear(8, 16)

    def forward(self, x):
        y = self.body(x).tanh()
        few = functional.adaptive_avg_pool2d(y, 2).flatten(2).mT
        keys, values = map(heads, self.others(few).chunk(2, -1))
        seen = functional.scaled_dot_product_attention(heads(self.own(y.flatten(2).mT)), keys, values)
        return seen.transpose(1, 2).flatten(2).mT.reshape(y.shape)


MODULES = {
    "between": lambda: Between(),
    "before": lambda: Between(is_causal=True),
    "scaled": lambda: Between(scale=0.3),
    "masked": lambda: Between(attn_mask=torch.rand(120, 120) > 0.3),
    "rows": lambda: Within(-1),
    "columns": lambda: Within(-2),
    "queries": lambda: Queries(None),
    "chosen": lambda: Queries(lambda x: x > 0.2),
    "padded": lambda: Padded(),
    "weighed": lambda: Queries(lambda x: x),
    "places": lambda: Places(),
}


@pytest.mark.parametrize("axis", [-2, -1])
@pytest.mark.parametrize("name", MODULES)
def test_attention_is_the_whole_images(name, axis):
    torch.manual_seed(0)
    require_equal(MODULES[name](), squares, IMAGE, None, height=5, axis=axis)


def test_only_what_meets_every_other_is_there_at_once():
    image = torch.rand(1, 3, 160, 96)
    between = StreamedStep(Between(), squares, memory="8MiB").plan(image, None)
    pairs = 2 * (80 * 48) ** 2 * 4
    assert list(between.gathered.values()) == [3 * 8 * 80 * 48 * 4]
    assert between.rowless_bytes < pairs / 40 * torch.get_num_threads()  # each has blocks of its own
    for model in (Places(), Queries(None), Within(-1)):
        assert not StreamedStep(model, squares, memory="8MiB").plan(image, None).gathered


def test_attention_with_dropout_between_pixels_is_refused():
    step = StreamedStep(Between(dropout_p=0.5), squares, height=5)
    with pytest.raises(UnsupportedModelError, match="random numbers, .* Set its probability to 0"):
        step(IMAGE.float(), None)

"""Heads over the whole image, and losses with norms, are those of the whole image."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional

from squeezebox.schema import OptionError, UnsupportedModelError
from squeezebox.streaming import StreamedStep
from squeezebox.streaming._reductions import Ranked
from tests.streaming.test_exact import require_equal

IMAGE, LABEL, MASK = torch.rand(1, 3, 48, 20).double(), torch.tensor([1]), torch.randint(3, (1, 48, 20))


def body():
    return nn.Sequential(nn.Conv2d(3, 4, 3, stride=2, padding=1), nn.Tanh())


class Attention(nn.Module):
    """Ilse, Tomczak and Welling (2018): weights over all pixels, gated, by products of two kinds."""

    def __init__(self, heads, product):
        super().__init__()
        self.body, self.product = body(), product
        self.value, self.gate, self.score = nn.Linear(4, 3), nn.Linear(4, 3), nn.Linear(3, heads)
        self.head = nn.Sequential(nn.Flatten(), nn.Linear(4 * heads, 5))

    def forward(self, x):
        features = self.body(x).flatten(2).transpose(1, 2)
        scores = self.score(torch.tanh(self.value(features)) * torch.sigmoid(self.gate(features)))
        scores = scores.masked_fill(features[..., :1] < -0.5, -torch.inf)  # as of what is no tissue
        if self.product == "mm":
            return self.head((torch.softmax(scores[0].T, 1) @ features[0])[None])
        return self.head(torch.log_softmax(scores, 1).exp().transpose(1, 2) @ features)


class GlobalResponse(nn.Module):
    """Of ConvNeXt V2."""

    def forward(self, x):
        size = torch.norm(x, p=2, dim=(2, 3), keepdim=True)
        return x * size / (size.mean(1, keepdim=True) + 1e-6) + x


class Whole(nn.Module):
    """Pooling whose window is all there is, of generalised means."""

    def __init__(self, pool):
        super().__init__()
        self.pool = pool

    def forward(self, x):
        return self.pool(x.abs().clamp(min=1e-6).pow(3.0), x.shape[-2:]).pow(1 / 3)


POOLS = {
    "average": nn.AdaptiveAvgPool2d((5, 3)),
    "average, all columns": nn.AdaptiveAvgPool2d((3, 1)),
    "maximum": nn.AdaptiveMaxPool2d((5, 3)),
    "one maximum": nn.AdaptiveMaxPool2d(1),
    "all, average": Whole(functional.avg_pool2d),
    "all, maximum": Whole(functional.max_pool2d),
    "norms": nn.Sequential(GlobalResponse(), nn.AdaptiveAvgPool2d(1)),
    "channels": nn.Sequential(nn.LocalResponseNorm(3), nn.AdaptiveAvgPool2d(1)),
    "powers": nn.Sequential(nn.LPPool2d(2, 2), nn.AdaptiveAvgPool2d(1)),
}


@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize("product", ["mm", "bmm"])
@pytest.mark.parametrize("axis", [-2, -1])
def test_attention_over_the_image(heads, product, axis):
    require_equal(Attention(heads, product), functional.cross_entropy, IMAGE, LABEL, height=7, axis=axis)


@pytest.mark.parametrize("name", POOLS)
@pytest.mark.parametrize("axis", [-2, -1])
def test_pooling(name, axis):
    model = nn.Sequential(body(), POOLS[name], nn.Flatten(), nn.LazyLinear(5, dtype=torch.float64))
    model.double()(IMAGE)
    require_equal(model, functional.cross_entropy, IMAGE, LABEL, height=7, axis=axis)


@pytest.mark.parametrize("order", [0.5, 1, 2, 3.5, float("inf")])
def test_norms_over_the_image(order):
    model = body()
    model[0].bias.data[0] = -10.0  # a channel of zeros, whose norm has no gradient

    def loss(output, target):
        return torch.linalg.vector_norm(output * (output > 0), order, dim=(2, 3)).sum()

    require_equal(model, loss, IMAGE, LABEL, height=7)


def test_losses_that_name_dimensions_by_an_arange():
    def dice(output, target):
        wanted = functional.one_hot(target, 3).movedim(-1, 1)
        found, dims = output.softmax(1), torch.arange(2, output.dim()).tolist()
        return (1 - 2 * (found * wanted).sum(dims) / (found + wanted).sum(dims)).mean()

    require_equal(nn.Conv2d(3, 3, 3, padding=1), dice, IMAGE, MASK, height=7)


def test_dropout_behind_pooling_draws_what_it_draws_for_the_whole_image(tmp_path):
    layers = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.5), nn.Linear(4, 5)
    model = nn.Sequential(body(), *layers).double()
    streamed = copy.deepcopy(model)
    torch.manual_seed(3)
    wanted = functional.cross_entropy(model(IMAGE), LABEL)
    wanted.backward()
    step = StreamedStep(streamed, functional.cross_entropy, memory="64KiB")
    torch.manual_seed(3)
    torch.testing.assert_close(step(IMAGE, LABEL), wanted.detach())
    for mine, theirs in zip(streamed.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)
    again = StreamedStep(streamed, functional.cross_entropy, height=7, checkpoint=tmp_path / "step.pt")
    with pytest.raises(OptionError, match="which checkpoint= could not draw again"):
        again(IMAGE, LABEL)


@pytest.mark.parametrize(
    ("loss", "change"),
    [
        (lambda x, mask: x[:, 0][mask == 1].mean(), r"Write x\[mask\].mean\(\) as \(x \* mask\).sum\(\)"),
        (
            lambda x, mask: x.flatten(2).gather(2, x.flatten(2).topk(5, 2).indices).mean(),
            r"write x.gather\(dim, x.topk\(k, dim\).indices\) as x.topk\(k, dim\).values",
        ),
        (lambda x, mask: x.flatten(2).max(2).values.mean(), r"Write x.max\(dim\).values as x.amax\(dim\)"),
        (lambda x, mask: x.flatten(2).sort(2).values[..., 0].sum(), "Take a loss without order"),
        (lambda x, mask: functional.dropout(x, 0.5).mean(), r"put it into eval\(\), or behind the pooling"),
    ],
)
def test_a_refusal_says_what_works(loss, change):
    step = StreamedStep(nn.Conv2d(3, 2, 3, padding=1).double(), loss, memory="1KiB")
    with pytest.raises(UnsupportedModelError, match=change):
        step(IMAGE, MASK)


class Pyramid(nn.Module):
    """A map, and one of a quarter of its rows."""

    def __init__(self):
        super().__init__()
        self.body, self.small = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 2, 1)

    def forward(self, x):
        fine = self.body(x)
        return fine, self.small(functional.max_pool2d(fine, 4))


@pytest.mark.parametrize("options", [{"memory": "16MiB"}, {"height": 1}])
@pytest.mark.parametrize("power", [0.5, 1.0])
def test_strips_that_have_no_row_of_a_small_map(options, power):
    torch.manual_seed(0)

    def loss(output, _):
        fine, small = (each.pow(2).mean() for each in output)
        return fine.pow(power) + 3 * small.pow(power)

    require_equal(Pyramid().double(), loss, IMAGE, LABEL, **options)


def ranked(x, largest):
    return x.flatten(2).topk(5, 2, largest).values


RANKED = {
    "instances": lambda x: x.flatten(2).topk(9, 2).values.mean(2).square().sum(),
    "both ends": lambda x: torch.cat([ranked(x, True), ranked(x, False)], 2).exp().sum(),
    "hard pixels": lambda x: x.square().sum(1).flatten().topk(300).values.mean(),
    "by rank": lambda x: (x.topk(4, 2).values * torch.arange(4.0).view(-1, 1)).sin().sum(),
}


@pytest.mark.parametrize("options", [{"height": 1}, {"height": 7, "axis": -1}, {"memory": "16MiB"}])
@pytest.mark.parametrize("name", RANKED)
def test_the_largest(name, options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 2, 1), nn.ReLU())
    require_equal(model, lambda x, _: RANKED[name](x), IMAGE, LABEL, **options)


@pytest.mark.parametrize("largest", [True, False])
def test_equals_of_the_last_share_its_gradient(largest):
    """Of three that equal the second of two chosen, each gets a third."""
    best = Ranked(dim=1, count=2, largest=largest)
    x = torch.tensor([[3.0, 1.0, 1.0, 0.0, 1.0]]) if largest else torch.tensor([[0.0, 1.0, 1.0, 5.0, 1.0]])
    state = best.partial(x[:, :1], 0)
    state = best.merge(best.merge(state, best.partial(x[:, 1:2], 1)), best.partial(x[:, 2:], 2))
    torch.testing.assert_close(state[0], x.topk(2, 1, largest).values)
    slope = best.slope(state, (torch.tensor([[5.0, 6.0]]), None))
    wanted = torch.tensor([[5.0, 2.0, 2.0, 0.0, 2.0]])
    torch.testing.assert_close(best.gradient(x, slope, 0), wanted)

"""Strips give the whole image's loss, gradients and running values, in double precision."""

import copy

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

from squeezebox.streaming import StreamedStep

TOLERANCE = 1e-12


def worst(model, streamed):
    """The largest difference of a gradient or a buffer, relative to the largest element there is."""
    found = []
    for mine, theirs in zip(streamed.parameters(), model.parameters(), strict=True):
        assert (mine.grad is None) == (theirs.grad is None)
        if theirs.grad is not None:
            found.append((mine.grad, theirs.grad))
    scale = max(float(theirs.abs().max()) for _, theirs in found)
    gradients = max(float((mine - theirs).abs().max()) for mine, theirs in found) / scale
    pairs = zip(streamed.buffers(), model.buffers(), strict=True)
    return max([gradients, *(float((mine - theirs).abs().max()) for mine, theirs in pairs)])


def require_equal(model, loss_fn, image, target, **options):
    """One step whole and one in strips."""
    model = model.double().train(model.training)
    streamed = copy.deepcopy(model)
    loss = loss_fn(model(image), target)
    loss.backward()
    found = StreamedStep(streamed, loss_fn, **options)(image, target)
    torch.testing.assert_close(found, loss.detach(), rtol=TOLERANCE, atol=TOLERANCE)
    assert worst(model, streamed) < TOLERANCE


class Block(nn.Module):
    """A layer that changes the size, one that brings some of it back, and a skip connection cut to match."""

    def __init__(self, body, norm):
        super().__init__()
        self.body, self.norm = nn.Sequential(*body), norm

    def forward(self, x):
        y = self.body(x)
        sizes = [min(first, second) for first, second in zip(x.shape[-2:], y.shape[-2:], strict=True)]
        return self.norm(torch.cat([x[..., : sizes[0], : sizes[1]], y[..., : sizes[0], : sizes[1]]], 1))


@st.composite
def convolutions(draw):
    kernel, dilation = draw(st.integers(1, 4)), draw(st.integers(1, 2))
    span = (kernel - 1) * dilation
    mode = draw(st.sampled_from(["zeros", "reflect", "replicate", "circular"]))
    padding = draw(st.integers(0, min(span, 3)))
    stride = draw(st.integers(1, 3))
    return nn.Conv2d(2, 2, kernel, stride, padding, dilation, padding_mode=mode)


@st.composite
def transposed(draw):
    kernel, stride, dilation = draw(st.integers(1, 4)), draw(st.integers(1, 3)), draw(st.integers(1, 2))
    padding = draw(st.integers(0, (kernel - 1) * dilation // 2))
    extra = draw(st.integers(0, max(stride, dilation) - 1))
    return nn.ConvTranspose2d(2, 2, kernel, stride, padding, extra, dilation=dilation)


@st.composite
def pools(draw):
    kernel, stride = draw(st.integers(2, 3)), draw(st.integers(1, 3))
    padding, ceil = draw(st.integers(0, 1)), draw(st.booleans())
    if draw(st.booleans()):
        return nn.MaxPool2d(kernel, stride, padding, ceil_mode=ceil)
    return nn.AvgPool2d(kernel, stride, padding, ceil_mode=ceil, count_include_pad=draw(st.booleans()))


@st.composite
def upsamplings(draw):
    mode = draw(st.sampled_from(["nearest", "nearest-exact", "bilinear", "bicubic"]))
    aligned = draw(st.booleans()) if mode in ("bilinear", "bicubic") else None
    if draw(st.booleans()):
        return nn.Upsample(
            scale_factor=draw(st.sampled_from([2, 3, 1.6, 0.7])), mode=mode, align_corners=aligned
        )
    return nn.Upsample(size=(draw(st.integers(5, 40)), 11), mode=mode, align_corners=aligned)


def norms(channels):
    return st.sampled_from(
        [
            nn.Identity(),
            nn.BatchNorm2d(channels),
            nn.BatchNorm2d(channels, affine=False, momentum=None, track_running_stats=False),
            nn.InstanceNorm2d(channels, affine=True),
            nn.GroupNorm(2, channels),
        ]
    )


@st.composite
def networks(draw):
    layers = []
    for _ in range(draw(st.integers(1, 2))):
        kinds = [convolutions(), transposed(), pools(), upsamplings()]
        body = [draw(draw(st.sampled_from(kinds))) for _ in range(draw(st.integers(1, 2)))]
        act = draw(st.sampled_from([nn.ReLU(inplace=True), nn.GELU(), nn.SiLU()]))
        layers += [Block([*body, act], copy.deepcopy(draw(norms(4)))), nn.Conv2d(4, 2, 1)]
    return nn.Sequential(*layers)


def output_of(model, image):
    """None where torch itself refuses: the network is too deep for the image."""
    try:
        with torch.no_grad():
            return copy.deepcopy(model).double()(image)
    except (RuntimeError, ValueError):
        return None


@pytest.mark.slow
@given(
    model=networks(),
    size=st.tuples(st.integers(9, 32), st.integers(9, 32)),
    height=st.integers(1, 20),
    axis=st.sampled_from([-2, -1]),
    recompute=st.booleans(),
    spool=st.booleans(),
    seed=st.integers(0, 99),
)
@settings(max_examples=10, phases=[Phase.explicit, Phase.generate])
def test_random_networks(model, size, height, axis, recompute, spool, seed):
    torch.manual_seed(seed)
    image = torch.randn(2, 2, *size, dtype=torch.float64)
    output = output_of(model, image)
    if output is None:
        return
    weights = torch.randn_like(output)
    require_equal(
        model,
        lambda output, weights: (output.sin() * weights).mean(),
        image,
        weights,
        height=height,
        axis=axis,
        recompute=recompute,
        spool=spool,
    )


def small():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 4, 5, stride=2, padding=2), nn.ReLU(), nn.ConvTranspose2d(4, 3, 4, 2, 1)
    )


def dice(output, target):
    p = output.softmax(1)[:, 1]
    return 1 - 2 * (p * target["mask"]).sum() / (p.sum() + target["mask"].sum() + target["smooth"])


def lovasz_like(output, target):
    return (output - target).abs().amax() + output.logsumexp((2, 3)).mean() + output.std()


def flattened(output, target):
    return functional.cross_entropy(output.permute(0, 2, 3, 1).reshape(-1, 3), target.reshape(-1))


def detached(output, target):
    with torch.no_grad():
        weights = output.softmax(1)
    return (weights * output).mean() + (output.detach().square() * output).sum() * 1e-3


CLASSES = torch.arange(2 * 22 * 18).reshape(2, 22, 18) % 3
LOSSES = {
    "cross entropy": (
        nn.CrossEntropyLoss(
            weight=torch.tensor([1.0, 2.0, 0.5]).double(), ignore_index=1, label_smoothing=0.1
        ),
        CLASSES,
    ),
    "squares": (nn.MSELoss(), CLASSES[:, None].double().expand(2, 3, 22, 18)),
    "sum": (nn.L1Loss(reduction="sum"), CLASSES[:, None].double().expand(2, 3, 22, 18)),
    "dice": (dice, {"mask": (CLASSES == 1), "smooth": 1.0}),
    "extremes": (lovasz_like, torch.zeros(2, 3, 22, 18).double()),
    "flattened": (flattened, CLASSES),
    "detached": (detached, torch.zeros(1)),
}


@pytest.mark.every(3)
@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("axis", [-2, -1])
def test_losses(name, axis):
    loss_fn, target = LOSSES[name]
    image = torch.randn(2, 3, 22, 18, dtype=torch.float64)
    require_equal(small(), loss_fn, image, target, height=5, axis=axis)


class Classifier(nn.Module):
    """Convolutions with batch normalisation, global pooling and a head; the head sees the mean twice."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 4, 3, bias=False),
            nn.BatchNorm2d(4),
            nn.ReLU(),
            nn.Conv2d(4, 4, 3),
            nn.BatchNorm2d(4),
        )
        self.gate, self.head = nn.Linear(4, 4), nn.Linear(4, 5)

    def forward(self, x):
        x = self.body((x - x.mean((2, 3), keepdim=True)) / x.std((2, 3), keepdim=True))
        x = x * self.gate(functional.adaptive_avg_pool2d(x, 1).flatten(1)).sigmoid()[:, :, None, None]
        return self.head(x.mean((2, 3)))


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("spool", [True, False])
def test_a_classifier_with_labels_of_whole_images(training, spool):
    torch.manual_seed(0)
    image, labels = torch.randn(2, 3, 30, 20, dtype=torch.float64), torch.tensor([1, 4])
    require_equal(Classifier().train(training), nn.CrossEntropyLoss(), image, labels, height=7, spool=spool)


class Projected(nn.Module):
    """What multiplies or mixes along other axes: heads over channels, normal vectors, attention in a row."""

    def __init__(self):
        super().__init__()
        self.before, self.head, self.last = nn.Conv2d(3, 4, 3), nn.Linear(4, 6), nn.Linear(6, 4, bias=False)

    def forward(self, x):
        x = functional.normalize(self.before(x), dim=1)
        x = functional.gelu(self.head(x.permute(0, 2, 3, 1))) @ self.last.weight.T
        rows = x if x.shape[1] > x.shape[2] else x.transpose(1, 2)
        x = x + torch.einsum("nhwc,oc->nhwo", x.roll(1, 3), self.head.weight[:4])
        return x, (rows @ rows.transpose(2, 3)).softmax(-1).square().mean((2, 3))


@pytest.mark.parametrize("axis", [-2, -1])
def test_products_along_other_axes(axis):
    torch.manual_seed(0)
    image = torch.randn(2, 3, *((22, 12) if axis == -2 else (12, 22)), dtype=torch.float64)
    require_equal(
        Projected(), lambda output, _: sum(each.sin().mean() for each in output), image, None, height=5
    )


def test_gradients_accumulate_and_running_values_move_once_a_step():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 1, 1)).double()
    other = copy.deepcopy(model)
    step = StreamedStep(model, lambda output, _: output.square().mean(), height=4)
    for _ in range(2):
        image = torch.randn(1, 3, 12, 10, dtype=torch.float64)
        step(image, None)
        other(image).square().mean().backward()
    assert model[1].num_batches_tracked == 2
    assert worst(other, model) < TOLERANCE


class Weighed(nn.Module):
    """A loss with a parameter of its own."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(0.5, dtype=torch.float64))

    def forward(self, output, target):
        return self.weight.exp() * output.square().mean() - self.weight

    def other(self, output, target):
        return self(output, target)


@pytest.mark.parametrize("form", ["module", "method", "closure", "tensor"])
def test_the_losss_own_parameters_have_gradients(form):
    loss, plain = Weighed(), Weighed()
    functions = {
        "module": loss,
        "method": loss.other,
        "closure": lambda output, target: loss(output, target),
        "tensor": lambda output, target: loss.weight.exp() * output.square().mean() - loss.weight,
    }
    model, image = nn.Conv2d(3, 2, 3).double(), torch.randn(1, 3, 20, 8, dtype=torch.float64)
    StreamedStep(model, functions[form], height=6)(image, None)
    plain(model(image), None).backward()
    torch.testing.assert_close(loss.weight.grad, plain.weight.grad, rtol=1e-12, atol=0)


class Outer(nn.Module):
    """A map of one row, times a table of all rows."""

    def __init__(self):
        super().__init__()
        self.collapse, self.table = nn.Conv2d(1, 4, (64, 1)), nn.Parameter(torch.randn(1, 4, 64, 1))

    def forward(self, x):
        return self.collapse(x) * self.table


def test_a_map_of_one_row_meets_all_rows_of_a_table():
    torch.manual_seed(0)
    image = torch.randn(1, 1, 64, 32, dtype=torch.float64)
    require_equal(Outer(), lambda output, _: output.square().mean(), image, None, height=16)


class Placed(nn.Module):
    """Adds a table of all pixels in products of matrices: of all at once, by image, and on either side."""

    def __init__(self):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(3, 3)), nn.Parameter(torch.randn(3))
        self.tables = nn.ParameterList(torch.randn(*shape) for shape in ((396, 3), (1, 396, 3), (3, 396)))

    def forward(self, x):
        pixels, (all_at_once, by_image, other_side) = x.flatten(2).mT, self.tables
        found = torch.baddbmm(by_image, pixels, self.weight.expand(len(x), 3, 3))
        first = torch.addmm(all_at_once, found[0], self.weight)
        return torch.addmm(other_side, self.weight, first.T) + torch.addmm(self.bias, found[1], self.weight).T


@pytest.mark.parametrize("height", [5, (5, 7)])
def test_products_of_matrices_that_add_a_table_of_all_pixels(height):
    torch.manual_seed(0)
    image = torch.randn(2, 3, 22, 18, dtype=torch.float64)
    require_equal(Placed(), lambda output, _: output.sin().mean(), image, None, height=height)

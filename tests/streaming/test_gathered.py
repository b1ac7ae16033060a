"""What needs all rows at once gets them, where they are few enough."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional

import squeezebox
from squeezebox.schema import UnsupportedModelError
from squeezebox.streaming import BagStep, StreamedStep
from tests.streaming.test_exact import require_equal
from tests.streaming.test_memory import peak_of, tensors_alone  # noqa: F401, a fixture

IMAGE, MASK = torch.rand(2, 3, 48, 20).double(), torch.randint(2, (2, 1, 48, 20)).double()


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.Tanh(), nn.Conv2d(4, 1, 3, padding=1)).double()


def lovasz(output, mask):
    """The hinge of Berman, Triki and Blaschko (2018), equations 7 to 9, over all pixels."""
    scores, labels = output.flatten(), mask.flatten()
    errors, order = torch.sort(1 - scores * (2 * labels - 1), descending=True)
    labels = labels[order.data]
    union = labels.sum() + (1 - labels).cumsum(0)
    jaccard = 1 - (labels.sum() - labels.cumsum(0)) / union
    return torch.dot(errors.relu(), torch.cat([jaccard[:1], jaccard.diff()]))


def chosen(output, mask):
    inside = mask > 0
    return functional.binary_cross_entropy_with_logits(output[inside], mask[inside])


def hardest(output, mask):
    losses = functional.binary_cross_entropy_with_logits(output, mask, reduction="none").flatten()
    return losses[losses.detach().topk(50).indices].square().mean()


def running(output, mask):
    return (output.cumsum(2) * mask).square().mean()


def middle(output, mask):
    return (output - output.flatten(1).median(1).values[:, None, None, None]).abs().mean()


def spectrum(output, mask):
    return (torch.fft.rfft2(output) * (1 + mask.mean())).abs().mean()


def waves(output, mask):
    wave = torch.complex(output, mask * output) ** 2
    return (wave / (1 + wave.abs().mean())).abs().mean() + torch.view_as_real(wave.sum()).square().sum()


def nearest(output, mask):
    pixels = torch.stack([output.flatten(), mask.flatten()], 1)
    return torch.cdist(pixels, PROTOTYPES).amin(1).mean() + torch.cdist(pixels[::40], pixels[1::40]).amin()


def white(output, mask):
    joined = torch.stack([output.flatten(1), mask.flatten(1)], 1)
    spread = joined @ joined.mT
    whole = torch.linalg.cholesky(spread).sum() + torch.linalg.solve(spread, joined).square().mean()
    return whole + torch.linalg.inv(spread).sum() + output.std() + (0 * output).std()


PROTOTYPES = torch.rand(30, 2).double()
LOSSES = {
    each.__name__: each
    for each in (lovasz, chosen, hardest, running, middle, spectrum, waves, nearest, white)
}


class Attending(nn.Module):
    """Every pixel of a small map attends to every other, on the way to a map of all pixels."""

    def __init__(self):
        super().__init__()
        self.below, self.above = nn.Conv2d(3, 8, 4, stride=4), nn.Conv2d(11, 1, 3, padding=1)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x):
        small = self.below(x).tanh()
        pixels = small.flatten(2).mT
        small = small + self.attention(pixels, pixels, pixels)[0].mT.reshape(small.shape)
        return self.above(torch.cat([functional.interpolate(small, scale_factor=4), x], 1))


class Transformer(nn.Module):
    """Patches, places, and a token for the class."""

    def __init__(self):
        super().__init__()
        self.patches, self.head = nn.Conv2d(3, 8, 4, stride=4), nn.Linear(8, 3)
        self.places, self.token = nn.Parameter(torch.randn(61, 8)), nn.Parameter(torch.randn(1, 1, 8))
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, x):
        tokens = self.patches(x).flatten(2).mT
        tokens = torch.cat([self.token.expand(len(x), -1, -1), tokens], 1) + self.places
        return self.head(self.layers(tokens)[:, 0])


class Windows(nn.Module):
    """Windows of 4 x 4 pixels, as of a Swin transformer, each shifted by its mean over the places."""

    def __init__(self):
        super().__init__()
        self.body = nn.Conv2d(3, 4, 1)

    def forward(self, x):
        y = self.body(x)
        n, channels, height, width = y.shape
        windows = y.view(n, channels, height // 4, 4, width // 4, 4)
        return (windows - windows.mean((2, 4), keepdim=True)).reshape(y.shape).square()


@pytest.mark.parametrize("options", [{"height": 7}, {"memory": "256KiB"}], ids=["height", "memory"])
@pytest.mark.parametrize("name", LOSSES)
def test_losses_that_need_all_pixels_at_once(name, options):
    require_equal(network(), LOSSES[name], IMAGE, MASK, axis=-2, **options)


@pytest.mark.parametrize("module", [Attending, Windows])
def test_modules_that_need_a_whole_map(module):
    def loss_fn(output, mask):
        return (output * mask).square().mean()

    torch.manual_seed(0)
    model = module().double()
    require_equal(model, loss_fn, IMAGE, MASK, height=8, axis=-2)
    out = torch.zeros_like(model(IMAGE))
    StreamedStep(model, loss_fn, height=8, axis=-2).predict(IMAGE, out)
    torch.testing.assert_close(out, model(IMAGE).detach())


def test_a_transformer_of_patches():
    torch.manual_seed(0)
    labels = torch.tensor([1, 2])
    require_equal(Transformer(), functional.cross_entropy, IMAGE, labels, height=8, axis=-2)


def test_the_plan_says_what_is_there_at_once_and_memory_holds():
    step = StreamedStep(network(), lovasz, memory="160KiB", axis=-2)
    plan = step.plan(IMAGE, MASK)
    values = 2 * IMAGE[:, 0].numel() * 8
    assert sum(plan.gathered.values()) == values == 30720
    assert "with all rows at once: 30.00 KiB, most for aten.sort" in str(plan)
    assert max(plan.rowless_bytes, *(stage.peak_bytes for stage in plan.stages)) < 160 * 1024
    assert any(stage.strips > 1 for stage in plan.stages)


@pytest.mark.parametrize("side", [-1, 1])
def test_the_plan_counts_a_mask_that_chooses_everything(side):
    def outside(output, mask):
        return output[side * mask < 0.5].square().mean() + functional.cross_entropy(
            output, mask[:, 0].long() * 0
        )

    mask = torch.zeros_like(MASK) if side > 0 else MASK
    step = StreamedStep(network(), outside, memory="256KiB", axis=-2)
    plan = step.plan(IMAGE, mask)
    assert plan.rowless_bytes > 4 * MASK.numel() * 8  # both maps, what is chosen, and its square or gradient
    assert peak_of(lambda: step(IMAGE, mask)) < 1.01 * max(
        plan.rowless_bytes, *(stage.peak_bytes for stage in plan.stages)
    )


def test_too_much_at_once_is_refused_with_the_bytes():
    step = StreamedStep(network(), lovasz, memory="64KiB")
    said = r"the loss .* aten.sort.* Take a loss without order.* it would take up to 60\.00 KiB, of which .*"
    with pytest.raises(UnsupportedModelError, match=rf"{said}, and 32\.00 KiB, half of memory="):
        step(IMAGE, MASK)


def test_what_is_decided_by_values_is_refused_with_its_place():
    def twice(output, mask):
        return functional.mse_loss(output[mask > 0], mask[mask > 0])

    def empty(output, mask):
        return output.mean() if mask.sum() == 0 else (output * mask).mean()

    for loss_fn in (twice, empty):
        place = rf"test_gathered.py, line \d+, in {loss_fn.__name__}"
        with pytest.raises(UnsupportedModelError, match=f"depends on values .*{place}.* make each mask once"):
            StreamedStep(network(), loss_fn, height=7)(IMAGE, MASK)


def test_tiles_are_refused_and_little_memory_takes_strips():
    with pytest.raises(
        UnsupportedModelError, match=r"aten.sort.* needs all rows at once. Give height= one number"
    ):
        StreamedStep(network(), lovasz, height=(8, 8))(IMAGE, MASK)
    plan = StreamedStep(network(), lovasz, memory="128KiB", axis=-2).plan(IMAGE, MASK)
    assert all(stage.width == IMAGE.shape[-1] for stage in plan.stages)


class Stopped(Exception):
    pass


@pytest.mark.parametrize("strips", [3, 9, 17, 20])  # of 7 that gather labels, scores, and go back
def test_a_stopped_step_goes_on(strips, tmp_path):
    def stop(progress):
        if progress.done == strips:
            raise Stopped

    options = {"height": 7, "axis": -2, "checkpoint": tmp_path / "step.pt", "checkpoint_seconds": 0.0}
    with pytest.raises(Stopped):
        StreamedStep(network(), lovasz, progress=stop, **options)(IMAGE, MASK)
    assert options["checkpoint"].exists()
    require_equal(network(), lovasz, IMAGE, MASK, **options)
    assert not options["checkpoint"].exists()


def test_pairs_of_what_is_chosen_are_refused_before_they_are_made():
    def pairs(output, mask):
        scores = output[mask > 0]
        return (scores[None] - scores[:, None]).relu().mean()

    step = StreamedStep(network(), pairs, memory="1MiB")

    def refused():
        with pytest.raises(
            UnsupportedModelError, match=r"up to 28\.\d+ MiB, of which aten.sub.* makes 28\.12 MiB"
        ):
            step(IMAGE, MASK)

    assert peak_of(refused) < 1 << 20


def test_random_choices_are_refused_with_what_to_do():
    def drawn(output, mask):
        return output.flatten()[torch.randperm(10)].mean()

    with pytest.raises(UnsupportedModelError, match="draw them before, and give them with the target"):
        StreamedStep(network(), drawn, height=7)(IMAGE, MASK)


def test_metrics_may_be_plain_numbers():
    def metric(output, mask):
        return {"median": output[mask == 1].median(), "values": torch.unique(mask).numel(), "one": 1}

    ((found),) = StreamedStep(network(), lovasz, height=7, axis=-2).evaluate([(IMAGE, MASK)], metric)
    torch.testing.assert_close(found["median"], metric(network()(IMAGE), MASK)["median"].detach())
    assert (found["values"], found["one"]) == (2, 1)


def test_metrics_that_sort():
    def area(output, mask):
        """Under the curve of true against false positives, by ranks."""
        ranks = output.flatten().argsort().argsort().double() + 1
        positive = mask.flatten()
        count = positive.sum()
        return ((ranks * positive).sum() - count * (count + 1) / 2) / (count * (len(ranks) - count))

    step = StreamedStep(network(), functional.mse_loss, height=7, axis=-2)
    (found,) = step.evaluate([(IMAGE, MASK)], area)
    torch.testing.assert_close(found, area(network()(IMAGE), MASK).detach())


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Conv2d(3, 4, 3, padding=1)

    def forward(self, image):
        return self.body(image).flatten(2).sort(-1).values[..., ::7].mean(-1)


class Total(nn.Module):
    def forward(self, vectors):
        return torch.cat(vectors).sum(0, keepdim=True)


def test_bags():
    images, label = [IMAGE[:1], torch.rand(1, 3, 24, 32).double()], torch.tensor([1])
    encoder, head = Encoder().double(), Total()
    wanted = functional.cross_entropy(head([encoder(each) for each in images]), label)
    bag = BagStep(encoder, head, functional.cross_entropy, height=8)
    torch.testing.assert_close(bag(images, label), wanted.detach())


def test_packed_strips():
    model = network()
    session = squeezebox.attach(model, noise=1e-3)
    found = StreamedStep(model, lovasz, height=16, axis=-2, context=session.step)(IMAGE, MASK)
    session.detach()
    torch.testing.assert_close(found, lovasz(network()(IMAGE), MASK).detach())


class Classes(nn.Module):
    """An image of numbers, each of which has a row whose gradient is divided by how often it occurs."""

    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(20, 8, scale_grad_by_freq=True), nn.Conv2d(8, 2, 3)

    def forward(self, x):
        return self.head(self.table(x[:, 0]).permute(0, 3, 1, 2))


def test_numbers_are_counted_in_all_of_the_image():
    torch.manual_seed(0)
    model = Classes().double()
    other, image = copy.deepcopy(model), torch.randint(20, (1, 1, 64, 32))
    loss = model(image).square().mean()
    loss.backward()
    step = StreamedStep(other, lambda output, _: output.square().mean(), memory="4MiB")
    torch.testing.assert_close(step(image, None), loss.detach())
    for mine, wanted in zip(other.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, wanted.grad)

"""Tiles give the whole image's loss, gradients and outputs, in double precision."""

import copy

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

from squeezebox.schema import OptionError, UnsupportedModelError
from squeezebox.streaming import StreamedStep
from tests.streaming.test_exact import (
    LOSSES,
    Classifier,
    Projected,
    networks,
    output_of,
    require_equal,
    small,
)
from tests.streaming.test_predict import IMAGE, TARGET, close, maps


@pytest.mark.slow
@given(
    model=networks(),
    size=st.tuples(st.integers(12, 32), st.integers(12, 32)),
    tile=st.tuples(st.integers(1, 20), st.integers(1, 11)),
    axis=st.sampled_from([-2, -1]),
    recompute=st.booleans(),
    spool=st.booleans(),
    seed=st.integers(0, 99),
)
@settings(max_examples=10, phases=[Phase.explicit, Phase.generate])
def test_random_networks(model, size, tile, axis, recompute, spool, seed):
    torch.manual_seed(seed)
    image = torch.randn(2, 2, *size, dtype=torch.float64)
    output = output_of(model, image)
    if output is None or min(output.shape[-2:]) < 2:
        return  # weights of one row have the image's other axis only
    options = {"height": tile, "axis": axis, "recompute": recompute, "spool": spool}
    weights = torch.randn_like(output)
    require_equal(model, lambda output, weights: (output.sin() * weights).mean(), image, weights, **options)


@pytest.mark.every(3)
@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("tile", [(5, 7), (22, 4)])
def test_losses(name, tile):
    loss_fn, target = LOSSES[name]
    image = torch.randn(2, 3, 22, 18, dtype=torch.float64)
    require_equal(small(), loss_fn, image, target, height=tile)


@pytest.mark.every(2)
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("spool", [False, True])
def test_batch_normalisation_and_a_head(spool, recompute):
    torch.manual_seed(0)
    image, labels = torch.randn(2, 3, 30, 20, dtype=torch.float64), torch.tensor([1, 4])
    options = {"height": (7, 6), "spool": spool, "recompute": recompute}
    require_equal(Classifier(), nn.CrossEntropyLoss(), image, labels, **options)


def test_predictions_metrics_and_the_images_gradient():
    model = maps()
    streamed = copy.deepcopy(model)
    step = StreamedStep(streamed, functional.cross_entropy, height=(16, 8))
    image = IMAGE.clone().requires_grad_()
    loss = functional.cross_entropy(model(image), TARGET)
    loss.backward()
    gradient = torch.zeros_like(IMAGE)
    close(step(IMAGE, TARGET, gradient=gradient), loss.detach())
    close(gradient, image.grad)
    for each in (model, streamed):
        each.eval()
    with torch.no_grad():
        output = model(IMAGE)
    close(step.predict(IMAGE), output)
    close(step.evaluate([(IMAGE, TARGET)])[0], functional.cross_entropy(output, TARGET))


@pytest.mark.slow
def test_an_interrupted_step_goes_on_to_the_bit(tmp_path):
    def stop(progress):
        if progress.done == 17:  # of 3 passes of 12 tiles
            raise KeyboardInterrupt

    def step(model, **options):
        return StreamedStep(
            model, functional.cross_entropy, height=(16, 8), checkpoint_seconds=0.0, **options
        )

    model, whole, path = maps(), maps(), tmp_path / "step"
    model.load_state_dict(whole.state_dict())
    with pytest.raises(KeyboardInterrupt):
        step(model, checkpoint=path, progress=stop)(IMAGE, TARGET)
    seen = []
    loss = step(model, checkpoint=path, progress=seen.append)(IMAGE, TARGET)
    assert seen[0].done == 17
    assert torch.equal(loss, step(whole, spool=False)(IMAGE, TARGET))
    for mine, theirs in zip(model.parameters(), whole.parameters(), strict=True):
        assert torch.equal(mine.grad, theirs.grad)


@pytest.mark.slow
def test_memory_below_a_strip_of_one_row_is_enough_for_tiles():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 16, 7, padding=3), nn.ReLU(), nn.Conv2d(16, 2, 3, padding=1))
    image, target = torch.randn(1, 3, 24, 4096), torch.randint(2, (1, 24, 4096))
    step = StreamedStep(copy.deepcopy(model), functional.cross_entropy, memory="1MiB", axis=-2)
    plan = step.plan(image, target)
    assert all(stage.width < 4096 for stage in plan.stages if stage.derives)
    assert " tiles of " in str(plan)
    close_to = functional.cross_entropy(model(image), target).detach()
    torch.testing.assert_close(step(image, target), close_to)


def test_what_tiles_cannot_do_is_refused_or_done_in_strips():
    def loss_fn(output, _):
        return sum(each.sin().mean() for each in output)

    image = torch.randn(2, 3, 22, 12, dtype=torch.float64)
    with pytest.raises(UnsupportedModelError, match="cannot be streamed exactly"):
        StreamedStep(Projected().double(), loss_fn, height=(5, 5))(image, None)
    require_equal(Projected(), loss_fn, image, None, memory="1MiB")
    with pytest.raises(OptionError, match="give rows of a strip, or rows and columns"):
        StreamedStep(Projected(), loss_fn, height=(5, 0))


class Bands(nn.Module):
    """The bands of every pixel attend to each other."""

    def __init__(self):
        super().__init__()
        self.values, self.last = nn.Conv2d(4, 24, 3, padding=1), nn.Conv2d(8, 2, 1)

    def forward(self, x):
        n, _, height, width = x.shape
        pixels = self.values(x).permute(0, 2, 3, 1).reshape(-1, 1, 4, 6)
        seen = functional.scaled_dot_product_attention(*pixels.split(2, -1))
        return self.last(seen.reshape(n, height, width, 8).permute(0, 3, 1, 2))


@pytest.mark.parametrize("tile", [(5, 7), (22, 4)])
def test_attention_within_each_pixel(tile):
    torch.manual_seed(0)
    image = torch.randn(2, 4, 22, 18, dtype=torch.float64)
    require_equal(Bands(), lambda output, _: output.sin().mean(), image, None, height=tile)

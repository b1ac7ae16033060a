import pytest
import torch
from torch import nn

from benchmarks import models
from benchmarks.training import classification_loss, train_briefly

PUBLISHED = {
    "alexnet": 61_100_840,
    "vgg16": 138_357_544,
    "resnet18": 11_689_512,
    "resnet50": 25_557_032,
    "efficientnet_b0": 5_288_548,
    "vit_b16": 86_567_656,
}
SIDES = {"alexnet": 63}
LARGE = ("alexnet", "vgg16", "resnet50", "vit_b16")


def _count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(("name", "parameters"), PUBLISHED.items())
def test_parameter_counts_are_the_published_ones(name: str, parameters: int) -> None:
    with torch.device("meta"):
        assert _count(models.build(name)) == parameters


def test_gpt2_small_has_its_published_size() -> None:
    with torch.device("meta"):
        gpt = models.build("gpt", 50257, width=768, depth=12, heads=12, context=1024)
    assert _count(gpt) == 124_439_808


def _small(name: str, device: str = "cpu") -> nn.Module:
    sizes: dict[str, dict[str, int]] = {
        "unet": {"width": 8},
        "vit": {"image": 32, "depth": 1},
        "vit_b16": {"image": 32, "depth": 1},
    }
    with torch.device(device):
        return models.build(name, 5, **sizes.get(name, {}))


def _check_one_step(name: str, device: str) -> nn.Module:
    """A forward and a backward with the promised output shape, reaching every parameter."""
    model = _small(name, device)
    side = SIDES.get(name, 32)
    inputs = torch.randn(2, 3, side, side, device=device)
    labels = torch.tensor([0, 4], device=device)
    if name == "gpt":
        inputs = labels = torch.ones(2, 8, dtype=torch.int64, device=device)
    logits = model(inputs)
    expected = {"gpt": (2, 8, 5), "unet": (2, 5, side, side)}
    assert logits.shape == expected.get(name, (2, 5))
    torch.autograd.backward(classification_loss(logits, labels))
    assert [path for path, parameter in model.named_parameters() if parameter.grad is None] == []
    return model


@pytest.mark.parametrize("name", models.NAMES)
def test_every_parameter_gets_a_gradient(name: str) -> None:
    _check_one_step(name, "meta")


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] if name in LARGE else []) for name in models.NAMES],
)
def test_gradients_are_finite(name: str) -> None:
    torch.manual_seed(0)
    for path, parameter in _check_one_step(name, "cpu").named_parameters():
        assert parameter.grad is not None
        assert parameter.grad.isfinite().all(), path


def test_gpt_does_not_look_ahead() -> None:
    gpt = models.build("gpt", 11, width=16, depth=1, heads=2, context=6).eval()
    tokens = torch.randint(11, (1, 6))
    changed = tokens.clone()
    changed[0, -1] = (changed[0, -1] + 1) % 11
    torch.testing.assert_close(gpt(tokens)[:, :-1], gpt(changed)[:, :-1])


def test_stochastic_depth_can_be_turned_off() -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 3, 32, 32)
    model = models.build("efficientnet_b0", 5, dropout=0.0, stochastic_depth=0.0)
    assert torch.equal(model(x), model(x))
    model = models.build("efficientnet_b0", 5, dropout=0.0, stochastic_depth=0.9)
    assert not torch.equal(model(x), model(x))


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"'resnet19'; choose one of alexnet, .*resnet18"):
        models.build("resnet19")


@pytest.mark.parametrize(("name", "sizes"), [("gpt", {"width": 10, "heads": 4}), ("vit", {"image": 30})])
def test_sizes_that_do_not_divide_are_refused(name: str, sizes: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="does not split"):
        models.build(name, 5, **sizes)


def test_brief_training_learns_and_is_deterministic() -> None:
    def losses() -> list[float]:
        torch.manual_seed(0)
        vit = models.build("vit", 2, width=32, depth=1, heads=2, image=16, patch=8).eval()
        labels = torch.tensor([0, 1, 0, 1])
        images = torch.randn(4, 3, 16, 16) + labels.view(-1, 1, 1, 1)
        found = train_briefly(vit, iter([(images, labels)] * 20), 20, lr=0.1)
        assert not vit.training
        return found

    first = losses()
    assert len(first) == 20
    assert first[-1] < 0.5 * first[0]
    assert first == losses()


def test_diverging_training_says_so() -> None:
    model = nn.Linear(2, 2)
    batch = (torch.full((1, 2), float("inf")), torch.tensor([0]))
    with pytest.raises(FloatingPointError, match="step 0 of 3; lower lr from 0.1"):
        train_briefly(model, iter([batch] * 3), 3, lr=0.1)

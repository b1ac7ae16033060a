import pytest
import torch
from torch import nn

from benchmarks import checkpointing, models
from benchmarks.training import classification_loss

SIZES: dict[str, dict[str, int]] = {
    "unet": {"width": 4, "depth": 2},
    "vit": {"image": 32, "width": 24, "depth": 3},
    "gpt": {"width": 16, "depth": 3, "heads": 2, "context": 8},
}
NETWORKS = ("resnet18", *SIZES)
LARGE = [pytest.param(name, marks=pytest.mark.slow) for name in ("vgg16", "alexnet", "efficientnet_b0")]


def _gradients(model: nn.Module, inputs: torch.Tensor, labels: torch.Tensor) -> list[torch.Tensor]:
    torch.manual_seed(1)
    model.zero_grad()
    torch.autograd.backward(classification_loss(model(inputs), labels))
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


@pytest.mark.parametrize("together", [1, 2])
@pytest.mark.parametrize("name", [*NETWORKS, *LARGE])
def test_every_part_is_run_again_and_gradients_stay_the_same(name: str, together: int) -> None:
    torch.manual_seed(0)
    model = models.build(name, 5, **SIZES.get(name, {}))
    side = 64 if name == "alexnet" else 32
    inputs, labels = torch.randn(2, 3, side, side), torch.tensor([0, 4])
    if name == "gpt":
        inputs, labels = torch.randint(5, (2, 8)), torch.randint(5, (2, 8))
    plain = _gradients(model, inputs, labels)
    runs = dict.fromkeys(_repeated(model), 0)

    def count(module: nn.Module, _: object) -> None:
        runs[module] += 1

    hooks = [module.register_forward_pre_hook(count) for module in runs]
    with checkpointing.checkpointed(model, together):
        recomputed = _gradients(model, inputs, labels)
    for hook in hooks:
        hook.remove()
    assert set(runs.values()) == {2}
    for one, other in zip(plain, recomputed, strict=True):
        torch.testing.assert_close(one, other)
    assert not any("forward" in vars(module) for module in model.modules())


def _repeated(model: nn.Module) -> list[nn.Module]:
    """Convolutions and attentions, the patches' apart, which every block has."""
    kinds = (nn.Conv2d, models.Attention)
    return [m for name, m in model.named_modules() if isinstance(m, kinds) and name != "patches"]


def test_as_many_segments_as_blocks_in_each() -> None:
    assert checkpointing.groups(models.build("gpt", 5, width=16, depth=9, heads=2)) == 3

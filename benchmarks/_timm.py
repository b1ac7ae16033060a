"""Small image networks as timm builds them, with random weights; needs timm (pip install timm).

Each entry of NETWORKS makes a model and a function that draws a batch of its keyword arguments.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch

from benchmarks._architectures import Made

_CLASSES, _COUNT = 10, 4


class Classifier(torch.nn.Module):
    """A network of images that returns its loss first."""

    def __init__(self, network: torch.nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor]:
        """The loss, as transformers' models return it first."""
        return (torch.nn.functional.cross_entropy(self.network(images), labels),)


def _make(name: str, side: int, **options: Any) -> Made:
    declare_torchvision()
    import timm

    network = timm.create_model(name, num_classes=_CLASSES, img_size=side, **options)
    draw = lambda: {  # noqa: E731
        "images": torch.randn(_COUNT, 3, side, side),
        "labels": torch.randint(_CLASSES, (_COUNT,)),
    }
    return Classifier(network), draw


@functools.cache
def declare_torchvision() -> None:
    """Name the kernels that torchvision's import asks for and its wheel lacks beside a CPU build of torch."""
    if torch.version.cuda is None:
        library = torch.library.Library("torchvision", "FRAGMENT")
        for name in ("nms", "qnms"):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _libraries.append(library)


_libraries: list[torch.library.Library] = []  # what a library defines lives as long as it does

NETWORKS: Mapping[str, Callable[[], Made]] = {
    "timm ViT": functools.partial(_make, "vit_tiny_patch16_224", 96),
    "timm Swin": functools.partial(_make, "swin_tiny_patch4_window7_224", 112, depths=(1, 1, 1, 1)),
    "timm CoAtNet": functools.partial(_make, "coatnet_pico_rw_224", 224),
    "timm MaxViT": functools.partial(_make, "maxvit_rmlp_pico_rw_256", 256),
}

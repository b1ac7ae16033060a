"""The demo's network: a plain stack of convolution, BatchNorm and ReLU at almost full width.

Narrow and deep, in channels-last layout (in the default one, convolutions make copies in a blocked
layout), so that the tensors saved for backward and not one operator's working set rule the peak.
"""

from __future__ import annotations

import torch
from torch import nn

_CHANNELS = (16,) * 12 + (32, 32)
_POOLED = 7  # height and width before the classifier
_NUM_CLASSES = 10


def network(seed: int) -> nn.Module:
    """The network with weights from ``seed``, for grey images ``[n, 1, 28, 28]``."""
    layers: list[nn.Module] = []
    previous = 1
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(seed)
        for channels in _CHANNELS:
            stride = 2 if previous not in (1, channels) else 1
            layers.append(_block(previous, channels, stride))
            previous = channels
        head = nn.Linear(previous * _POOLED**2, _NUM_CLASSES)
    model: nn.Module = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(_POOLED), nn.Flatten(), head)
    return model.to(  # type: ignore[no-any-return, call-overload]
        memory_format=torch.channels_last
    )


def _block(channels_in: int, channels_out: int, stride: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(channels_in, channels_out, 3, stride, 1, bias=False),
        nn.BatchNorm2d(channels_out),
        nn.ReLU(inplace=True),
    )

"""Gradient checkpointing of the benchmark networks, one or several of their blocks at a time.

Goes in: a network of benchmarks/models.py. Comes out: the same network, which keeps between forward and
backward only what passes from one segment of blocks to the next, and runs each segment again in backward.

A block is what its author repeats: a residual block, an inverted residual, a transformer's layer, a level
of the U-Net's way down or up, VGG's and AlexNet's convolutions from pooling to pooling (in-place
ReLUs forbid other cuts). Stems, and EfficientNet's head, are blocks of their own.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from benchmarks import models

# From what lives between two blocks to what lives after the second; the last tensor is the newest.
Block = Callable[..., tuple[Tensor, ...]]


def groups(model: nn.Module) -> int:
    """The customary number of blocks to a segment: the square root of all there are."""
    return max(1, round(max(len(blocks) for _, blocks in _trunks(model)) ** 0.5))


@contextlib.contextmanager
def checkpointed(model: nn.Module, together: int = 1) -> Iterator[None]:
    """Within it, `together` blocks in a row are one segment."""
    trunks = _trunks(model)
    for owner, blocks in trunks:
        segments = [_chain(blocks[start : start + together]) for start in range(0, len(blocks), together)]
        owner.forward = functools.partial(_run, segments)
    try:
        yield
    finally:
        for owner, _ in trunks:
            del owner.forward


def _run(segments: Sequence[Block], *state: Tensor) -> Tensor:
    for segment in segments:
        state = checkpoint(segment, *state, use_reentrant=False)
    return state[-1]


def _chain(blocks: Sequence[Block]) -> Block:
    def run(*state: Tensor) -> tuple[Tensor, ...]:
        for block in blocks:
            state = block(*state)
        return state

    return run


def _trunks(model: nn.Module) -> list[tuple[Any, list[Block]]]:
    """The modules whose forward is a row of blocks, and these."""
    if isinstance(model, models.UNet):
        return [(model, _levels(model))]
    if isinstance(model, models.VGG16 | models.AlexNet):
        return [(model.features, _pooled(model.features))]
    trunk = model.stages if isinstance(model, models.ResNet) else model.blocks
    ends = [getattr(model, name) for name in ("stem", "head") if hasattr(model, name)]
    return [*((end, [_single(end.forward)]) for end in ends), (trunk, _blocks(trunk))]


def _single(function: Callable[[Tensor], Tensor]) -> Block:
    return lambda x: (function(x),)


def _blocks(trunk: nn.Module) -> list[Block]:
    """The modules in a row, those of nested rows too."""
    children = [list(c) if type(c) is nn.Sequential else [c] for c in trunk.children()]
    return [_single(module) for row in children for module in row]


def _pooled(features: nn.Sequential) -> list[Block]:
    layers = list(features)
    ends = [number + 1 for number, layer in enumerate(layers) if isinstance(layer, nn.MaxPool2d)]
    return [_single(nn.Sequential(*layers[a:b])) for a, b in zip([0, *ends], ends, strict=False)]


def _levels(model: models.UNet) -> list[Block]:
    """The U-Net's levels; the maps that its way up still needs wait in front of the newest."""

    def down(level: nn.Module, *state: Tensor) -> tuple[Tensor, ...]:
        return *state, level(F.max_pool2d(state[-1], 2))

    def up(widen: nn.Module, merge: nn.Module, *state: Tensor) -> tuple[Tensor, ...]:
        *skips, skip, x = state
        return *skips, merge(torch.cat((skip, widen(x)), dim=1))

    first, *others = model.down
    ups = [functools.partial(up, *pair) for pair in zip(model.up, model.merge, strict=True)]
    last = _chain([ups.pop(), _single(model.classifier)])
    return [_single(first), *(functools.partial(down, level) for level in others), *ups, last]

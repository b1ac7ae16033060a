"""A fresh model of the whole width made as narrow as a pruned one's checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from squeezebox.pruning._narrow import put, save_with, set_sizes
from squeezebox.schema import OptionError


def load_pruned(model: torch.nn.Module, state_dict: Mapping[str, Any]) -> None:
    """Load a pruned model's ``state_dict()`` into a fresh model of the whole width, which gets as narrow.

    Shapes are all that is compared: a narrower network of the same layers would load too. Make the optimizer
    afterwards: its own ``load_state_dict`` then finds parameters of the shapes it knows.

    Args:
        model: as it is built without pruning. Its parameters stay the same objects.
        state_dict: of a model that :func:`squeezebox.prune` made narrower, or of one that it did not touch.

    Raises:
        OptionError: a name is missing or unknown, or a tensor is wider than the model's. The model is as it
            was then.
    """
    mine: dict[str, Tensor] = {
        name: tensor
        for name, tensor in model.state_dict(keep_vars=True).items()
        if isinstance(tensor, Tensor)
    }
    left_out = {name: each for name, each in model.named_buffers() if name in state_dict and name not in mine}
    mine |= left_out  # narrow ones, which pruning saves
    _check(mine, state_dict)
    save_with(model, left_out)
    narrowed = []
    for name, tensor in mine.items():
        shape = state_dict[name].shape
        if tensor.shape != shape:  # which channels stayed does not matter: their values come next
            put(tensor, tensor.detach()[tuple(map(slice, shape))].clone(memory_format=torch.preserve_format))
            narrowed.append(tensor)
    set_sizes(model, narrowed)
    model.load_state_dict(state_dict)


def _check(mine: Mapping[str, Tensor], state_dict: Mapping[str, Any]) -> None:
    other = sorted(mine.keys() ^ {name for name, value in state_dict.items() if isinstance(value, Tensor)})
    if other:
        raise OptionError(
            f"the model and the checkpoint do not have the same tensors: {other[0]} is in one of them alone "
            f"({len(other)} such names); build the model as the training did."
        )
    for name, tensor in mine.items():
        shape = state_dict[name].shape
        if len(shape) != tensor.dim() or any(map(int.__gt__, shape, tensor.shape)):
            raise OptionError(
                f"{name} has shape {list(shape)} in the checkpoint and {list(tensor.shape)} in the model, "
                "which no channels less explain; build the model as the training did."
            )

"""What an optimizer holds and what its step takes for a moment."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from typing import Any

import torch

from squeezebox.memory import parts_of

# Tensors of a parameter's size that torch's own optimizers keep, take while they step one parameter, and take
# where they step all parameters together.
_STATES = {"SGD": 1, "Adam": 2, "AdamW": 2, "NAdam": 2, "RAdam": 2, "Adamax": 2, "RMSprop": 1, "Adagrad": 1}
_TRANSIENTS = {"Adam": 2, "AdamW": 2, "NAdam": 2, "RAdam": 2, "Adamax": 1, "RMSprop": 1, "Adagrad": 1}
_TOGETHER = {"Adam": 1, "AdamW": 1, "NAdam": 1, "RAdam": 1, "Adamax": 1, "RMSprop": 1, "Adagrad": 2}
# Those that take weight decay, or the negative of a gradient, in memory that they need later anyway.
_REUSING = frozenset({"Adam", "AdamW", "RAdam", "Adamax", "Adagrad"})


def state_bytes(model: torch.nn.Module, optimizer: torch.optim.Optimizer | None) -> int:
    """Bytes of the optimizer's state as it is, or as its first step will make it."""
    if optimizer is None:
        return 0
    states = [value for state in optimizer.state.values() for value in state.values()]
    tensors = [value for value in states if isinstance(value, torch.Tensor)]
    if tensors:
        return sum(part.nbytes for tensor in tensors for part in parts_of(tensor))
    name = type(optimizer).__name__
    plain = name == "SGD" and all(group["momentum"] == 0.0 for group in optimizer.param_groups)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return 0 if plain else _STATES.get(name, 0) * sum(parameter.nbytes for parameter in trained)


def transient_bytes(gradients: Iterable[torch.Tensor], optimizer: torch.optim.Optimizer | None) -> int:
    """Bytes that an optimizer's step allocates: for its largest parameter, or for all of a group together.

    Torch steps them together where ``foreach=True`` says so, and of itself on a device; ``fused=True`` needs
    nothing.
    """
    if optimizer is None:
        return 0
    stepped = {gradient.untyped_storage().data_ptr() for gradient in gradients}
    return max(
        (_of_group(type(optimizer).__name__, group, stepped) for group in optimizer.param_groups), default=0
    )


def _of_group(name: str, group: Mapping[str, Any], stepped: Container[int]) -> int:
    gradients = (each.grad for each in group["params"] if each.grad is not None)
    found = [part for gradient in gradients for part in parts_of(gradient)]
    sizes: list[int] = [each.nbytes for each in found if each.untyped_storage().data_ptr() in stepped]
    if group.get("fused") or not sizes:
        return 0
    decays = bool(group.get("weight_decay")) and name != "AdamW" and not group.get("decoupled_weight_decay")
    copied = decays or bool(group.get("maximize"))
    on_device = any(each.is_cuda for each in found)
    if group.get("foreach") or (on_device and group.get("foreach") is None):
        return (_TOGETHER.get(name, 0) + (copied and name not in _REUSING)) * sum(sizes)
    more = name == "SGD" and (bool(group.get("nesterov")) or (decays and bool(group.get("maximize"))))
    return (_TRANSIENTS.get(name, 0) + copied + more) * max(sizes)

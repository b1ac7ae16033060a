"""What an optimizer holds and what its step takes for a moment."""

from __future__ import annotations

from collections.abc import Iterable

import torch

# Tensors of a parameter's size that torch's own optimizers keep, and take while they step one parameter.
_STATES = {"SGD": 1, "Adam": 2, "AdamW": 2, "NAdam": 2, "RAdam": 2, "Adamax": 2, "RMSprop": 1, "Adagrad": 1}
_TRANSIENTS = {"Adam": 2, "AdamW": 2, "NAdam": 2, "RAdam": 2, "Adamax": 1, "RMSprop": 1, "Adagrad": 1}


def state_bytes(model: torch.nn.Module, optimizer: torch.optim.Optimizer | None) -> int:
    """Bytes of the optimizer's state as it is, or as its first step will make it."""
    if optimizer is None:
        return 0
    states = [value for state in optimizer.state.values() for value in state.values()]
    tensors = [value for value in states if isinstance(value, torch.Tensor)]
    if tensors:
        return sum(tensor.nbytes for tensor in tensors)
    name = type(optimizer).__name__
    plain = name == "SGD" and all(group["momentum"] == 0.0 for group in optimizer.param_groups)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return 0 if plain else _STATES.get(name, 0) * sum(parameter.nbytes for parameter in trained)


def transient_bytes(gradients: Iterable[torch.Tensor], optimizer: torch.optim.Optimizer | None) -> int:
    """Bytes that an optimizer's step allocates: for its largest parameter, on a device for all together."""
    gradients, name = list(gradients), type(optimizer).__name__
    if optimizer is not None and any(gradient.is_cuda for gradient in gradients):
        groups = optimizer.param_groups
        together = all(group.get("foreach") is not False and not group.get("fused") for group in groups)
        taken = name in _TRANSIENTS or any(group.get("weight_decay") for group in groups)
        if together:
            return taken * sum(gradient.nbytes for gradient in gradients)
    return _TRANSIENTS.get(name, 0) * max((gradient.nbytes for gradient in gradients), default=0)

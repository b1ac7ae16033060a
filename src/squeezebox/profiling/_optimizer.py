"""What an optimizer holds and what its step takes for a moment."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from squeezebox.memory import parts_of
from squeezebox.schema import OptionError

MakeOptimizer = Callable[[Any], torch.optim.Optimizer]
_NAMED: Mapping[str, MakeOptimizer] = MappingProxyType(
    {
        "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.01),
        "sgd-momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9),
        "adam": torch.optim.Adam,
        "adamw": torch.optim.AdamW,
    }
)


class _Known(NamedTuple):
    """Tensors of a parameter's size that an optimizer of torch's own keeps and takes.

    ``together``: where it steps all parameters together, else one by one. ``reuses``: weight decay, or the
    negative of a gradient, goes into memory that it needs later anyway.
    """

    states: int = 0
    one_by_one: int = 0
    together: int = 0
    reuses: bool = False


_KNOWN = {
    "SGD": _Known(states=1),
    "Adam": _Known(states=2, one_by_one=2, together=1, reuses=True),
    "AdamW": _Known(states=2, one_by_one=2, together=1, reuses=True),
    "NAdam": _Known(states=2, one_by_one=2, together=1),
    "RAdam": _Known(states=2, one_by_one=2, together=1, reuses=True),
    "Adamax": _Known(states=2, one_by_one=1, together=1, reuses=True),
    "RMSprop": _Known(states=1, one_by_one=1, together=1),
    "Adagrad": _Known(states=1, one_by_one=1, together=2, reuses=True),
}
_UNKNOWN = _Known()


def optimizer_named(name: str) -> MakeOptimizer:
    """What makes "sgd", "sgd-momentum", "adam" or "adamw" of parameters; none has weight decay but AdamW.

    Raises:
        OptionError: there is none of that name.
    """
    if name not in _NAMED:
        raise OptionError(f"no optimizer '{name}'; there are {', '.join(_NAMED)}.")
    return _NAMED[name]


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
    return 0 if plain else _KNOWN.get(name, _UNKNOWN).states * sum(parameter.nbytes for parameter in trained)


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
    known = _KNOWN.get(name, _UNKNOWN)
    decays = bool(group.get("weight_decay")) and name != "AdamW" and not group.get("decoupled_weight_decay")
    copied = decays or bool(group.get("maximize"))
    on_device = any(each.is_cuda for each in found)
    if group.get("foreach") or (on_device and group.get("foreach") is None):
        return (known.together + (copied and not known.reuses)) * sum(sizes)
    more = name == "SGD" and (bool(group.get("nesterov")) or (decays and bool(group.get("maximize"))))
    return (known.one_by_one + copied + more) * max(sizes)

"""What an optimizer holds and what its step takes for a moment."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from squeezebox.memory import parts_of
from squeezebox.profiling._record import step_counts, tensors_of
from squeezebox.schema import OptionError, in_one_line

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
    negative of a gradient, goes into memory that it needs later anyway. ``numbers``: tensors of one element
    that it keeps for each, such as how many steps there were.
    """

    states: int = 0
    one_by_one: int = 0
    together: int = 0
    reuses: bool = False
    numbers: int = 0


_KNOWN = {
    "SGD": _Known(states=1),
    "Adam": _Known(states=2, one_by_one=2, together=1, reuses=True, numbers=1),
    "AdamW": _Known(states=2, one_by_one=2, together=1, reuses=True, numbers=1),
    "NAdam": _Known(states=2, one_by_one=2, together=1, numbers=2),
    "RAdam": _Known(states=2, one_by_one=2, together=1, reuses=True, numbers=1),
    "Adamax": _Known(states=2, one_by_one=1, together=1, reuses=True, numbers=1),
    "RMSprop": _Known(states=1, one_by_one=1, together=1, numbers=1),
    "Adagrad": _Known(states=1, one_by_one=1, together=2, reuses=True, numbers=1),
    "ASGD": _Known(states=1, one_by_one=3, together=3, numbers=3),
}
_UNKNOWN = _Known(one_by_one=3, together=3)  # more than any of these take


def optimizer_named(name: str) -> MakeOptimizer:
    """What makes "sgd", "sgd-momentum", "adam" or "adamw" of parameters; none has weight decay but AdamW.

    Raises:
        OptionError: there is none of that name.
    """
    if name not in _NAMED:
        raise OptionError(f"no optimizer '{name}'; there are {', '.join(_NAMED)}.")
    return _NAMED[name]


def state_bytes(model: torch.nn.Module, optimizer: torch.optim.Optimizer | None) -> int:
    """Bytes of the optimizer's state as it is, and as steps will make it where it has none yet.

    Raises:
        OptionError: that is not known of an optimizer that is none of torch's.
    """
    if optimizer is None:
        return 0
    there = {key: tensors_of(state) for key, state in optimizer.state.items()}
    total: int = sum(part.nbytes for tensors in there.values() for each in tensors for part in parts_of(each))
    missing = [
        (group, [each for each in group["params"] if each.requires_grad and not there.get(each)])
        for group in optimizer.param_groups
    ]
    name = _kind(optimizer)
    if name == "LBFGS":  # one state for all parameters, which grows by two of their size up to its history
        (group,) = optimizer.param_groups
        total = max(total, (2 + 2 * group["history_size"]) * sum(each.nbytes for each in group["params"]))
    elif name in _KNOWN:
        total += sum(_states(name, group) * each.nbytes for group, own in missing for each in own)
        total += sum(_KNOWN[name].numbers * _number_bytes(group) * len(own) for group, own in missing)
    else:
        total = total or _first_states(optimizer, missing)
    return total


def _kind(optimizer: torch.optim.Optimizer) -> str:
    """The name of torch's own class that it is, derives from or, as accelerate's, wraps."""
    inner = getattr(optimizer, "optimizer", optimizer)
    names = [each.__name__ for each in type(inner).__mro__]
    return next((name for name in names if name in _KNOWN), names[0])


def _number_bytes(group: Mapping[str, Any]) -> int:
    wide = torch.get_default_dtype() is torch.float64 and not group.get("fused")
    return 8 if wide else 4


def wraps_another(optimizer: torch.optim.Optimizer) -> bool:
    """Whether its step, and so a copy's, is another optimizer's, on parameters of that one."""
    return any(isinstance(each, torch.optim.Optimizer) for each in vars(optimizer).values())


def _first_states(
    optimizer: torch.optim.Optimizer, missing: Sequence[tuple[Mapping[str, Any], Sequence[torch.Tensor]]]
) -> int:
    """Bytes of the state that a first step makes, which is taken on the meta device."""
    inner = getattr(optimizer, "optimizer", optimizer)
    made, groups = copy.copy(inner), list[dict[str, Any]]()
    for group, parameters in missing:
        twins = [torch.nn.Parameter(torch.empty_like(each, device="meta")) for each in parameters]
        for twin in twins:
            twin.grad = torch.empty_like(twin)
        groups.append({**group, "params": twins})
    made.__dict__.update({**vars(inner), "state": defaultdict(dict), "param_groups": groups})
    step = type(inner).step
    try:
        if wraps_another(inner):
            raise TypeError("it steps another optimizer")
        with step_counts():
            getattr(step, "__wrapped__", step)(made)
    except Exception as error:
        raise OptionError(
            f"how much state {type(inner).__name__} will have is not known before its first step: "
            f"{in_one_line(error)}. Call optimizer.step() once before, or leave the optimizer out."
        ) from error
    return sum(each.nbytes for state in made.state.values() for each in tensors_of(state))


class ParameterNeeds(NamedTuple):
    """Bytes that one parameter's update needs: its state between steps, and what the update takes on top.

    The state's tensors of one element are left out: they stay in memory.
    """

    state_bytes: int
    update_bytes: int


def parameter_needs(optimizer: torch.optim.Optimizer) -> dict[int, ParameterNeeds]:
    """Of every parameter that is trained, by its identity, were it updated by itself."""
    name = _kind(optimizer)
    return {
        id(parameter): ParameterNeeds(
            _states(name, group) * parameter.nbytes, _alone(name, group) * parameter.nbytes
        )
        for group in optimizer.param_groups
        for parameter in group["params"]
        if parameter.requires_grad
    }


def _states(name: str, group: Mapping[str, Any]) -> int:
    """Tensors of a parameter's size that live from one step to the next."""
    if name == "SGD":
        return int(group["momentum"] != 0.0)
    more = bool(group.get("amsgrad"))
    if name == "RMSprop":
        more = bool(group["centered"]) + (group["momentum"] > 0.0)
    return _KNOWN.get(name, _UNKNOWN).states + more


def transient_bytes(gradients: Iterable[torch.Tensor], optimizer: torch.optim.Optimizer | None) -> int:
    """Bytes that an optimizer's step allocates: for its largest parameter, or for all of a group together.

    Torch steps them together where ``foreach=True`` says so, and of itself on a device; ``fused=True`` needs
    nothing.
    """
    if optimizer is None:
        return 0
    stepped = {gradient.untyped_storage().data_ptr() for gradient in gradients}
    name = _kind(optimizer)
    return max((_of_group(name, group, stepped) for group in optimizer.param_groups), default=0)


def _of_group(name: str, group: Mapping[str, Any], stepped: Container[int]) -> int:
    gradients = (each.grad for each in group["params"] if each.grad is not None)
    found = [part for gradient in gradients for part in parts_of(gradient)]
    sizes: list[int] = [each.nbytes for each in found if each.untyped_storage().data_ptr() in stepped]
    if group.get("fused") or not sizes:
        return 0
    if group.get("foreach") or (any(each.is_cuda for each in found) and group.get("foreach") is None):
        return _alone(name, {**group, "foreach": True}) * sum(sizes)
    return _alone(name, group) * max(sizes)


def _alone(name: str, group: Mapping[str, Any]) -> int:
    """Tensors of a parameter's size that its update takes where it is updated by itself."""
    if group.get("fused"):
        return 0
    known, copied = _KNOWN.get(name, _UNKNOWN), _copies(name, group)
    if group.get("foreach"):
        return known.together + (copied and not known.reuses)
    more = name == "SGD" and (
        bool(group.get("nesterov")) or (_decays(name, group) and bool(group["maximize"]))
    )
    return known.one_by_one + copied + more


def _copies(name: str, group: Mapping[str, Any]) -> bool:
    """Whether the gradient is not used as it is."""
    return _decays(name, group) or bool(group.get("maximize"))


def _decays(name: str, group: Mapping[str, Any]) -> bool:
    """Whether weight decay goes into the gradient."""
    return bool(group.get("weight_decay")) and name != "AdamW" and not group.get("decoupled_weight_decay")

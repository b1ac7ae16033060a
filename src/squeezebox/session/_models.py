"""What a model holds, and putting it back as it was."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from squeezebox.capture import is_plain, leaves


@contextlib.contextmanager
def restored(model: torch.nn.Module, *others: torch.nn.Module) -> Iterator[None]:
    """Put gradients of the model, and buffers of all modules and random states back afterwards."""
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    buffers = [
        (module, name, buffer, buffer.clone())
        for each in (model, *others)
        for module in each.modules()
        for name, buffer in module.named_buffers(recurse=False)
    ]
    random = random_states(model)
    try:
        yield
    finally:
        for parameter, gradient in gradients:
            parameter.grad = gradient
        with torch.no_grad():
            for module, name, buffer, value in buffers:
                buffer.copy_(value)
                module._buffers[name] = buffer  # the module may have put another one in its place
        torch.set_rng_state(random[0])
        for state in random[1:]:
            torch.cuda.set_rng_state(state, device_of(model))


def random_states(model: torch.nn.Module) -> list[torch.Tensor]:
    """Of the host's random numbers, and of the model's device's if that has its own."""
    device = device_of(model)
    states = [torch.get_rng_state()]
    return [*states, torch.cuda.get_rng_state(device)] if device.type == "cuda" else states


@contextlib.contextmanager
def ungraded(loss: torch.Tensor, model: torch.nn.Module) -> Iterator[None]:
    """Leave the gradients of everything but the model as they were: of a loss's own parameters, say."""
    own = {id(parameter) for parameter in model.parameters()}
    before = [(leaf, leaf.grad) for leaf in leaves(loss) if id(leaf) not in own]
    for leaf, _ in before:
        leaf.grad = None
    try:
        yield
    finally:
        for leaf, gradient in before:
            leaf.grad = gradient


def gradient_noise(exact: Iterable[torch.Tensor], lossy: Iterable[torch.Tensor]) -> float:
    """Squared error of all gradients over their squared norm; NaN where that norm is zero."""
    pairs = list(zip(exact, lossy, strict=True))
    energy = sum(_energy(gradient) for gradient, _ in pairs)
    return sum(_energy(a - b) for a, b in pairs) / energy if energy else math.nan


def mean_momentum(model: torch.nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[str, float]:
    """Mean |momentum| of every parameter; of its gradient where the optimizer keeps none."""
    found: dict[str, float] = {}
    for name, parameter in model.named_parameters():
        state = optimizer.state.get(parameter, {}) if optimizer is not None else {}
        momentum = state.get("momentum_buffer", state.get("exp_avg", parameter.grad))
        if isinstance(momentum, torch.Tensor):
            found[name] = float(momentum.abs().mean())
    return found


def _energy(tensor: torch.Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor, dtype=torch.float32)) ** 2


def held_by(model: torch.nn.Module) -> Iterator[torch.Tensor]:
    """Parameters and buffers, some twice: quicker than torch's own lists, which name each."""
    stack, seen = [model], {model}
    while stack:
        module = stack.pop()
        for tensor in itertools.chain(module._parameters.values(), module._buffers.values()):
            if tensor is not None:
                yield tensor
        parts = [part for part in module._modules.values() if part is not None and part not in seen]
        seen.update(parts)
        stack.extend(parts)


def names_of(model: torch.nn.Module) -> dict[int, str]:
    """Of the parameters, by their identity."""
    return {id(parameter): name for name, parameter in model.named_parameters()}


def device_of(model: torch.nn.Module) -> torch.device:
    """The first parameter's; the CPU without any."""
    return next((parameter.device for parameter in model.parameters()), torch.device("cpu"))


def tensors_in(values: Any) -> Iterator[torch.Tensor]:
    """Every tensor in tuples, lists and dictionaries, however deep."""
    if isinstance(values, torch.Tensor):
        yield values
    elif isinstance(values, Mapping):
        yield from tensors_in(list(values.values()))
    elif isinstance(values, (list, tuple)):
        for value in values:
            yield from tensors_in(value)


def nbytes_of(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the tensors' storages, each once."""
    storages = (tensor.untyped_storage() for tensor in tensors if is_plain(tensor.data))
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())


def persistent(model: torch.nn.Module, optimizer: torch.optim.Optimizer | None) -> list[torch.Tensor]:
    """Gradients and optimizer state as they are now; of sharded ones, this rank's part."""
    gradients = [each.grad for each in model.parameters() if each.grad is not None]
    state = optimizer.state.values() if optimizer is not None else []
    states = tensors_in([list(values.values()) for values in state])
    return [each.to_local() if hasattr(each, "to_local") else each for each in (*gradients, *states)]

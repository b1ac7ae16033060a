"""What a model holds, and putting it back as it was."""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import random
import types
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch

from squeezebox import codecs
from squeezebox.capture import is_plain, leaves
from squeezebox.memory import parts_of


@contextlib.contextmanager
def restored(
    model: torch.nn.Module, *others: torch.nn.Module, leaves: Iterable[torch.Tensor] = ()
) -> Iterator[None]:
    """Put gradients of the model, and buffers of all modules and random states back afterwards.

    Those of ``leaves`` too, which have none meanwhile. What a forward writes into parameters stays there.
    """
    own = [*leaves]
    gradients = [(each, gradient_of(each)) for each in (*model.parameters(), *own)]
    for each in own:
        each.grad = None
    buffers = [
        (module, name, buffer, buffer.clone())
        for each in (model, *others)
        for module in each.modules()
        for name, buffer in module.named_buffers(recurse=False)
    ]
    held = [
        value for each in (model, *others) for module in each.modules() for value in vars(module).values()
    ]
    own_states = [(each, each.get_state()) for each in held if isinstance(each, torch.Generator)]
    drawn = random_states(model)
    python, numpy = random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        torch.set_rng_state(drawn[0])
        for state in drawn[1:]:
            torch.cuda.set_rng_state(state, device_of(model))
        random.setstate(python)
        np.random.set_state(numpy)
        for generator, state in own_states:
            generator.set_state(state)
        for parameter, gradient in gradients:
            if parameter.is_leaf:
                parameter.grad = gradient
        with torch.no_grad():
            for module, name, buffer, value in buffers:
                if not _is_expanded(buffer):
                    buffer.copy_(value)
                module._buffers[name] = buffer  # the module may have put another one in its place


_MOST_PARTS = 1000  # of a container; longer ones are data


def modules_of(function: object, depth: int = 4) -> Iterator[torch.nn.Module]:
    """Modules that a function is, belongs to, closes over, names or has as arguments; some come twice."""
    if isinstance(function, torch.nn.Module):
        yield function
    elif depth:
        for part in _parts(function):
            yield from modules_of(part, depth - 1)


def _parts(value: object) -> Iterable[object]:
    """What a function or a container has within, and what the call of another object names of its own."""
    if isinstance(value, functools.partial):
        return value.func, *value.args, *value.keywords.values()
    if isinstance(value, types.MethodType):
        own, code = getattr(value.__self__, "__dict__", {}), getattr(value.__func__, "__code__", None)
        named = [own.get(name) for name in code.co_names] if code is not None else []
        return value.__func__, value.__self__, *named
    if isinstance(value, types.FunctionType):
        cells = [each.cell_contents for each in value.__closure__ or () if each != types.CellType()]
        named = [value.__globals__.get(name) for name in value.__code__.co_names]
        return *cells, *named, *(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()
    if isinstance(value, (dict, list, tuple)):
        parts = value.values() if isinstance(value, dict) else value
        return parts if len(parts) <= _MOST_PARTS else ()
    call = type(value).__call__ if callable(value) else None
    return [types.MethodType(call, value)] if isinstance(call, types.FunctionType) else []


def _is_expanded(tensor: torch.Tensor) -> bool:
    """Whether elements share memory, so that nothing can be written in place."""
    if tensor.layout is not torch.strided:
        return False
    return any(not stride and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


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
    """Squared error of all gradients over their squared norm; NaN where that norm is zero, else no NaN."""
    pairs = list(zip(exact, lossy, strict=True))
    energy = sum(codecs.energy(gradient) for gradient, _ in pairs)
    if not energy:
        return math.nan
    noise = sum(codecs.energy(a - b) for a, b in pairs) / energy
    return math.inf if math.isnan(noise) else noise


def mean_momentum(model: torch.nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[str, float]:
    """Mean |momentum| of every parameter; of its gradient where the optimizer keeps none."""
    found: dict[str, float] = {}
    for name, parameter in model.named_parameters():
        state = optimizer.state.get(parameter, {}) if optimizer is not None else {}
        momentum = state.get("momentum_buffer", state.get("exp_avg", gradient_of(parameter)))
        if isinstance(momentum, torch.Tensor):
            found[name] = codecs.mean_abs(momentum)
    return found


def gradient_of(parameter: torch.Tensor) -> torch.Tensor | None:
    """None of one that was computed, as in meta-learning: torch warns of those."""
    return parameter.grad if parameter.is_leaf else None


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
    parts = (part for tensor in tensors for part in parts_of(tensor.data))
    storages = (part.untyped_storage() for part in parts if is_plain(part))
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())


def viewed_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the tensors themselves: a batch may be a view of all the data, which is no step's."""
    parts = [part for tensor in tensors for part in parts_of(tensor.data) if is_plain(part)]
    seen = {(part.untyped_storage()._cdata, part.storage_offset()): part for part in parts}
    return sum(min(part.nbytes, part.untyped_storage().nbytes()) for part in seen.values())


def persistent(model: torch.nn.Module, optimizer: torch.optim.Optimizer | None) -> list[torch.Tensor]:
    """Gradients and optimizer state as they are now; of sharded ones this rank's part, of sparse ones all."""
    gradients = [each for each in map(gradient_of, model.parameters()) if each is not None]
    state = optimizer.state.values() if optimizer is not None else []
    states = tensors_in([list(values.values()) for values in state])
    local = (each.to_local() if hasattr(each, "to_local") else each for each in (*gradients, *states))
    return [part for each in local for part in parts_of(each)]

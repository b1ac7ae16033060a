"""What packed optimizer state costs: the noise of its updates, and their time."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from squeezebox.codecs import StateCodes
from squeezebox.optim import SMALL_BYTES, Products, ProductTensor, Updates, refuse_unknown, sliceable
from squeezebox.profiling import StepProfiler
from squeezebox.schema import OptionError
from squeezebox.steps import device_of


@contextlib.contextmanager
def marked(model: torch.nn.Module, profiler: StepProfiler, sliced: Sequence[str]) -> Iterator[None]:
    """Note where each parameter's gradient is complete; those to be ``sliced`` are made after that."""

    def mark(name: str, parameter: torch.Tensor) -> None:
        if parameter.grad is not None and parameter.grad.layout is torch.strided:
            profiler.gradient(name)
        if isinstance(parameter.grad, ProductTensor):
            parameter.grad = parameter.grad.load()

    with _looking_at_gradients(model, sliced, mark):
        yield


@contextlib.contextmanager
def found_sliced(model: torch.nn.Module, sliced: list[str]) -> Iterator[None]:
    """Note the weights whose gradient comes as a product, and is the same to the bit in slices."""

    def note(name: str, parameter: torch.Tensor) -> None:
        if isinstance(parameter.grad, ProductTensor):
            if parameter.grad.is_equal_in_slices:
                sliced.append(name)
            parameter.grad = parameter.grad.load()

    with _looking_at_gradients(model, sliceable(model), note):
        yield


@contextlib.contextmanager
def _looking_at_gradients(
    model: torch.nn.Module, sliced: Sequence[str], look: Callable[[str, torch.Tensor], None]
) -> Iterator[None]:
    """Call ``look`` with each parameter whose gradient is complete, a product for those to be ``sliced``."""
    products = Products(model, sliced)
    hooks = [
        parameter.register_post_accumulate_grad_hook(functools.partial(look, name))
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and parameter.is_leaf
    ]
    try:
        yield
    finally:
        products.close()
        for hook in hooks:
            hook.remove()


_ELEMENTS, _STEPS = 4096, 1000  # so long an average of a thousand steps takes to be as wrong as it will be
_SPREAD = 1.0  # of the logarithm of elements' gradients in a block
_TIMED, _REPEATS = 1 << 18, 5
_NOT_OURS = frozenset({"lr", "weight_decay", "capturable"})  # make no difference to the error
_CODED = 4  # bytes of an element, at most


@dataclass(frozen=True, slots=True)
class StateCost:
    """State in ``bits`` an element: relative squared error of updates, and seconds an element of these."""

    bits: int
    noise: float
    seconds: float

    def nbytes(self, numel: int) -> int:
        """Of one tensor."""
        return StateCodes.bytes_of(numel, self.bits)


def state_costs(
    optimizer: torch.optim.Optimizer, update_noise: float, device: torch.device
) -> list[tuple[StateCost, ...]]:
    """For each group of an optimizer, the codes of which updates have at most so much noise.

    The noise is that of the optimizer itself on random gradients: independent from step to step, of sizes
    that differ e-fold within a block. Gradients that agree from step to step have less.
    """
    known: dict[str, tuple[StateCost, ...]] = {}
    found = []
    for group in optimizer.param_groups:
        own = optimizer.defaults.keys() - _NOT_OURS
        settings = {key: value for key, value in group.items() if key in own}
        name = repr(sorted(settings.items()))
        if name not in known:
            known[name] = tuple(
                StateCost(bits, noise, _seconds(type(optimizer), settings, bits, device))
                for bits in (16, 8)
                if not settings.get("centered")  # a difference of averages, of which a root is taken
                and (noise := _noise(type(optimizer), settings, bits)) <= update_noise
            )
        found.append(known[name])
    return found


def packed_updates(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer | None, update_noise: float
) -> Updates:
    """The optimizer's own step, with its state in as few bits as the noise of updates allows.

    Raises:
        OptionError: there is no optimizer, its step is not parameter by parameter, parameters are sharded, or
            the noise is out of range, or less than that of any code.
    """
    check_share("update_noise", update_noise, "of updates")
    if optimizer is None:
        raise OptionError("update_noise is about an optimizer's state, and none was given; pass optimizer=.")
    refuse_unknown(optimizer)
    if any(hasattr(parameter, "to_local") for parameter in model.parameters()):
        raise OptionError("state of sharded parameters (fully_shard) is not packed; leave update_noise out.")
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    groups = state_costs(optimizer, update_noise, device_of(model))
    if not any(groups):
        raise OptionError(
            f"update_noise {update_noise:g} is less than what {type(optimizer).__name__} has with state in "
            "16 bits under these settings; allow more, or leave it out."
        )
    packed = {
        names[id(parameter)]: min(code.bits for code in codes)
        for group, codes in zip(optimizer.param_groups, groups, strict=True)
        for parameter in group["params"]
        if codes and id(parameter) in names and can_be_packed(parameter)
    }
    return Updates(model, optimizer, in_backward=False, states=(), packed=packed, gradients=(), folder=None)


def can_be_packed(parameter: torch.Tensor) -> bool:
    """Whether its state is worth it; codes are made of float32."""
    return parameter.nbytes >= SMALL_BYTES and parameter.element_size() <= _CODED


def check_share(name: str, noise: object, of_what: str) -> None:
    """OptionError unless it is a number between 0 and 1."""
    if not isinstance(noise, float) or not 0.0 < noise < 1.0:
        raise OptionError(
            f"{name} {noise!r} is not between 0 and 1; it is the squared error {of_what} over their squared "
            "norm, such as 0.02."
        )


def _noise(kind: type[torch.optim.Optimizer], settings: dict[str, Any], bits: int) -> float:
    random = torch.Generator().manual_seed(0)
    parameter, optimizer, updates = _training(kind, settings, _ELEMENTS, bits, torch.device("cpu"))
    sizes = torch.exp(_SPREAD * torch.randn(_ELEMENTS, generator=random))
    for _ in range(_STEPS):
        parameter.grad = sizes * torch.randn(_ELEMENTS, generator=random)
        optimizer.step()
    found = updates.noise()
    updates.close()
    return 0.0 if found is None else found


def _seconds(
    kind: type[torch.optim.Optimizer], settings: dict[str, Any], bits: int, device: torch.device
) -> float:
    """By which an update is longer, an element."""
    packed, plain = (_training(kind, settings, _TIMED, each, device) for each in (bits, None))
    longer = _fastest(*packed[:2]) - _fastest(*plain[:2])
    packed[2].close()
    plain[2].close()
    return max(0.0, longer) / _TIMED


def _fastest(parameter: torch.nn.Parameter, optimizer: torch.optim.Optimizer) -> float:
    found = []
    for _ in range(_REPEATS + 1):  # the first one makes the state
        parameter.grad = torch.ones_like(parameter)
        started = time.perf_counter()
        optimizer.step()
        if parameter.is_cuda:
            torch.cuda.synchronize(parameter.device)
        found.append(time.perf_counter() - started)
    return min(found[1:])


def _training(
    kind: type[torch.optim.Optimizer],
    settings: dict[str, Any],
    numel: int,
    bits: int | None,
    device: torch.device,
) -> tuple[torch.nn.Parameter, torch.optim.Optimizer, Updates]:
    """A parameter and its optimizer, with such settings."""
    model = torch.nn.Module()
    model.weight = torch.nn.Parameter(torch.zeros(numel, device=device))
    make: Callable[..., torch.optim.Optimizer] = kind
    optimizer = make([model.weight])
    optimizer.param_groups[0].update(settings)
    packed = {} if bits is None else {"weight": bits}
    updates = Updates(
        model, optimizer, in_backward=False, states=(), packed=packed, gradients=(), folder=None
    )
    return model.weight, optimizer, updates

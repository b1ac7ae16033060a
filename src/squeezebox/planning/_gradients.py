"""Each parameter's gradient as backward completes it, in the steps of a profile."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence

import torch

from squeezebox.optim import Products, ProductTensor, sliceable
from squeezebox.profiling import StepProfiler


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

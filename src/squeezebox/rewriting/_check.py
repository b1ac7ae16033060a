"""Whether a rewritten model computes what it did before: outputs, loss, gradients and buffers of a sample."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from squeezebox.rewriting._deferred import made
from squeezebox.schema import arguments
from squeezebox.steps import TrainingStep, mapped, tensors_in, ungraded

TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 5e-2}
_FLOOR = 1e-3  # of the largest gradient: those far below it are what rounding left of zero


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of one step: tensors by kind, in an order that is the same for the same model."""

    outputs: list[torch.Tensor]
    gradients: list[torch.Tensor]
    buffers: list[torch.Tensor]

    @property
    def tensors(self) -> list[torch.Tensor]:
        """All of them."""
        return [*self.outputs, *self.gradients, *self.buffers]


def in_double(step: TrainingStep) -> TrainingStep:
    """The same step of a copy of the model in float64, in which rounding hardly shows."""

    def widened(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.double() if tensor.is_floating_point() else tensor

    sample = (mapped(widened, step.sample[0]), mapped(widened, step.sample[1]))
    loss_fn = step.loss_fn
    if isinstance(loss_fn, torch.nn.Module):
        loss_fn = copy.deepcopy(loss_fn).double()
    return replace(step, model=copy.deepcopy(step.model).double(), sample=sample, loss_fn=loss_fn)


def outcomes(step: TrainingStep) -> list[Outcome]:
    """Of a step in training mode, and of one in evaluation mode; model and random states are as before."""
    modes = [(each, each.training) for each in step.model.modules()]
    try:
        return [_outcome(step, training) for training in (True, False)]
    finally:
        for module, training in modes:
            module.training = training


def _outcome(step: TrainingStep, training: bool) -> Outcome:
    model = step.model.train(training)
    with step.restored():
        model.zero_grad(set_to_none=True)
        by_place, by_name = arguments(model, step.sample[0])
        output = model(*by_place, **by_name)
        loss = step.loss_of(output)
        with ungraded(loss, model):
            loss.backward()
        gradients = [each.grad for each in model.parameters() if each.grad is not None]
        outputs = [each.detach() for each in map(made, tensors_in(output))]
        buffers = [each.clone() for each in model.buffers()]
        return Outcome([loss.detach(), *outputs], gradients, buffers)


def error(before: list[Outcome], after: list[Outcome]) -> float:
    """The largest difference, over the largest value of each tensor; infinity where shapes or NaN differ.

    So it is where infinities differ, which count as no values.
    """
    return max(
        max(_errors(getattr(one, kind), getattr(other, kind)), default=0.0)
        for one, other in zip(before, after, strict=True)
        for kind in ("outputs", "gradients", "buffers")
    )


def is_equal(before: list[Outcome], after: list[Outcome]) -> bool:
    """To the bit."""
    return all(
        len(one.tensors) == len(other.tensors) and all(map(_same, one.tensors, other.tensors))
        for one, other in zip(before, after, strict=True)
    )


def tolerance(model: torch.nn.Module, before: list[Outcome]) -> float:
    """Of the coarsest dtype that the model computes in."""
    found = [*(each.dtype for each in model.parameters()), *(each.dtype for each in before[0].outputs)]
    return max((TOLERANCES.get(dtype, 0.0) for dtype in found), default=TOLERANCES[torch.float32])


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one.nan_to_num(), other.nan_to_num())


def _errors(before: list[torch.Tensor], after: list[torch.Tensor]) -> Iterator[float]:
    if [each.shape for each in before] != [each.shape for each in after]:
        yield float("inf")
        return
    sizes = [float(_finite(each).abs().max()) if each.numel() else 0.0 for each in map(_wide, before)]
    floor = _FLOOR * max(sizes, default=0.0)
    for first, second, size in zip(before, after, sizes, strict=True):
        one, other = _wide(first), second.to(_wide(first).dtype)
        if not torch.equal(_special(one), _special(other)):
            yield float("inf")
        elif one.numel():
            difference = float((_finite(one) - _finite(other)).abs().max())
            yield difference / max(size, floor) if difference else 0.0


def _finite(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.masked_fill(~tensor.isfinite(), 0.0)


def _special(tensor: torch.Tensor) -> torch.Tensor:
    """Where there is NaN, and where which infinity."""
    return tensor.masked_fill(tensor.isfinite(), 0.0).nan_to_num(nan=1.0)


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    dense = tensor.to_dense()
    return dense if tensor.dtype is torch.float64 else dense.float()

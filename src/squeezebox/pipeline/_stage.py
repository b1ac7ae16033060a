"""A stage: pieces of a model in a row, and the microbatches that are on their way through it."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import _backward as split_backward
from torch.utils.checkpoint import checkpoint

from squeezebox.pipeline._cut import Piece


class Stage(nn.Module):
    """Pieces called one after the other, with tensors; returns a tuple.

    ``recompute``: each piece saves nothing but its inputs, and runs again in backward. The model's last stage
    is called with what makes the loss of its outputs, so that the stage's hooks cover that too.
    """

    def __init__(self, pieces: Sequence[Piece], recompute: bool) -> None:
        super().__init__()
        self.pieces = nn.ModuleList(piece.module for piece in pieces)
        self._recompute = recompute

    def forward(self, *inputs: Any, loss_of: Callable[..., Tensor] | None = None) -> tuple[Any, ...]:
        """Run all pieces."""
        for piece in self.pieces:
            if self._recompute and torch.is_grad_enabled():
                contexts = functools.partial(_contexts, piece)
                inputs = checkpoint(piece, *inputs, use_reentrant=False, context_fn=contexts)
            else:
                inputs = piece(*inputs)
        return inputs if loss_of is None else (loss_of(*inputs),)


def _contexts(piece: nn.Module) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    buffers = _BuffersKept(piece)
    return buffers.noting(), buffers


class Buffer:
    """A module's buffer as it is when this is made."""

    def __init__(self, module: nn.Module, name: str) -> None:
        self.module, self.name, self._tensor = module, name, getattr(module, name)
        self._values = self._tensor.detach().clone()

    @property
    def is_changed(self) -> bool:
        """Whether the module has another tensor there by now, or other values."""
        now: Tensor = getattr(self.module, self.name)
        return now is not self._tensor or now.layout != torch.strided or not torch.equal(now, self._values)

    def put_back(self) -> None:
        """Let the module have the same tensor with the same values again."""
        self._tensor.data.copy_(self._values)  # not seen by autograd, which has noted it for graphs in flight
        setattr(self.module, self.name, self._tensor)


def buffers_of(module: nn.Module) -> list[Buffer]:
    """All of a module's buffers as they are now."""
    return [Buffer(each, name) for each in module.modules() for name, _ in each.named_buffers(recurse=False)]


class _BuffersKept:
    """Running again begins with the buffers of the first run, and changes none: that run has updated them.

    Entered twice where backward is in two parts.
    """

    def __init__(self, piece: nn.Module) -> None:
        self._before = buffers_of(piece)

    @contextlib.contextmanager
    def noting(self) -> Iterator[None]:
        """Around the first run: only what that changes takes memory until backward."""
        yield
        self._before = [buffer for buffer in self._before if buffer.is_changed]

    def __enter__(self) -> None:
        self._later = [Buffer(buffer.module, buffer.name) for buffer in self._before]
        for buffer in self._before:
            buffer.put_back()

    def __exit__(self, *_: object) -> None:
        for buffer in self._later:
            buffer.put_back()
        self._later.clear()


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """The model in evaluation mode, and afterwards each module in the mode that it was in."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


class Alias(torch.autograd.Function):
    """The same values as a tensor that may be detached in place, as views and a stage's inputs may not.

    It hangs on a stage's ``inputs`` too, without a gradient for them: where backward is in two parts, the
    first one notes gradients of weights between the inputs and the outputs only.
    """

    @staticmethod
    def forward(ctx: Any, values: Tensor, *inputs: Tensor) -> Tensor:
        ctx.count = len(inputs)
        place = values.untyped_storage(), values.storage_offset(), values.shape, values.stride()
        return torch.empty(0, dtype=values.dtype, device=values.device).set_(*place)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return gradient, *[None] * ctx.count


@dataclass(slots=True)
class Passage:
    """A microbatch between a stage's forward and its backward.

    ``received`` are buffers to give back, ``leaves`` what the stage was called with, ``outputs`` what its
    gradient starts from: the loss, or what was sent, whose ``gradients`` come back.
    """

    version: int
    received: list[Tensor]
    leaves: list[Tensor]
    outputs: list[Tensor] = field(default_factory=list)
    gradients: list[Tensor] | None = None
    groups: list[dict[str, Any]] | None = None

    def backward(self) -> list[Tensor]:
        """All of backward; returns the gradients of the inputs that have one."""
        torch.autograd.backward(self.outputs, self.gradients)
        return self._of_inputs()

    def backward_to_inputs(self, weights: Sequence[nn.Parameter]) -> list[Tensor]:
        """The part of backward that the stage before waits for (arXiv:2401.10241)."""
        inputs = [leaf for leaf in self.leaves if leaf.requires_grad]
        if not inputs:
            return []
        outputs = [Alias.apply(each, *inputs) for each in self.outputs]  # type: ignore[no-untyped-call]
        _, self.groups = split_backward.stage_backward_input(outputs, self.gradients, inputs, iter(weights))
        self.outputs = []
        return self._of_inputs()

    def backward_to_weights(self, weights: Sequence[nn.Parameter]) -> None:
        """The rest of it."""
        if self.groups is None:
            torch.autograd.backward(self.outputs, self.gradients)
        else:
            split_backward.stage_backward_weight(iter(weights), self.groups)

    def _of_inputs(self) -> list[Tensor]:
        """Taken from the leaves, which may stay for long."""
        inputs = [leaf for leaf in self.leaves if leaf.requires_grad]
        found = [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in inputs]
        for leaf in inputs:
            leaf.grad = None
        return found

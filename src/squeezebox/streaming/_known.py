"""A convolution whose output is known: only its backward is computed."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_aten = torch.ops.aten


class Known(torch.autograd.Function):
    """``apply(output, x, weight, bias, rest)``, ``rest`` as behind these in torch.ops.aten.convolution."""

    @staticmethod
    def forward(
        ctx: Any, output: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, rest: tuple[Any, ...]
    ) -> Tensor:
        """The output."""
        ctx.save_for_backward(x, weight)
        ctx.bias_sizes, ctx.rest = None if bias is None else list(bias.shape), rest
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        """Of input, weight and bias, as wanted."""
        x, weight = ctx.saved_tensors
        wanted = [*ctx.needs_input_grad[1:4]]
        found = _aten.convolution_backward.default(gradient, x, weight, ctx.bias_sizes, *ctx.rest, wanted)
        return None, *found, None

"""The rule that a gate on a product's rows has its gradient without the product."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional

from squeezebox.rewriting._deferred import Deferred, Waiting
from squeezebox.rewriting._pairs import PRODUCTS

_GROUPED: frozenset[Any] = frozenset((functional.grouped_mm, torch._grouped_mm))


class GatedProduct:
    """A product's rows times a gate each, as experts have them, without holding the product.

    Plain autograd holds the product P = h W for the gate's gradient <G, h W>. That is <G W^T, h>, and h's own
    gradient needs G W^T anyway.
    """

    name = "gated product"
    exact = False
    says = "(h @ W) * gate with the gate's gradient from h, so that h @ W is not held"
    functions = frozenset({functional.linear}) | _GROUPED

    def begin(self, func: Any, args: Any, kwargs: Any, note: Callable[[str], None]) -> Any:
        """Put a product off."""
        try:
            product = (_grouped if func in _GROUPED else _linear)(*args, **kwargs)
        except TypeError:
            return NotImplemented
        if product is None:
            return NotImplemented
        h, weight, _ = product
        wide = weight.shape[0] if weight.dim() == 2 else weight.shape[2]
        return Deferred.of(Waiting(self, func, args, kwargs, (*h.shape[:-1], wide), h.dtype, note, product))

    def read(self, call: Waiting, func: Any, args: Any, kwargs: Any) -> Any:
        """Its product with a column that learns."""
        if func not in PRODUCTS or len(args) != 2 or kwargs:
            return NotImplemented
        others = [each for each in args if not (isinstance(each, Deferred) and each.call is call)]
        gate: Any = others[0] if len(others) == 1 else None
        column = (*call.shape[:-1], 1)
        fits = isinstance(gate, torch.Tensor) and not isinstance(gate, Deferred) and gate.shape == column
        if not fits or gate.dtype != call.dtype or not gate.requires_grad:
            return NotImplemented
        call.require_unchanged()
        call.note("fused")
        h, weight, ends = call.state
        result: torch.Tensor = _Gated.apply(h, weight, ends, gate)  # type: ignore[no-untyped-call]
        return result


def _linear(input: Any, weight: Any, bias: Any = None) -> tuple[Any, Any, None] | None:
    """Factors, if they are plain."""
    fits = bias is None and _are_plain(input, weight) and weight.dim() == 2
    return (input, weight, None) if fits and input.dim() > 1 and input.shape[-1] == weight.shape[1] else None


def _grouped(
    mat_a: Any, mat_b: Any, *, offs: Any = None, bias: Any = None, out_dtype: Any = None
) -> tuple[Any, Any, Any] | None:
    """Rows, a matrix for each group of them, and where the groups end."""
    plain = bias is None and out_dtype is None and offs is not None and _are_plain(mat_a, mat_b)
    return (mat_a, mat_b, offs) if plain and (mat_a.dim(), mat_b.dim()) == (2, 3) else None


def _are_plain(*tensors: Any) -> bool:
    if not all(isinstance(each, torch.Tensor) and not isinstance(each, Deferred) for each in tensors):
        return False
    alike = len({each.dtype for each in tensors}) == 1 and tensors[0].is_floating_point()
    casts = torch.is_autocast_enabled(tensors[0].device.type)
    return bool(alike and torch.is_grad_enabled() and not casts)


class _Gated(torch.autograd.Function):
    """``linear(h, weight) * gate``; of groups where these end somewhere."""

    @staticmethod
    def forward(
        ctx: Any, h: torch.Tensor, weight: torch.Tensor, ends: Any, gate: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(h, weight, ends, gate)
        if ends is None:
            return functional.linear(h, weight).mul_(gate)
        return functional.grouped_mm(h, weight, offs=ends).mul_(gate)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        h, weight, ends, gate = ctx.saved_tensors
        gradient = gradient.contiguous()
        if ends is None:
            of_h = gradient @ weight
        else:
            of_h = functional.grouped_mm(gradient, weight.transpose(1, 2), offs=ends)
        of_gate = (of_h * h).sum(-1, keepdim=True)
        of_h = of_h.mul_(gate) if ctx.needs_input_grad[0] else None
        of_weight = None
        if ctx.needs_input_grad[1] and ends is None:
            of_weight = (gradient * gate).flatten(0, -2).t() @ h.flatten(0, -2)
        elif ctx.needs_input_grad[1]:
            of_weight = functional.grouped_mm(h.t(), gradient * gate, offs=ends)
        return of_h, of_weight, None, of_gate

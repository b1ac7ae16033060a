"""A product with a random weight, of which backward needs the input, the parameters and a key.

With w = mu + softplus(rho) eps, backward draws eps again: dL/dmu = dL/dw, dL/drho = dL/dw eps sigmoid(rho)
(Shift-BNN, MICRO'21, arXiv:2110.03553; there an LFSR runs backwards, here a counter is read again).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from squeezebox.layers import _ops  # noqa: F401  registers the operators
from squeezebox.layers._draws import Call

_OPS = torch.ops.squeezebox
Words = tuple[int, int, int, int]
Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]


class Product(Protocol):
    """What a layer does with its weight and bias."""

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """The output."""

    def backward(self, grad: Tensor, x: Tensor, weight: Tensor, wanted: tuple[bool, bool, bool]) -> Gradients:
        """Gradients of x, of the weight and of the bias, as far as they are wanted."""


@dataclass(frozen=True, slots=True)
class Linear:
    """x W^T + b over the last dimension."""

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """The output."""
        return F.linear(x, weight, bias)

    def backward(self, grad: Tensor, x: Tensor, weight: Tensor, wanted: tuple[bool, bool, bool]) -> Gradients:
        """The products of torch's own backward."""
        rows = grad.reshape(-1, grad.shape[-1])
        return (
            (rows @ weight).view(x.shape) if wanted[0] else None,
            (x.reshape(-1, x.shape[-1]).t() @ rows).t() if wanted[1] else None,
            rows.sum(0) if wanted[2] else None,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Convolution:
    """A convolution over 1 to 3 dimensions, padded with zeros."""

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int

    def _places(self) -> tuple[Any, ...]:
        return self.stride, self.padding, self.dilation, False, [0] * len(self.stride), self.groups

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """The output."""
        out: Tensor = torch.ops.aten.convolution(x, weight, bias, *self._places())
        return out

    def backward(self, grad: Tensor, x: Tensor, weight: Tensor, wanted: tuple[bool, bool, bool]) -> Gradients:
        """As torch's own."""
        found: Gradients = torch.ops.aten.convolution_backward(
            grad, x, weight, [weight.shape[0]], *self._places(), wanted
        )
        return found


def drawn(mu: Tensor, sigma: Tensor, words: Words, dtype: torch.dtype) -> Tensor:
    """Draw mu + sigma eps, in one buffer and the order of rounding of plain torch."""
    weight = sigma.clone()
    _OPS.add_normals(weight, mu, *words)
    return weight.to(dtype)


def _sigma(rho: Tensor) -> Tensor:
    return F.softplus(rho).contiguous()


class _Sum:
    """Gradients of mu and rho over the samples, as far as they are wanted."""

    def __init__(self, rho: Tensor, wanted: Sequence[bool]) -> None:
        self._rho, self._wanted = rho, wanted
        self._of_mu: Tensor | None = None
        self._of_sigma: Tensor | None = None

    def add(self, grad: Tensor, words: Words) -> None:
        """Another sample's gradient with respect to what was drawn."""
        grad = grad.to(self._rho.dtype)
        if self._wanted[1]:
            noisy = grad.clone(memory_format=torch.contiguous_format)
            _OPS.scale_normals(noisy, *words)
            self._of_sigma = noisy if self._of_sigma is None else self._of_sigma.add_(noisy)
        if self._wanted[0]:
            self._of_mu = grad if self._of_mu is None else self._of_mu.add_(grad)

    def close(self) -> tuple[Tensor | None, Tensor | None]:
        """Gradients of mu and of rho."""
        if self._of_sigma is None:
            return self._of_mu, None
        return self._of_mu, torch.ops.aten.softplus_backward(self._of_sigma, self._rho, 1.0, 20.0)


class Sampled(torch.autograd.Function):
    """A product over ``samples`` equal parts of the batch, each with noise of its own.

    softplus is computed once for all samples, in forward and again in backward.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        mu: Tensor,
        rho: Tensor,
        bias_mu: Tensor | None,
        bias_rho: Tensor | None,
        product: Product,
        samples: int,
        call: Call,
    ) -> Tensor:
        """Keep the input, the parameters and the key."""
        ctx.product, ctx.samples, ctx.call = product, samples, call
        ctx.save_for_backward(x, mu, rho, bias_mu, bias_rho)
        sigma = _sigma(rho)
        bias_sigma = None if bias_rho is None else _sigma(bias_rho)
        out: Tensor | None = None
        for sample, part in enumerate(x.chunk(samples)):
            bias = None
            if bias_mu is not None and bias_sigma is not None:
                bias = drawn(bias_mu, bias_sigma, call.key.words(sample, bias=True), x.dtype)
            found = product.forward(part, drawn(mu, sigma, call.key.words(sample), x.dtype), bias)
            if samples == 1:
                return found
            out = found.new_empty((len(found) * samples, *found.shape[1:])) if out is None else out
            out[sample * len(found) : (sample + 1) * len(found)] = found
        assert out is not None
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Draw each sample's noise again, the last sample first, as autograd would."""
        x, mu, rho, bias_mu, bias_rho = ctx.saved_tensors
        key, needs, sigma = ctx.call.key, ctx.needs_input_grad, _sigma(rho)
        wanted = needs[0], needs[1] or needs[2], needs[3] or needs[4]
        of_weight, of_bias = _Sum(rho, needs[1:3]), _Sum(bias_rho, needs[3:5])
        x_gradient = torch.empty_like(x) if needs[0] and ctx.samples > 1 else None
        parts, grads = x.chunk(ctx.samples), grad.chunk(ctx.samples)
        for sample in reversed(range(ctx.samples)):
            weight = drawn(mu, sigma, key.words(sample), x.dtype)
            of_x, weight_gradient, bias_gradient = ctx.product.backward(
                grads[sample], parts[sample], weight, wanted
            )
            del weight
            if wanted[1]:
                of_weight.add(weight_gradient, key.words(sample))
            if wanted[2]:
                of_bias.add(bias_gradient, key.words(sample, bias=True))
            if x_gradient is None:
                x_gradient = of_x
            elif of_x is not None:
                x_gradient.chunk(ctx.samples)[sample].copy_(of_x)
        ctx.call.done = True
        return x_gradient, *of_weight.close(), *of_bias.close(), None, None, None

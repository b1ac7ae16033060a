"""How far a model's weights are from their prior."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from squeezebox.layers._bayes import BayesLayer
from squeezebox.schema import OptionError

_FAR = -30.0  # below it softplus(rho) is exp(rho) to 13 digits


def kl(model: nn.Module) -> Tensor:
    """Kullback and Leibler's divergence of all Bayesian weights and biases from their priors, in nats.

    For each weight, log(prior / sigma) + (sigma^2 + mu^2) / (2 prior^2) - 1/2. It is finite for any finite
    rho, even where sigma itself is rounded to 0. Nothing but the parameters is kept for backward. Add it,
    over the number of samples in the data set, to a loss that is a mean over the batch.

    Raises:
        OptionError: the model has no Bayesian layer.
    """
    layers = [layer for layer in model.modules() if isinstance(layer, BayesLayer)]
    if not layers:
        raise OptionError(f"{type(model).__name__} has no Bayesian layer; call bayesian_(model) first.")
    total: Tensor | None = None
    for layer in layers:
        for mu, rho in ((layer.mu, layer.rho), (layer.bias_mu, layer.bias_rho)):
            if mu is not None and rho is not None:
                one: Tensor = _Divergence.apply(mu, rho, layer.prior)  # type: ignore[no-untyped-call]
                total = one if total is None else total + one
    assert total is not None
    return total


class _Divergence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, mu: Tensor, rho: Tensor, prior: float) -> Tensor:
        ctx.save_for_backward(mu, rho)
        ctx.prior = prior
        mu, rho = _wide(mu), _wide(rho)
        sigma = F.softplus(rho)
        log = torch.where(rho < _FAR, rho, sigma.log())
        squares = (sigma.square_().sum() + mu.square().sum()) / prior**2
        return squares / 2 - log.sum() - mu.numel() * (0.5 - torch.tensor(prior).log().item())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        mu, rho = ctx.saved_tensors
        wide = _wide(rho)
        sigma, slope = F.softplus(wide), torch.sigmoid(wide)
        falls = torch.where(wide < _FAR, torch.ones_like(wide), slope / sigma)
        of_rho = sigma.mul_(slope).div_(ctx.prior**2).sub_(falls)
        return (
            (grad * _wide(mu) / ctx.prior**2).to(mu.dtype) if ctx.needs_input_grad[0] else None,
            (grad * of_rho).to(rho.dtype) if ctx.needs_input_grad[1] else None,
            None,
        )


def _wide(tensor: Tensor) -> Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))

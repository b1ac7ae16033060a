"""Cross-entropy of a linear layer's output, of which only some rows or some columns are ever in memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional

_EVEN = 16  # rows, for BLAS's sake
_LEAST = 32
_WIDE = (torch.float32, torch.float64)  # dtypes in which sums over slices lose nothing that matters


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """Of a cross-entropy, as :func:`torch.nn.functional.cross_entropy` has them.

    ``product`` is the dtype that the linear layer computes in, ``result`` the one that the loss gets its
    output in; they differ under autocast. ``learns`` says whether there will be a backward.
    """

    ignore_index: int = -100
    reduction: str = "mean"
    label_smoothing: float = 0.0
    product: torch.dtype
    result: torch.dtype
    learns: bool

    @property
    def inner(self) -> torch.dtype:
        """What softmax is computed in."""
        return torch.float64 if self.result is torch.float64 else torch.float32


def sliced_cross_entropy(
    x: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    class_weight: torch.Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    product: torch.dtype | None = None,
    result: torch.dtype | None = None,
) -> torch.Tensor:
    """``cross_entropy(linear(x, weight, bias), target)`` without the whole of what ``linear`` returns.

    Forward computes it some rows at a time. In float32 and float64, and for one number as the loss, the
    gradients are made of the same rows at once, with as many products as plain PyTorch needs; otherwise
    backward computes some classes at a time, with one product more, and sums of the weight's gradient are
    those of plain PyTorch. Sums over slices are rounded in another order (relative 1e-7 in float32).

    Args:
        x: of shape (n, features).
        weight: of shape (classes, features).
        target: of shape (n,), classes.
        bias: of shape (classes,).
        class_weight: as ``weight`` of torch.nn.functional.cross_entropy.
        ignore_index: as there.
        reduction: as there.
        label_smoothing: as there.
        product: dtype to multiply in (default: x's).
        result: dtype of the linear layer's output as the loss sees it (default: ``product``).

    Returns:
        The loss, in ``result``: one number, or of shape (n,) with reduction "none".

    After Hsu et al., "Liger Kernel: efficient Triton kernels for LLM training" (2024), which makes gradients
    with the loss, and Wijmans et al., "Cut your losses in large-vocabulary language models" (2024), which
    computes classes again in backward.
    """
    product = product or x.dtype
    settings = Settings(
        ignore_index=ignore_index,
        reduction=reduction,
        label_smoothing=label_smoothing,
        product=product,
        result=result or product,
        learns=torch.is_grad_enabled(),
    )
    loss: torch.Tensor = _SlicedLoss.apply(x, weight, bias, target, class_weight, settings)  # type: ignore[no-untyped-call]
    return loss


def slice_rows(features: int) -> int:
    """Rows at a time, so that their output has a quarter of the weight's bytes."""
    return max(_LEAST, features // 4 // _EVEN * _EVEN)


@dataclass(frozen=True, slots=True)
class _Rows:
    """What each row's loss is made of: ``picked * (lse - z[y]) + smooth * (lse * total - sum(w * z))``."""

    y: torch.Tensor
    picked: torch.Tensor
    smooth: torch.Tensor | None
    total: torch.Tensor | int  # of all classes' weights
    divisor: torch.Tensor | None
    real: torch.Tensor

    @staticmethod
    def of(target: torch.Tensor, w: torch.Tensor | None, classes: int, settings: Settings) -> _Rows:
        """By torch's definition, with label smoothing after Szegedy et al. 2016."""
        real, eps = target != settings.ignore_index, settings.label_smoothing
        y = torch.where(real, target, 0)
        own = real.to(settings.inner) if w is None else torch.where(real, w.to(settings.inner)[y], 0)
        return _Rows(
            y=y[:, None],
            picked=own * (1 - eps),
            smooth=real.to(settings.inner) * (eps / classes) if eps else None,
            total=classes if w is None else w.sum(),
            divisor=own.sum() if settings.reduction == "mean" else None,
            real=real,
        )

    def scales(self, gradient: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor | None]:
        """``picked`` and ``smooth`` of the reduced loss, times its gradient."""
        factor = self.real.to(self.picked.dtype) if gradient is None else torch.where(self.real, gradient, 0)
        if self.divisor is not None:
            factor = torch.where(self.real, factor / self.divisor, 0)
        return self.picked * factor, None if self.smooth is None else self.smooth * factor


class _SlicedLoss(torch.autograd.Function):
    """As :func:`sliced_cross_entropy`."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        target: torch.Tensor,
        w: torch.Tensor | None,
        settings: Settings,
    ) -> torch.Tensor:
        rows = _Rows.of(target, w, len(weight), settings)
        at_once = settings.learns and settings.reduction != "none" and settings.product in _WIDE
        wanted = ctx.needs_input_grad[:3] if at_once else (False, False, False)
        with torch.autocast(x.device.type, enabled=False):
            made = _Gradients.of(x, weight, bias, wanted) if any(wanted) else None
            losses, lse = _forward(x, weight, bias, w, rows, settings, made)
        ctx.made, ctx.settings = made, settings
        ctx.save_for_backward(x, weight, bias, target, w, lse)
        if settings.reduction == "none":
            return losses.to(settings.result)
        total = losses.sum()
        return (total if rows.divisor is None else total / rows.divisor).to(settings.result)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        made, ctx.made = ctx.made, None  # a second backward computes them again
        x, weight, bias, target, w, lse = ctx.saved_tensors
        if made is not None:
            return (*made.times(gradient), None, None, None)
        with torch.autocast(x.device.type, enabled=False):
            rows = _Rows.of(target, w, len(weight), ctx.settings)
            picked, smooth = rows.scales(gradient.to(ctx.settings.inner))
            made = _Gradients.of(x, weight, bias, ctx.needs_input_grad[:3], ctx.settings.inner)
            for start, stop in _spans(len(weight), _block_columns(x, weight)):
                tensors, scales = (x, weight, bias, w), (picked, smooth, rows.total)
                _backward(made, tensors, rows.y, lse, scales, (start, stop), ctx.settings)
        return (*made.cast_to(x), None, None, None)


@dataclass(slots=True)
class _Gradients:
    """Of x, weight and bias, those that are wanted."""

    x: torch.Tensor | None
    weight: torch.Tensor | None
    bias: torch.Tensor | None

    @staticmethod
    def of(
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        wanted: tuple[bool, ...],
        kind: torch.dtype | None = None,
    ) -> _Gradients:
        """Zeros; x's in ``kind``, over which it is summed up."""
        return _Gradients(
            torch.zeros_like(x, dtype=kind) if wanted[0] else None,
            torch.zeros_like(weight) if wanted[1] else None,
            torch.zeros_like(bias) if wanted[2] and bias is not None else None,
        )

    def times(self, factor: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """All of them in place, which nobody else holds."""
        found = (self.x, self.weight, self.bias)
        for each in found:
            if each is not None:
                each.mul_(factor.to(each.dtype))
        return found

    def cast_to(self, x: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """With x's gradient in x's dtype."""
        return (None if self.x is None else self.x.to(x.dtype), self.weight, self.bias)


def _forward(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    w: torch.Tensor | None,
    rows: _Rows,
    settings: Settings,
    made: _Gradients | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Each row's loss and the logarithm of its sum of exponentials; and gradients, where they are made."""
    weight = weight.to(settings.product)
    bias = None if bias is None else bias.to(settings.product)
    losses, lse = (torch.empty(len(x), dtype=settings.inner, device=x.device) for _ in range(2))
    scales = rows.scales(None) if made is not None else None
    for start, stop in _spans(len(x), slice_rows(weight.shape[1])):
        own = slice(start, stop)
        z, part = _exponentials(x[own], weight, bias, w, rows, losses, lse, own, settings)
        if made is not None and scales is not None:
            picked, smooth = (None if each is None else each[own] for each in scales)
            assert picked is not None
            _to_gradient(z, part, picked, smooth, rows.total, w)
            z.scatter_add_(1, rows.y[own], -picked[:, None])
            _add_rows(made, z.to(settings.product), x, weight, own)
        del z
    return losses, lse


def _exponentials(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    w: torch.Tensor | None,
    rows: _Rows,
    losses: torch.Tensor,
    lse: torch.Tensor,
    own: slice,
    settings: Settings,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``exp(z - max)`` of some rows, in the place of z, and what their sum is; their losses are noted."""
    z = functional.linear(x.to(settings.product), weight, bias).to(settings.result).to(settings.inner)
    chosen = z.gather(1, rows.y[own])[:, 0]
    weighted = None
    if rows.smooth is not None:
        weighted = z.sum(1) if w is None else z @ w.to(z.dtype)
    highest = z.amax(1)
    part = z.sub_(highest[:, None]).exp_().sum(1)
    lse[own] = highest + part.log()
    losses[own] = rows.picked[own] * (lse[own] - chosen)
    if rows.smooth is not None and weighted is not None:
        losses[own] += rows.smooth[own] * (lse[own] * rows.total - weighted)
    losses[own].masked_fill_(~rows.real[own], 0.0)  # also where a logit is infinite
    return z, part


def _to_gradient(
    z: torch.Tensor,
    part: torch.Tensor | None,
    picked: torch.Tensor,
    smooth: torch.Tensor | None,
    total: torch.Tensor | int,
    w: torch.Tensor | None,
) -> None:
    """From exponentials (over ``part``) to the loss's gradient of z, but for what is picked."""
    factor = picked if smooth is None else picked + smooth * total
    z.mul_((factor if part is None else factor / part)[:, None])
    if smooth is not None:
        z.sub_(smooth[:, None] if w is None else smooth[:, None] * w.to(z.dtype))


def _add_rows(made: _Gradients, dz: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, own: slice) -> None:
    if made.x is not None:
        made.x[own] = dz @ weight
    if made.weight is not None:
        made.weight.addmm_(dz.t(), x[own].to(dz.dtype))
    if made.bias is not None:
        made.bias += dz.sum(0)


def _backward(
    made: _Gradients,
    tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None],
    y: torch.Tensor,
    lse: torch.Tensor,
    scales: tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | int],
    span: tuple[int, int],
    settings: Settings,
) -> None:
    """Gradients that come from some classes, whose part of z is computed again."""
    (x, weight, bias, w), (picked, smooth, total), (start, stop) = tensors, scales, span
    x, some = x.to(settings.product), weight[start:stop].to(settings.product)
    own_bias = None if bias is None else bias[start:stop].to(settings.product)
    z = functional.linear(x, some, own_bias).to(settings.result).to(settings.inner)
    z.sub_(lse[:, None]).exp_()
    _to_gradient(z, None, picked, smooth, total, None if w is None else w[start:stop])
    inside = (y >= start) & (y < stop)
    z.scatter_add_(1, (y - start).clamp(0, stop - start - 1), torch.where(inside, -picked[:, None], 0))
    dz = z.to(settings.product)
    if made.x is not None:
        made.x += dz @ some
    if made.weight is not None:
        made.weight[start:stop] = dz.t() @ x
    if made.bias is not None:
        made.bias[start:stop] = dz.sum(0)


def _block_columns(x: torch.Tensor, weight: torch.Tensor) -> int:
    """Classes at a time: as many elements as forward's slices have."""
    elements = slice_rows(weight.shape[1]) * len(weight)
    return max(_LEAST, elements // max(len(x), 1) // _EVEN * _EVEN)


def _spans(count: int, size: int) -> Iterator[tuple[int, int]]:
    for start in range(0, count, size):
        yield start, min(start + size, count)

"""A chain of operators worked in slices of the batch: only its output is ever there as a whole."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional

Tensors = Sequence[torch.Tensor | None]


@dataclass(frozen=True, slots=True)
class Slot:
    """The place of a tensor among a chain's tensors."""

    number: int


@dataclass(frozen=True, slots=True)
class Operator:
    """A call that treats every sample by itself; its first argument is the previous call's result."""

    function: Callable[..., torch.Tensor]
    arguments: tuple[Any, ...]
    keywords: Mapping[str, Any]

    def __call__(self, x: torch.Tensor, tensors: Tensors, moments: Moments | None = None) -> torch.Tensor:
        """The operator on some samples."""
        arguments = [_filled(value, tensors) for value in self.arguments]
        return self.function(x, *arguments, **{k: _filled(v, tensors) for k, v in self.keywords.items()})


@dataclass(frozen=True, slots=True)
class BatchNorm:
    """A batch normalisation by the batch's own moments; ``running`` are those to keep up to date."""

    weight: Slot | None
    bias: Slot | None
    running: tuple[torch.Tensor, ...]
    momentum: float
    eps: float

    def __call__(self, x: torch.Tensor, tensors: Tensors, moments: Moments | None = None) -> torch.Tensor:
        """Some samples, normalised by the whole batch's moments."""
        assert moments is not None
        weight, bias = _filled(self.weight, tensors), _filled(self.bias, tensors)
        if torch.is_grad_enabled() and x.requires_grad:
            return _Normalise.apply(x, moments, weight, bias)  # type: ignore[no-any-return,no-untyped-call]
        return moments.normalise(x, weight, bias)

    def moments(self, parts: Iterable[torch.Tensor]) -> Moments:
        """Of all parts together; their own are put together as Chan, Golub and LeVeque (1979) do."""
        counts, means, variances = [], [], []
        for part in parts:
            mean, variance = torch.batch_norm_update_stats(part, None, None, 0.0)
            counts.append(part.numel() // part.shape[1])
            means.append(mean.double())
            variances.append(variance.double())
        # numbers of the host: a tensor of them would have to be waited for on its way to a device
        shares = [count / sum(counts) for count in counts]
        whole = _weighted(means, shares)
        pairs = zip(variances, means, strict=True)
        spread = _weighted([variance + (mean - whole).square() for variance, mean in pairs], shares)
        return Moments(
            mean=whole,
            variance=spread,
            eps=self.eps,
            count=sum(counts),
            sums=torch.zeros_like(whole).expand(2, -1),
        )

    def update(self, moments: Moments) -> None:
        """Move the running moments as torch does, with the unbiased variance."""
        unbiased = moments.variance * (moments.count / (moments.count - 1))
        for running, now in zip(self.running, (moments.mean, unbiased), strict=False):
            running.copy_(self.momentum * now + (1.0 - self.momentum) * running)


@dataclass(slots=True, kw_only=True)
class Moments:
    """A batch's mean and biased variance in every channel, in float64.

    In backward, ``sums`` grows over the slices to the gradients of weight and bias: the sums of gradient
    times normalised input, and of the gradient. Once ``complete``, they give the input's gradient.
    """

    mean: torch.Tensor
    variance: torch.Tensor
    eps: float
    count: int
    sums: torch.Tensor
    complete: bool = False

    def normalise(
        self, x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """(x - mean) / deviation * weight + bias, channel by channel."""
        dtype = x.dtype if weight is None else weight.dtype  # float32 under autocast
        mean, variance = self.mean.to(dtype), self.variance.to(dtype)
        return functional.batch_norm(x, mean, variance, weight, bias, False, 0.0, self.eps)

    def collect(self, gradient: torch.Tensor, x: torch.Tensor) -> None:
        """Add a slice to the sums."""
        dtype = torch.promote_types(x.dtype, torch.float32)
        mean, deviation = self.mean.to(dtype), self._inverse_deviation().to(dtype)
        weight, wanted = torch.ones_like(mean), [False, True, True]  # any weight: the sums are without it
        _, *sums = torch.ops.aten.native_batch_norm_backward(
            gradient, x, weight, None, None, mean, deviation, True, self.eps, wanted
        )
        self.sums = self.sums + torch.stack(sums)

    def input_gradient(
        self, gradient: torch.Tensor, x: torch.Tensor, weight: torch.Tensor | None
    ) -> torch.Tensor:
        """Of a slice: Ioffe and Szegedy (2015), section 3, solved for the input."""
        inverse = self._inverse_deviation()
        scale = inverse if weight is None else inverse * weight.double()
        slope, shift = -scale * self.sums / self.count

        def each(values: torch.Tensor) -> torch.Tensor:
            return values.to(x.dtype).view(-1, *[1] * (x.dim() - 2))

        result = x - each(self.mean)
        return result.mul_(each(slope * inverse)).add_(each(shift)).addcmul_(gradient, each(scale))

    def _inverse_deviation(self) -> torch.Tensor:
        return (self.variance + self.eps).rsqrt()


class _Normalise(torch.autograd.Function):
    """Batch normalisation of a slice, whose backward first collects sums and later uses them."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, moments: Moments, weight: torch.Tensor | None, bias: torch.Tensor | None
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.moments = moments
        return moments.normalise(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, None, None, None]:
        x, weight = ctx.saved_tensors
        if ctx.moments.complete:
            return ctx.moments.input_gradient(gradient, x, weight), None, None, None
        ctx.moments.collect(gradient, x)
        return None, None, None, None


def _weighted(values: Sequence[torch.Tensor], shares: Sequence[float]) -> torch.Tensor:
    return torch.stack([value * share for value, share in zip(values, shares, strict=True)]).sum(0)


Chain = Sequence[Operator | BatchNorm]


class Sliced(torch.autograd.Function):
    """``Sliced.apply(chain, slices, x, *tensors)``: the chain's result on ``x``, slice by slice.

    Holds ``x``, which must not need a gradient, for backward, and a few numbers a channel; everything
    else is computed again there. A batch normalisation takes one more pass forward, for its moments, and
    one more backward, for the sums that its gradient needs. Outputs and gradients are those of the whole
    batch but for the order in which slices are summed: about 1e-6 relative in float32, and more where that
    rounding decides a ReLU or a pooling near a tie.
    """

    @staticmethod
    def forward(ctx: Any, chain: Chain, slices: int, x: torch.Tensor, *tensors: torch.Tensor) -> torch.Tensor:
        parts = x.tensor_split(slices)
        moments: dict[int, Moments] = {}
        for number, call in enumerate(chain):
            if isinstance(call, BatchNorm):
                before = (_walk(chain[:number], part, tensors, moments) for part in parts)
                moments[number] = call.moments(before)
                call.update(moments[number])
        ctx.chain, ctx.slices, ctx.moments = chain, slices, moments
        ctx.save_for_backward(x, *tensors)
        return _joined((_walk(chain, part, tensors, moments) for part in parts), len(x))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, *tensors = (tensor.detach() for tensor in ctx.saved_tensors)
        moments = {number: replace(known) for number, known in ctx.moments.items()}
        pairs = list(zip(x.tensor_split(ctx.slices), gradient.tensor_split(ctx.slices), strict=True))
        needed = ctx.needs_input_grad[3:]
        with _undisturbed(x.device.type):
            for number in sorted(moments, reverse=True):
                for part, incoming in pairs:
                    _collect(ctx.chain, number, part, tensors, moments, incoming)
                moments[number].complete = True
            found = _gradients(ctx.chain, pairs, tensors, moments, needed)
        return None, None, None, *found


def _walk(
    chain: Chain, x: torch.Tensor, tensors: Tensors, moments: Mapping[int, Moments], start: int = 0
) -> torch.Tensor:
    """The chain from call ``start`` on."""
    for number, call in enumerate(chain[start:], start):
        x = call(x, tensors, moments.get(number))
    return x


def _joined(parts: Iterator[torch.Tensor], count: int) -> torch.Tensor:
    """The parts one after another, ``count`` samples, in the memory format of the first."""
    whole, done = torch.empty(0), 0
    for part in parts:
        if not done:
            strides = (part[0].numel(), *part.stride()[1:])
            whole = part.new_empty_strided((count, *part.shape[1:]), strides)
        whole[done : done + len(part)] = part
        done += len(part)
    return whole


def _collect(
    chain: Chain,
    number: int,
    part: torch.Tensor,
    tensors: Tensors,
    moments: Mapping[int, Moments],
    gradient: torch.Tensor,
) -> None:
    """Add a slice to the sums of the batch normalisation ``number``."""
    with torch.no_grad():
        x = _walk(chain[:number], part, tensors, moments)
    result = _walk(chain, x.requires_grad_(), tensors, moments, number)
    torch.autograd.grad(result, x, gradient, allow_unused=True)


def _gradients(
    chain: Chain,
    pairs: Iterable[tuple[torch.Tensor, torch.Tensor]],
    tensors: Sequence[torch.Tensor],
    moments: Mapping[int, Moments],
    needed: Sequence[bool],
) -> list[torch.Tensor | None]:
    """Of the chain's tensors; a batch normalisation's are its sums."""
    found: dict[int, torch.Tensor] = {}
    norms = (call for call in chain if isinstance(call, BatchNorm))
    for call, known in zip(norms, moments.values(), strict=True):
        for slot, total in zip((call.weight, call.bias), known.sums, strict=True):
            if slot is not None:
                found[slot.number] = total.to(tensors[slot.number].dtype)
    rest = [number for number, need in enumerate(needed) if need and number not in found]
    leaves = [tensor.requires_grad_(number in rest) for number, tensor in enumerate(tensors)]
    for part, gradient in pairs if rest else ():
        result = _walk(chain, part, leaves, moments)
        parts = torch.autograd.grad(result, [leaves[number] for number in rest], gradient)
        for number, more in zip(rest, parts, strict=True):
            found[number] = found[number].add_(more) if number in found else more
    return [found.get(number) for number in range(len(tensors))]


def _filled(value: Any, tensors: Tensors) -> Any:
    return tensors[value.number] if isinstance(value, Slot) else value


@contextlib.contextmanager
def _undisturbed(device: str) -> Iterator[None]:
    """Gradients on; no function mode, saved-tensor hooks or autocast of those around backward."""
    identity = saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)
    with (
        torch._C.DisableTorchFunction(),
        identity,
        torch.autocast(device, enabled=False),
        torch.enable_grad(),
    ):
        yield

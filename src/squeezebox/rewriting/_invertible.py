"""The rule that a leaky ReLU after a batch norm is undone in backward, so that only its result is held."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.function import once_differentiable
from torch.nn import functional
from torch.utils.weak import WeakTensorKeyDictionary

from squeezebox.rewriting._deferred import Deferred, Waiting

_WIDE = (torch.float32, torch.float64)  # in which undoing loses nothing that matters
_LEAST_SLOPE = 1e-3
_MOST_SHIFT = 100.0  # times the scale: undoing the norm amplifies rounding by as much


class InvertibleActivation:
    """A leaky ReLU of a batch norm of which backward has the result alone.

    The next layer mostly holds the result anyway. Backward undoes the leaky ReLU and the norm's scale and
    shift, which gives what the norm's gradient needs (Rota Bulò, Porzi and Kontschieder, "In-place activated
    BatchNorm for memory-optimized training of DNNs", 2018).
    """

    name = "invertible activation"
    exact = False
    says = "leaky_relu(batch_norm(x)) undone in backward, so that its result alone is held"
    functions = frozenset({functional.batch_norm})

    def __init__(self) -> None:
        self._latest: Any = WeakTensorKeyDictionary()  # calls by the running mean that they change

    def begin(self, func: Any, args: Any, kwargs: Any, note: Callable[[str], None]) -> Any:
        """Put a norm in training off."""
        try:
            norm = _Norm.of(*args, **kwargs)
        except TypeError:
            return NotImplemented
        if norm is None:
            return NotImplemented
        x, weight, bias, mean = args[0], norm.weight, norm.bias, norm.running[0]
        if mean is not None:
            before = self._latest.get(mean, lambda: None)()
            if before is not None:  # so that statistics keep their order
                before.state.count(before.inputs[0])
        call = Waiting(self, norm.batch_norm, (x, weight, bias), {}, x.shape, x.dtype, note, norm)
        if mean is not None:
            self._latest[mean] = weakref.ref(call)
            weakref.finalize(call, norm.count, x).atexit = False  # where nobody reads the result
        return Deferred.of(call)

    def read(self, call: Waiting, func: Any, args: Any, kwargs: Any) -> Any:
        """A leaky ReLU of it is computed with it."""
        if func is not functional.leaky_relu:
            return NotImplemented
        given, slope, in_place = _leaky(*args, **kwargs)
        fits = isinstance(given, Deferred) and given.call is call and _LEAST_SLOPE <= slope <= 1.0
        if (
            not fits
            or not torch.is_grad_enabled()
            or call.state.has_counted
            or not call.state.is_invertible()
        ):
            return NotImplemented
        call.require_unchanged()
        call.note("fused")
        norm: _Norm = call.state
        x = call.inputs[0]
        result: torch.Tensor = _Undone.apply(  # type: ignore[no-untyped-call]
            x, norm.weight, norm.bias, norm.counted(), norm.momentum, norm.eps, slope
        )
        if in_place:
            call.become(result)
        return result


class _Norm:
    """A batch norm whose statistics are counted once, however often it is computed."""

    def __init__(self, running: tuple[Any, Any], weight: Any, bias: Any, momentum: float, eps: float) -> None:
        self.running, self.weight, self.bias = running, weight, bias
        self.momentum, self.eps = momentum, eps
        self.has_counted = False

    @classmethod
    def of(
        cls,
        input: Any,
        running_mean: Any,
        running_var: Any,
        weight: Any = None,
        bias: Any = None,
        training: bool = False,
        momentum: float = 0.1,
        eps: float = 1e-5,
    ) -> _Norm | None:
        """Of such a call; None where it is not one to be undone."""
        tensors = (input, weight, bias)
        plain = all(isinstance(each, torch.Tensor) and not isinstance(each, Deferred) for each in tensors)
        if not training or not plain or not torch.is_grad_enabled():
            return None
        if input.dim() < 2 or input.numel() <= input.shape[1]:  # torch refuses one value a channel
            return None
        alike = {each.dtype for each in tensors} <= {input.dtype} and input.dtype in _WIDE
        if not alike or torch.is_autocast_enabled(input.device.type):
            return None
        return cls((running_mean, running_var), weight, bias, momentum, eps)

    def is_invertible(self) -> bool:
        """Whether no channel's scale is lost next to its shift."""
        if isinstance(self.weight, FakeTensor) or self.weight.is_meta:
            return True
        scale, shift = self.weight.detach().abs(), self.bias.detach().abs()
        return bool(((scale > 0) & (shift <= _MOST_SHIFT * scale)).all())

    def counted(self) -> tuple[Any, Any]:
        """The running statistics, for the one call that changes them."""
        running = (None, None) if self.has_counted else self.running
        self.has_counted = True
        return running

    def count(self, x: torch.Tensor) -> None:
        """Change the running statistics, if that was not done."""
        if not self.has_counted:
            with torch.no_grad():
                self.batch_norm(x, self.weight, self.bias)

    def batch_norm(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        """As it is without an activation."""
        return functional.batch_norm(x, *self.counted(), weight, bias, True, self.momentum, self.eps)


def _leaky(input: Any, negative_slope: float = 0.01, inplace: bool = False) -> tuple[Any, float, bool]:
    return input, negative_slope, inplace


class _Undone(torch.autograd.Function):
    """``leaky_relu(batch_norm(x))`` in training."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor,
        running: tuple[Any, Any],
        momentum: float,
        eps: float,
        slope: float,
    ) -> torch.Tensor:
        y, _, deviation = torch.native_batch_norm(x, weight, bias, *running, True, momentum, eps)
        functional.leaky_relu_(y, slope)
        ctx.eps, ctx.slope = eps, slope
        ctx.save_for_backward(y, weight, bias, deviation)  # one over it, as torch saves it
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        y, weight, bias, inverse = ctx.saved_tensors
        shape = (1, -1) + (1,) * (y.dim() - 2)
        of_norm = torch.ops.aten.leaky_relu_backward(gradient, y, ctx.slope, True)
        normal = functional.leaky_relu(y, 1.0 / ctx.slope).sub_(bias.view(shape)).div_(weight.view(shape))
        none, one = torch.zeros_like(inverse), torch.ones_like(inverse)  # its own mean and deviation
        found = torch.ops.aten.native_batch_norm_backward(
            of_norm, normal, weight, None, None, none, one, True, ctx.eps, list(ctx.needs_input_grad[:3])
        )
        of_x = found[0].mul_(inverse.view(shape)) if ctx.needs_input_grad[0] else None
        return of_x, found[1], found[2], None, None, None, None

"""Rules that take two calls for one: a convolution of a concatenation, and a sigmoid that gates its input."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn import functional

from squeezebox.rewriting._deferred import Deferred, Waiting

_CONVOLUTIONS = {torch.conv1d: 1, torch.conv2d: 2, torch.conv3d: 3}  # and their spatial dims
_CHANNELS = 1


class SplitConvolution:
    """A convolution over a concatenation of channels as a sum of convolutions, one for each part."""

    name = "split conv"
    exact = False
    says = "conv(cat((a, b), 1)) as conv(a) + conv(b), without the concatenated copy"
    functions = frozenset({torch.cat, torch.concat, torch.concatenate})

    def begin(self, func: Any, args: Any, kwargs: Any, note: Callable[[str], None]) -> Any:
        """Put a concatenation of channels off."""
        try:
            parts = _concatenated(*args, **kwargs)
        except TypeError:  # it has an ``out``, or is called in another way
            return NotImplemented
        if parts is None:
            return NotImplemented
        shape = list(parts[0].shape)
        shape[_CHANNELS] = sum(each.shape[_CHANNELS] for each in parts)
        return Deferred.of(Waiting(self, func, args, kwargs, shape, parts[0].dtype, note, tuple(parts)))

    def read(self, call: Waiting, func: Any, args: Any, kwargs: Any) -> Any:
        """A convolution without groups goes over each part."""
        if func not in _CONVOLUTIONS or len(call.shape) != _CONVOLUTIONS[func] + 2:
            return NotImplemented
        try:
            x, weight, bias, rest = _convolution(*args, **kwargs)
        except TypeError:
            return NotImplemented
        fits = isinstance(x, Deferred) and x.call is call and rest.pop("groups") == 1
        if not fits or isinstance(weight, Deferred) or weight.shape[1] != call.shape[_CHANNELS]:
            return NotImplemented
        call.require_unchanged()
        call.note("fused")
        sizes = [each.shape[_CHANNELS] for each in call.state]
        weights = weight.split(sizes, dim=1)
        result: torch.Tensor = func(call.state[0], weights[0], bias, **rest)
        for part, own in zip(call.state[1:], weights[1:], strict=True):
            result += func(part, own, None, **rest)
        return result


class Silu:
    """``x * sigmoid(x)``, of which autograd holds x alone."""

    name = "silu"
    exact = False
    says = "x * sigmoid(x) as silu(x), which saves x alone"
    functions = frozenset({torch.sigmoid, torch.Tensor.sigmoid, functional.sigmoid})

    def begin(self, func: Any, args: Any, kwargs: Any, note: Callable[[str], None]) -> Any:
        """Put a sigmoid off."""
        x = args[0] if len(args) == 1 and not kwargs else None
        if not isinstance(x, torch.Tensor) or isinstance(x, Deferred) or not x.is_floating_point():
            return NotImplemented
        return Deferred.of(Waiting(self, func, args, kwargs, x.shape, x.dtype, note, x))

    def read(self, call: Waiting, func: Any, args: Any, kwargs: Any) -> Any:
        """Its product with its own input is a SiLU."""
        if func not in _PRODUCTS or len(args) != 2 or kwargs:
            return NotImplemented
        others = [each for each in args if not (isinstance(each, Deferred) and each.call is call)]
        x: Any = others[0] if len(others) == 1 else None
        if (x.call.made if isinstance(x, Deferred) else x) is not call.state:
            return NotImplemented
        call.require_unchanged()
        call.note("fused")
        x = call.state
        return functional.silu(x)


_PRODUCTS = frozenset({torch.mul, torch.multiply, torch.Tensor.mul, torch.Tensor.multiply})
_PRODUCTS |= {torch.Tensor.__mul__, torch.Tensor.__rmul__}


def _concatenated(tensors: Sequence[Any], dim: int = 0) -> list[torch.Tensor] | None:
    """The parts, if they are images whose channels are put together."""
    if dim != _CHANNELS or not isinstance(tensors, (tuple, list)) or len(tensors) < 2:
        return None
    plain = all(isinstance(each, torch.Tensor) and not isinstance(each, Deferred) for each in tensors)
    if not plain or not all(3 <= each.dim() <= 5 and each.is_floating_point() for each in tensors):
        return None
    others = {(*each.shape[:1], *each.shape[2:]) for each in tensors}
    kinds = {(each.dtype, each.device) for each in tensors}
    return list(tensors) if len(others) == 1 and len(kinds) == 1 else None


def _convolution(
    input: Any,
    weight: Any,
    bias: Any = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> tuple[Any, Any, Any, dict[str, Any]]:
    rest = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups}
    return input, weight, bias, rest

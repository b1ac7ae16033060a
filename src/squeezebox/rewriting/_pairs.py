"""Rules that take two calls for one: convolutions of concatenations, gates, chains of products."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn import functional

from squeezebox.rewriting._deferred import Deferred, Waiting

CONVOLUTIONS = {torch.conv1d: 1, torch.conv2d: 2, torch.conv3d: 3}  # and their spatial dims
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
        if func not in CONVOLUTIONS or len(call.shape) != CONVOLUTIONS[func] + 2:
            return NotImplemented
        try:
            x, weight, bias, rest = convolution(*args, **kwargs)
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
        if func not in PRODUCTS or len(args) != 2 or kwargs:
            return NotImplemented
        others = [each for each in args if not (isinstance(each, Deferred) and each.call is call)]
        x: Any = others[0] if len(others) == 1 else None
        if (x.call.made if isinstance(x, Deferred) else x) is not call.state:
            return NotImplemented
        call.require_unchanged()
        call.note("fused")
        x = call.state
        return functional.silu(x)


class ProductOrder:
    """``(a @ b) @ c`` as ``a @ (b @ c)``, or the other way round, where the inner product is smaller."""

    name = "product order"
    exact = False
    says = "(a @ b) @ c as a @ (b @ c) where b @ c has fewer elements than a @ b"
    functions = frozenset({torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__, torch.bmm, torch.mm})

    def begin(self, func: Any, args: Any, kwargs: Any, note: Callable[[str], None]) -> Any:
        """Put a product of matrices off."""
        if kwargs or len(args) != 2 or not _are_matrices(*args):
            return NotImplemented
        a, b = args
        shape = (*torch.broadcast_shapes(a.shape[:-2], b.shape[:-2]), a.shape[-2], b.shape[-1])
        return Deferred.of(Waiting(self, func, args, kwargs, shape, a.dtype, note, (a, b)))

    def read(self, call: Waiting, func: Any, args: Any, kwargs: Any) -> Any:
        """Its product with a third matrix, in the other order."""
        if func not in self.functions or kwargs or len(args) != 2:
            return NotImplemented
        a, b = call.state
        is_left = isinstance(args[0], Deferred) and args[0].call is call
        other = args[1] if is_left else args[0]
        inner = (b, other) if is_left else (other, a)
        fits = not isinstance(other, Deferred) and _are_matrices(*inner)
        if not fits or inner[0].shape[-2] * inner[1].shape[-1] >= call.shape[-2] * call.shape[-1]:
            return NotImplemented
        call.require_unchanged()
        call.note("fused")
        small = torch.matmul(*inner)
        return torch.matmul(a, small) if is_left else torch.matmul(small, b)


def _are_matrices(a: Any, b: Any) -> bool:
    """Whether they are plain, and a product of them is made as it stands."""
    if not all(isinstance(each, torch.Tensor) and not isinstance(each, Deferred) for each in (a, b)):
        return False
    if a.dim() < 2 or b.dim() < 2 or a.dim() != b.dim() or a.shape[-1] != b.shape[-2]:
        return False
    alike = a.dtype == b.dtype and a.device == b.device and a.is_floating_point()
    return bool(alike and a.shape[:-2] == b.shape[:-2] and not torch.is_autocast_enabled(a.device.type))


PRODUCTS = frozenset({torch.mul, torch.multiply, torch.Tensor.mul, torch.Tensor.multiply})
PRODUCTS |= {torch.Tensor.__mul__, torch.Tensor.__rmul__}


def _concatenated(tensors: Sequence[Any], dim: int = 0) -> list[torch.Tensor] | None:
    """The parts, if they are images whose channels are put together."""
    if dim != _CHANNELS or not isinstance(tensors, (tuple, list)) or len(tensors) < 2:
        return None
    plain = all(isinstance(each, torch.Tensor) and not isinstance(each, Deferred) for each in tensors)
    if not plain or not all(3 <= each.dim() <= 5 and each.is_floating_point() for each in tensors):
        return None
    if not all(each.shape[_CHANNELS] for each in tensors):  # no convolution has a part without channels
        return None
    others = {(*each.shape[:1], *each.shape[2:]) for each in tensors}
    kinds = {(each.dtype, each.device) for each in tensors}
    return list(tensors) if len(others) == 1 and len(kinds) == 1 else None


def convolution(
    input: Any,
    weight: Any,
    bias: Any = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> tuple[Any, Any, Any, dict[str, Any]]:
    """Input, weight, bias and the rest of a convolution's arguments."""
    rest = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups}
    return input, weight, bias, rest

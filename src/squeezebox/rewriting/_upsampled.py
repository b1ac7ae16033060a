"""The rule that a convolution over an upsampled image reads the small one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn import functional

from squeezebox.rewriting._deferred import Deferred, Waiting
from squeezebox.rewriting._pairs import CONVOLUTIONS, convolution

_TRANSPOSED = {1: torch.conv_transpose1d, 2: torch.conv_transpose2d, 3: torch.conv_transpose3d}
_NEAREST = ("nearest", "nearest-exact")  # equal where sizes are multiples
_ASIDE = 2  # dims of batch and channels


class UpsampledConvolution:
    """A convolution over an image of repeated pixels as a transposed one over the image itself.

    A pixel that is repeated s times meets s taps of the kernel in turn, so it meets their sum: the transposed
    kernel is the kernel, flipped, with each tap s times (Shi et al., "Is the deconvolution layer the same as
    a convolutional layer?", 2016, for s = 2). It has fewer products: (k + s - 1) / s in place of k a dim.
    """

    name = "upsampled conv"
    exact = False
    says = "conv(upsample(x)) as a transposed conv of x, without the upsampled copy"
    functions = frozenset({functional.interpolate})

    def begin(self, func: Any, args: Any, kwargs: Any, note: Callable[[str], None]) -> Any:
        """Put a repetition of pixels off."""
        try:
            x, factors = _repeated(*args, **kwargs)
        except TypeError:  # it is called with what we do not know
            return NotImplemented
        if factors is None:
            return NotImplemented
        sizes = [size * factor for size, factor in zip(x.shape[_ASIDE:], factors, strict=True)]
        shape = (*x.shape[:_ASIDE], *sizes)
        return Deferred.of(Waiting(self, func, args, kwargs, shape, x.dtype, note, (x, factors)))

    def read(self, call: Waiting, func: Any, args: Any, kwargs: Any) -> Any:
        """A convolution of stride 1 without groups reads the image before."""
        if func not in CONVOLUTIONS or len(call.shape) != CONVOLUTIONS[func] + _ASIDE:
            return NotImplemented
        try:
            given, weight, bias, rest = convolution(*args, **kwargs)
        except TypeError:
            return NotImplemented
        x, factors = call.state
        dims, padding = len(factors), rest["padding"]
        ones = all(each in (1, (1,) * dims, [1] * dims) for each in (rest["stride"], rest["dilation"]))
        plain = isinstance(given, Deferred) and given.call is call and not isinstance(weight, Deferred)
        if not (plain and ones and rest["groups"] == 1) or isinstance(padding, str):
            return NotImplemented
        pads = [padding] * dims if isinstance(padding, int) else list(padding) * (dims // len(padding))
        cuts = [size - 1 - pad for size, pad in zip(weight.shape[_ASIDE:], pads, strict=True)]
        if min(cuts) < 0:
            return NotImplemented
        call.require_unchanged()
        call.note("fused")
        kernel = _transposed(weight, factors)
        return _TRANSPOSED[dims](x, kernel, bias, stride=factors, padding=cuts)


def _repeated(
    input: Any,
    size: Any = None,
    scale_factor: Any = None,
    mode: str = "nearest",
    align_corners: Any = None,
    recompute_scale_factor: Any = None,
    antialias: bool = False,
) -> tuple[Any, tuple[int, ...] | None]:
    """The image, and how often each of its pixels is repeated in each dim; None where it is not."""
    if not isinstance(input, torch.Tensor) or isinstance(input, Deferred) or not input.is_floating_point():
        return input, None
    dims = input.dim() - _ASIDE
    casts = torch.is_autocast_enabled(input.device.type)  # and then repeats pixels in another dtype
    if dims not in _TRANSPOSED or mode not in _NEAREST or antialias or casts or 0 in input.shape:
        return input, None
    wanted = scale_factor if size is None else size
    each = list(wanted) if isinstance(wanted, Sequence) else [wanted] * dims
    if size is not None:
        each = [large / small for large, small in zip(each, input.shape[_ASIDE:], strict=False)]
    if len(each) != dims or any(factor != int(factor) or factor < 1 for factor in each) or max(each) == 1:
        return input, None
    return input, tuple(int(factor) for factor in each)


def _transposed(weight: torch.Tensor, factors: Sequence[int]) -> torch.Tensor:
    """The kernel that a transposed convolution of these strides needs."""
    dims = range(_ASIDE, weight.dim())
    kernel = weight.flip(*dims)
    for dim, factor in zip(dims, factors, strict=True):
        pads = [0] * (2 * weight.dim())
        pads[2 * (weight.dim() - 1 - dim)] = pads[2 * (weight.dim() - 1 - dim) + 1] = factor - 1
        kernel = functional.pad(kernel, pads).unfold(dim, factor, 1).sum(-1)
    return kernel.transpose(0, 1)

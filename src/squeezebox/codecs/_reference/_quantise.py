"""Uniform quantisation of one chunk with the error checked on the value that will be decoded."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from squeezebox.codecs._reference._groups import compute_dtype

# Where the sign-preserving code's steps lie, from zero outwards: the first one is cut to SHORT = 1 - SHIFT of
# a step and its value put so that, for a density that is flat near zero, the errors' mean vanishes:
# (1 - SHIFT)^2 / 2 - (1 - SHIFT) * (1 - OFFSET) = -1/12, and no error exceeds half a step.
SHIFT = 0.5 - 12**-0.5
OFFSET = 1.0 - 12**-0.5
INTEGERS = {8: torch.int8, 16: torch.int16, 32: torch.int32}


def extent(flat: Tensor) -> tuple[float, float]:
    """Smallest and largest element; NaN if any element is NaN or infinite."""
    low, high = flat.aminmax()
    if not bool(torch.isfinite(low) & torch.isfinite(high)):
        return float("nan"), float("nan")
    return float(low), float(high)


def inverse(step: float, dtype: torch.dtype) -> float:
    """1 / step, rounded as the kernels use it."""
    if compute_dtype(dtype) == torch.float64:
        return 1.0 / step
    return float(np.float32(1.0 / step))


def _values(codes: Tensor, step: float, keep_sign: bool, dtype: torch.dtype) -> Tensor:
    value = codes.to(compute_dtype(dtype))
    if keep_sign:
        value = value - OFFSET * value.sign()
    return (value * step).to(dtype)


def _codes(value: Tensor, step: float, keep_sign: bool) -> Tensor:
    scaled = value * inverse(step, value.dtype)
    if not keep_sign:
        return scaled.round()
    magnitude = (scaled.abs() + SHIFT).ceil().clamp(min=1)
    return torch.where(value == 0, 0.0, magnitude.copysign(value))


def narrow(flat: Tensor, step: float, limit: float, keep_sign: bool) -> Tensor | None:
    """8-bit codes of a float32 chunk, or None where one does not fit or would miss ``limit``.

    The common case in one pass: neither the chunk's extent nor a second look at it is needed.
    """
    codes = _codes(flat, step, keep_sign)
    if not bool((codes.abs() <= 127).all()):
        return None
    return quantise(flat, step, limit, keep_sign, 8, 0)


def quantise(flat: Tensor, step: float, limit: float, keep_sign: bool, width: int, lag: int) -> Tensor | None:
    """Codes of ``width`` bits, or None where one decoded element would miss ``limit`` (or its sign).

    ``step`` and ``limit`` are representable in the dtype computed in, and no code exceeds the width.
    """
    value = flat.to(compute_dtype(flat.dtype))
    codes = _codes(value, step, keep_sign).to(INTEGERS[width])
    decoded = _values(codes, step, keep_sign, flat.dtype).to(value.dtype)
    good = (value - decoded).abs() <= limit
    if keep_sign:
        good &= decoded.sign() == value.sign()
    if not bool(good.all()):
        return None
    return difference(codes, lag)


def multiply(source: Tensor, start: int, factors: Tensor, inner: int, out: Tensor) -> None:
    """``source[i] * factors[channel]`` into ``out``, for the flat elements from ``start`` on.

    ``inner`` neighbours in memory share a channel; the channels repeat without end.
    """
    positions = torch.arange(start, start + source.numel(), device=source.device)
    out.copy_(source * factors[positions // inner % factors.numel()])


def dequantise(codes: Tensor, step: float, keep_sign: bool, lag: int, out: Tensor) -> None:
    """The inverse of ``quantise``, into ``out``."""
    out.copy_(_values(accumulate(codes, lag), step, keep_sign, out.dtype))


def difference(codes: Tensor, lag: int) -> Tensor:
    """``codes[i] - codes[i - lag]`` with wraparound; the first ``lag`` codes as they are."""
    if lag == 0 or lag >= codes.numel():
        return codes
    return torch.cat((codes[:lag], codes[lag:] - codes[:-lag]))


def accumulate(codes: Tensor, lag: int) -> Tensor:
    """The inverse of ``difference``."""
    if lag == 0 or lag >= codes.numel():
        return codes
    filled = torch.nn.functional.pad(codes, (0, -codes.numel() % lag))
    return filled.view(-1, lag).cumsum(0).to(codes.dtype).view(-1)[: codes.numel()]

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
# Dither: the steps' phase in 2^-16, of the first run of elements and from one run to the next. Multiples of
# the golden ratio fill a whole step evenly. With the sign kept there is half a step to fill, over which the
# errors' mean vanishes too; the first run then has SHIFT.
FIRST_TURN = {False: 1 << 15, True: round(SHIFT * (1 << 17))}
NEXT_TURN = 40503
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


def _still(keep_sign: bool) -> float:
    """The phase without dither."""
    return SHIFT if keep_sign else 0.0


def _values(
    codes: Tensor, step: float | Tensor, phase: float | Tensor, keep_sign: bool, dtype: torch.dtype
) -> Tensor:
    value = codes.to(compute_dtype(dtype))
    value = value - (phase + 0.5) * value.sign() if keep_sign else value - phase
    return (value * step).to(dtype)


def _codes(value: Tensor, inverse_step: float | Tensor, phase: float | Tensor, keep_sign: bool) -> Tensor:
    scaled = value * inverse_step
    if not keep_sign:
        return (scaled + phase).round()
    magnitude = (scaled.abs() + phase).ceil().clamp(min=1)
    return torch.where(value == 0, 0.0, magnitude.copysign(value))


def channels(start: int, numel: int, inner: int, count: int, device: torch.device) -> Tensor:
    """Channel of each flat element from ``start`` on: ``inner`` neighbours share one, then they repeat."""
    return torch.arange(start, start + numel, device=device) // inner % count


def phases(start: int, numel: int, dither: int, keep_sign: bool, device: torch.device) -> float | Tensor:
    """How far each element's steps are moved, in steps; ``dither`` neighbours share a phase, 0: all."""
    if not dither:
        return _still(keep_sign)
    runs = torch.arange(start, start + numel, device=device) // dither
    turns = (FIRST_TURN[keep_sign] + runs * NEXT_TURN) & 0xFFFF
    return turns.float() * (2.0**-17 if keep_sign else 2.0**-16) - (0.0 if keep_sign else 0.5)


def narrow(
    flat: Tensor, start: int, inner: int, inverses: Tensor, dither: int, keep_sign: bool, width: int
) -> Tensor | None:
    """Codes of a float32 chunk in ``width`` bits, a step for each channel; None where one does not fit.

    Nor does a zero fit where dither would move it.

    Needs no second look at the elements: with normal steps and codes of at most 2^width / 2 - 1, rounding
    moves an element by no more than (1/2 + 2^(width - 22)) steps.
    """
    index = channels(start, flat.numel(), inner, inverses.numel(), flat.device)
    phase = phases(start, flat.numel(), dither, keep_sign, flat.device)
    codes = _codes(flat, inverses.to(flat.device)[index], phase, keep_sign)
    fits = codes.abs() <= (1 << (width - 1)) - 1
    if dither and not keep_sign:
        fits &= (flat != 0) | (torch.as_tensor(phase, device=flat.device) == 0)
    return codes.to(INTEGERS[width]) if bool(fits.all()) else None


def widen(
    codes: Tensor, start: int, inner: int, steps: Tensor, dither: int, keep_sign: bool, out: Tensor
) -> None:
    """The inverse of ``narrow``, into ``out``."""
    index = channels(start, codes.numel(), inner, steps.numel(), codes.device)
    phase = phases(start, codes.numel(), dither, keep_sign, codes.device)
    out.copy_(_values(codes, steps[index], phase, keep_sign, out.dtype))


def quantise(flat: Tensor, step: float, limit: float, keep_sign: bool, width: int) -> Tensor | None:
    """Codes of ``width`` bits, or None where one decoded element would miss ``limit`` (or its sign).

    ``step`` and ``limit`` are representable in the dtype computed in, and no code exceeds the width.
    """
    value = flat.to(compute_dtype(flat.dtype))
    codes = _codes(value, inverse(step, value.dtype), _still(keep_sign), keep_sign).to(INTEGERS[width])
    decoded = _values(codes, step, _still(keep_sign), keep_sign, flat.dtype).to(value.dtype)
    good = (value - decoded).abs() <= limit
    if keep_sign:
        good &= decoded.sign() == value.sign()
    if not bool(good.all()):
        return None
    return codes


def dequantise(codes: Tensor, step: float, keep_sign: bool, out: Tensor) -> None:
    """The inverse of ``quantise`` without its differences, into ``out``."""
    out.copy_(_values(codes, step, _still(keep_sign), keep_sign, out.dtype))


def difference(codes: Tensor, lag: int) -> Tensor:
    """``codes[i] - codes[i - lag]`` with wraparound; the first ``lag`` codes as they are."""
    if lag == 0 or lag >= codes.numel():
        return codes
    return torch.cat((codes[:lag], codes[lag:] - codes[:-lag]))


def accumulate(codes: Tensor, lag: int) -> Tensor:
    """The inverse of ``difference``."""
    if lag == 0 or lag >= codes.numel():
        return codes
    # Sums are int64 and then cut to the codes' width: they wrap where the differences did.
    filled = torch.nn.functional.pad(codes, (0, -codes.numel() % lag))
    return filled.view(-1, lag).cumsum(0).to(codes.dtype).view(-1)[: codes.numel()]

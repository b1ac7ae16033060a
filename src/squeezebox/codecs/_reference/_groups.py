"""Groups of 256 elements with one scale (level pinned at zero) or a minimum and a maximum."""

from __future__ import annotations

import torch
from torch import Tensor

from squeezebox.codecs._reference._bits import GROUP, pack_lanes, pad_groups, unpack_lanes
from squeezebox.codecs._reference._random import uniform

# Smallest scale and step: its inverse stays finite and half a step stays above zero in the dtype.
FLOORS = {
    torch.float32: 1e-35,
    torch.bfloat16: 1e-35,
    torch.float16: 2.0**-15,
    torch.float64: 1e-300,
}


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype scales are kept in and codes are computed in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _levels(signed: Tensor, bits: int, dtype: torch.dtype) -> Tensor:
    one_sided = torch.full((), (1 << bits) - 1, dtype=dtype, device=signed.device)
    two_sided = torch.full((), (1 << (bits - 1)) - 1, dtype=dtype, device=signed.device)
    return torch.where(signed, two_sided, one_sided)


def _noise(groups: Tensor, seed: int) -> Tensor:
    return uniform(groups.numel(), seed, groups.device, groups.dtype).view(-1, GROUP)


def _stochastic(scaled: Tensor, noise: Tensor) -> Tensor:
    whole = scaled.floor()
    return whole + (scaled - whole > noise).to(scaled.dtype)


def pack_zero(flat: Tensor, bits: int, stochastic: bool, seed: int) -> tuple[Tensor, Tensor]:
    """Codes, and one scale a group: the largest magnitude, negative where the group has both signs.

    Nearest: code k stands for (k - 1/2) * peak / levels, 0 for exact zeros only. Stochastic: code k stands
    for k * peak / levels. Groups with negatives use two's complement codes and half the levels.
    """
    groups = pad_groups(flat).to(compute_dtype(flat.dtype))
    signed = (groups < 0).any(1)
    peak = groups.abs().amax(1).clamp(min=FLOORS[flat.dtype])
    levels = _levels(signed, bits, groups.dtype)
    scaled = groups.abs() * (levels / peak)[:, None]
    if stochastic:
        code = _stochastic(scaled, _noise(groups, seed))
    else:
        code = torch.where(groups == 0, 0.0, scaled.ceil().clamp(min=1))
    code = torch.minimum(code, levels[:, None]).nan_to_num(0).to(torch.int16)
    code = torch.where(groups < 0, -code, code) & ((1 << bits) - 1)
    return pack_lanes(code.to(torch.uint8), bits).reshape(-1), torch.where(signed, -peak, peak)


def unpack_zero(codes: Tensor, scales: Tensor, bits: int, stochastic: bool, out: Tensor) -> None:
    """The inverse of ``pack_zero``, into ``out``."""
    code = unpack_lanes(codes.view(-1, 32 * bits), bits).to(torch.int16)
    half = 1 << (bits - 1)
    signed = scales < 0
    value = torch.where(signed[:, None], (code ^ half) - half, code).to(scales.dtype)
    step = scales.abs() / _levels(signed, bits, scales.dtype)
    if not stochastic:
        value = value - 0.5 * value.sign()
    _put(value * step[:, None], out)


def pack_minmax(flat: Tensor, bits: int, stochastic: bool, seed: int) -> tuple[Tensor, Tensor]:
    """Codes, and (offset, step) a group.

    step > 0: code k stands for offset + (k - levels/2) * step, the group's range in equal steps.
    step < 0: the group holds exact zeros; code k stands for (k - offset) * |step|, so code ``offset`` is
    exactly zero.
    """
    groups = pad_groups(flat).to(compute_dtype(flat.dtype))
    top = float((1 << bits) - 1)
    low, high = groups.amin(1), groups.amax(1)
    pinned = (groups == 0).any(1)
    step = (high / top - low / top).clamp(min=FLOORS[flat.dtype])
    centre = low * 0.5 + high * 0.5
    zero = (-low / step).round().clamp(0, top) + 0.0
    if stochastic:
        zero = torch.where((low < 0) & (high > 0), zero.clamp(1, top - 1), zero)
        cover = torch.maximum(-low / zero.clamp(min=1), high / (top - zero).clamp(min=1))
        step = torch.where(pinned, cover.clamp(min=FLOORS[flat.dtype]), step)
    shift = torch.where(pinned, 0.0, centre)[:, None]
    origin = torch.where(pinned, zero, top * 0.5)[:, None]
    scaled = (groups - shift) * (1.0 / step)[:, None] + origin
    code = _stochastic(scaled, _noise(groups, seed)) if stochastic else scaled.round()
    code = code.clamp(0, top).nan_to_num(0).to(torch.uint8)
    scales = torch.stack((torch.where(pinned, zero, centre), torch.where(pinned, -step, step)), 1)
    return pack_lanes(code, bits).reshape(-1), scales.reshape(-1)


def unpack_minmax(codes: Tensor, scales: Tensor, bits: int, out: Tensor) -> None:
    """The inverse of ``pack_minmax``, into ``out``."""
    offset, step = scales.view(-1, 2).unbind(1)
    code = unpack_lanes(codes.view(-1, 32 * bits), bits).to(scales.dtype)
    pinned = step < 0
    origin = torch.where(pinned, offset, float((1 << bits) - 1) * 0.5)[:, None]
    shift = torch.where(pinned, 0.0, offset)[:, None]
    _put((code - origin) * step.abs()[:, None] + shift, out)


def _put(value: Tensor, out: Tensor) -> None:
    """Decoded groups into ``out``, no further from zero than its dtype reaches."""
    limit = torch.finfo(out.dtype).max
    out.copy_(value.clamp(-limit, limit).view(-1)[: out.numel()])

"""Groups of 256: codes of few bits, flags, places in windows, and elements that share a scale."""

from __future__ import annotations

import torch
from torch import Tensor

GROUP = 256


def group_count(numel: int) -> int:
    """Groups of 256 needed for this many elements."""
    return -(-numel // GROUP)


def pack_lanes(codes: Tensor, bits: int) -> Tensor:
    """[groups, 256] uint8 codes to [groups, 32 * bits] bytes.

    Bits i*b.. of byte j hold element ``i * (256 * b / 8) + j`` of the group; 3 bits are a plane of 2
    followed by a plane of 1.
    """
    if bits == 3:
        return torch.cat((pack_lanes(codes & 3, 2), pack_lanes(codes >> 2, 1)), 1)
    if bits == 8:
        return codes
    lanes = codes.view(-1, 8 // bits, GROUP * bits // 8)
    packed = lanes[:, 0].clone()
    for lane in range(1, 8 // bits):
        packed |= lanes[:, lane] << (lane * bits)
    return packed


def unpack_lanes(packed: Tensor, bits: int) -> Tensor:
    """The inverse of ``pack_lanes``."""
    if bits == 3:
        return unpack_lanes(packed[:, :64], 2) | (unpack_lanes(packed[:, 64:], 1) << 2)
    if bits == 8:
        return packed
    lanes = [(packed >> (lane * bits)) & ((1 << bits) - 1) for lane in range(8 // bits)]
    return torch.cat(lanes, 1)


def pad_groups(flat: Tensor) -> Tensor:
    """[groups, 256] with the last element repeated to fill the last group."""
    missing = -flat.numel() % GROUP
    if missing:
        flat = torch.cat((flat, flat[-1:].expand(missing)))
    return flat.reshape(-1, GROUP)


def pack_codes(codes: Tensor, bits: int) -> Tensor:
    """Flat uint8 codes to flat bytes; the last group is filled with zeros."""
    filled = torch.nn.functional.pad(codes, (0, -codes.numel() % GROUP))
    return pack_lanes(filled.view(-1, GROUP), bits).reshape(-1)


def unpack_codes(packed: Tensor, bits: int, numel: int) -> Tensor:
    """The inverse of ``pack_codes``."""
    return unpack_lanes(packed.view(-1, 32 * bits), bits).reshape(-1)[:numel]


def pack_nonzero(flat: Tensor, value: float, negative: bool) -> tuple[Tensor, Tensor]:
    """Bits of ``x == value``, and whether every element is ``value`` or a zero (-0.0 if ``negative``)."""
    hit = flat == value
    return pack_codes(hit.to(torch.uint8), 1), (hit | (flat == 0) & (flat.signbit() == negative)).all()


def pack_positive(flat: Tensor) -> Tensor:
    """Bits of ``not (x <= 0)``: what threshold_backward lets through, NaN included."""
    return pack_codes((flat <= 0).logical_not().to(torch.uint8), 1)


def pack_between(flat: Tensor, lower: float, upper: float, inclusive: bool) -> Tensor:
    """Bits of ``lower <= x <= upper`` (clamp), or of ``not (x <= lower or x >= upper)`` (hardtanh)."""
    return pack_codes(between(flat, lower, upper, inclusive).to(torch.uint8), 1)


def between(flat: Tensor, lower: float, upper: float, inclusive: bool) -> Tensor:
    """Whether each element lies in the interval; hardtanh compares halves as float32, clamp as they are."""
    if inclusive:
        return (flat >= lower) & (flat <= upper)
    wide = flat.double() if flat.dtype == torch.float64 else flat.float()
    return ((wide <= lower) | (wide >= upper)).logical_not()


def unpack_bits(packed: Tensor, zero: float, one: float, out: Tensor) -> None:
    """``one`` where the bit is set, else ``zero``, into ``out``."""
    bits = unpack_codes(packed, 1, out.numel()).bool()
    pair = torch.tensor([zero, one], device=out.device, dtype=torch.float64).to(out.dtype)
    out.copy_(torch.where(bits, pair[1], pair[0]))


LOW = 0xFFFFFFFF


def uniform(numel: int, seed: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """``numel`` numbers in [0, 1) with 24 random bits each (the lowbias32 hash of the index)."""
    index = torch.arange(numel, device=device)
    hashed = ((index & LOW) * 0x9E3779B1 + (seed & LOW) + (index >> 32) * 0x632BE5AB) & LOW
    hashed = hashed ^ (hashed >> 16)
    hashed = (hashed * 0x7FEB352D) & LOW
    hashed = hashed ^ (hashed >> 15)
    hashed = (hashed * 0x846CA68B) & LOW
    hashed = hashed ^ (hashed >> 16)
    return (hashed >> 8).to(dtype) * 2.0**-24


def pack_offsets(indices: Tensor, base: Tensor, places: Tensor, inner: int) -> tuple[Tensor, Tensor]:
    """The place k with ``index - base[position] == places[k]`` for each element, and whether all have one.

    Elements run as [outer, position, inner] in memory order.
    """
    offset = (indices.view(-1, base.numel(), inner) - base[:, None]).reshape(-1)
    codes = torch.zeros(offset.numel(), dtype=torch.uint8, device=offset.device)
    found = torch.zeros_like(offset, dtype=torch.bool)
    for code in range(places.numel()):
        hit = offset == places[code]
        codes[hit] = code
        found |= hit
    return codes, found.all()


def unpack_offsets(codes: Tensor, base: Tensor, places: Tensor, inner: int, out: Tensor) -> None:
    """The inverse of ``pack_offsets``, into ``out``."""
    offset = places[codes.long()].view(-1, base.numel(), inner)
    out.copy_((offset + base[:, None]).reshape(-1))


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

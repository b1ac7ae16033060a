"""Rows as messages: as they are, or in 2, 4 or 8 bits an element, rounded at random without bias."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

_WIDTHS = (2, 4, 8)
_ROW_BYTES = 9  # bits, lowest value and step


def allotted(energies: Tensor, mean_bits: float) -> Tensor:
    """Bits of each row, 2, 4 or 8 and ``mean_bits`` on average at most, with the least error.

    A row in b bits adds energy / (2**b - 1)**2. Each further step from 2 to 4 and from 4 to 8 bits saves less
    a bit than the one before, so steps are taken by what they save a bit.

    Args:
        energies: of each row: range**2 times the sum of its squared weights at targets.
        mean_bits: at least 2.
    """
    count = len(energies)
    steps = list(itertools.pairwise(_WIDTHS))
    saved = [(1 / (2**low - 1) ** 2 - 1 / (2**high - 1) ** 2) / (high - low) for low, high in steps]
    gains = torch.cat([energies.double() * each for each in saved])
    costs = torch.cat([torch.full((count,), high - low) for low, high in steps])
    order = gains.argsort(descending=True, stable=True)
    fits = costs[order].cumsum(0) <= int((mean_bits - _WIDTHS[0]) * count)
    taken = torch.zeros(len(gains), dtype=torch.bool)
    taken[order[fits]] = True
    return _WIDTHS[0] + (costs * taken).view(len(steps), count).sum(0)


def packed(
    x: Tensor, squared_weights: Tensor, mean_bits: float | None, generator: torch.Generator | None = None
) -> Tensor:
    """The bytes of a message: exact, or with ``mean_bits`` an element and 9 bytes a row.

    Then E[unpacked(packed(x))] = x, and a row's squared error is at most range**2 / (2**b - 1)**2 / 4 an
    element on average. Each target adds it times w**2, for its weight w, to the error of all; AdaQP takes the
    square of the sum of w instead.

    Args:
        x: rows x elements.
        squared_weights: the sum of w**2 of each row.
        mean_bits: None for exact.
        generator: of the rounding; torch's own if not given.
    """
    if mean_bits is None or not x.numel():
        return x.contiguous().view(-1).view(torch.uint8)
    low, high = x.aminmax(dim=1)
    bits = allotted((high - low).square() * squared_weights, mean_bits)
    steps = (high - low).float() / (2.0**bits - 1).float()
    scale = steps.to(x.dtype).clamp(min=torch.finfo(torch.float32).tiny)[:, None]
    codes = ((x - low[:, None]) / scale + torch.empty_like(x).uniform_(generator=generator)).floor_()
    codes = codes.clamp_(torch.zeros((), dtype=x.dtype), (2.0**bits - 1).to(x.dtype)[:, None]).byte()
    parts = [bits.byte(), low.float().view(torch.uint8), steps.view(torch.uint8)]
    return torch.cat([*parts, *(_bytes_of(codes[bits == width], width).view(-1) for width in _WIDTHS)])


def unpacked(message: Tensor, rows: int, columns: int, dtype: torch.dtype, mean_bits: float | None) -> Tensor:
    """The rows of a message."""
    if mean_bits is None or not rows * columns:
        return message.view(dtype).view(rows, columns)
    bits, low, steps, content = message.split([rows, 4 * rows, 4 * rows, len(message) - _ROW_BYTES * rows])
    codes, at = torch.empty(rows, columns, dtype=torch.uint8), 0
    for width in _WIDTHS:
        which = (bits == width).nonzero()[:, 0]
        nbytes = len(which) * -(-columns * width // 8)
        codes[which] = _codes_of(content[at : at + nbytes], len(which), columns, width)
        at += nbytes
    begin, scale = (each.clone().view(torch.float32).to(dtype)[:, None] for each in (low, steps))
    found: Tensor = codes.to(dtype) * scale + begin
    return found


def _bytes_of(codes: Tensor, width: int) -> Tensor:
    """Codes of a row one behind another in its bytes."""
    rows, columns, each = *codes.shape, 8 // width
    padded = torch.nn.functional.pad(codes, (0, -columns % each)).view(rows, -(-columns // each), each)
    shifts = torch.arange(each, dtype=torch.uint8) * width
    found: Tensor = torch.sum(padded << shifts, -1, dtype=torch.uint8)
    return found


def _codes_of(content: Tensor, rows: int, columns: int, width: int) -> Tensor:
    each = 8 // width
    shifts = torch.arange(each, dtype=torch.uint8) * width
    found: Tensor = (content.view(rows, -(-columns // each), 1) >> shifts) & (2**width - 1)
    return found.flatten(1)[:, :columns]

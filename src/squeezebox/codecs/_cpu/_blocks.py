"""`blocks` on the CPU: what its reference computes of some blocks at a time, and loops for their words."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from squeezebox.codecs._reference import _blocks

_PIECE = 16 * _blocks.BLOCK  # elements: what is computed of them stays in the cache


def _pieces(flat: Tensor, table: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Where a piece starts, its elements, and its part of the table."""
    starts = range(0, flat.numel(), _PIECE)
    tables = table.split(2 * _PIECE // _blocks.BLOCK)
    return zip(starts, flat.split(_PIECE), tables, strict=False)  # split makes one piece of an empty tensor


def pack_blocks(
    flat: Tensor,
    bound: float,
    scale: Tensor | None,
    inner: int,
    dither: int,
    arena: Tensor,
    spill: Tensor,
    counters: Tensor,
    slot: int,
) -> Tensor:
    """As the reference."""
    from squeezebox.codecs._cpu import _block_loops

    table = torch.empty(2 * _blocks.block_count(flat.numel()), dtype=torch.int32, device="cpu")
    places = (arena.numpy(), spill.numpy(), counters.numpy(), slot)
    for start, piece, rows in _pieces(flat.detach(), table):
        values, *found = _blocks.quantised(piece, bound, scale, inner, dither, start)
        codes = (each.contiguous().numpy() for each in (values.view(torch.int32), *found))
        _block_loops.pack(*codes, *places, rows.numpy())
    return table


def unpack_blocks(
    arena: Tensor,
    spill: Tensor,
    table: Tensor,
    bound: float,
    scale: Tensor | None,
    inner: int,
    dither: int,
    out: Tensor,
) -> None:
    """As the reference."""
    from squeezebox.codecs._cpu import _block_loops

    for start, piece, rows in _pieces(out.detach(), table):
        magnitudes = torch.empty(rows.numel() // 2, _blocks.BLOCK, dtype=torch.int32, device="cpu")
        _block_loops.unpack(arena.numpy(), spill.numpy(), rows.numpy(), magnitudes.numpy())
        _blocks.dequantise(magnitudes, rows, bound, scale, inner, dither, piece, start)
    _blocks.restore_others(arena, spill, table, out)

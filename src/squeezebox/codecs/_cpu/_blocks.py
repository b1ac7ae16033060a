"""`blocks` on the CPU: what its reference computes of some blocks at a time, and loops for their words.

No session chooses it there: the CPU has it for what a device packed.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from squeezebox.codecs import _workers
from squeezebox.codecs._reference import _blocks

_PIECE = 16 * _blocks.BLOCK  # elements: what is computed of them stays in the cache
_AT_ONCE = 4  # pieces for each thread that are quantised before they are packed


def _pieces(flat: Tensor, table: Tensor) -> list[tuple[int, Tensor, Tensor]]:
    """Where a piece starts, its elements, and its part of the table."""
    starts = range(0, flat.numel(), _PIECE)
    tables = table.split(2 * _PIECE // _blocks.BLOCK)
    # split makes one piece of an empty tensor
    return list(zip(starts, flat.split(_PIECE), tables, strict=False))


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
    pieces = _pieces(flat.detach(), table)
    step = _AT_ONCE * torch.get_num_threads()

    def quantise(some: Sequence[int], number: int) -> list[NDArray[Any]]:
        start, piece, _ = pieces[some[number]]
        values, *found = _blocks.quantised(piece, bound, scale, inner, dither, start)
        return [each.contiguous().numpy() for each in (values.view(torch.int32), *found)]

    for first in range(0, len(pieces), step):  # blocks get their places in order
        here = range(first, min(first + step, len(pieces)))
        made = _workers.run(partial(quantise, here), len(here))
        for index, codes in zip(here, made, strict=True):
            _block_loops.pack(*codes, *places, pieces[index][2].numpy())
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

    pieces = _pieces(out.detach(), table)

    def work(index: int) -> None:
        start, piece, rows = pieces[index]
        magnitudes = torch.empty(rows.numel() // 2, _blocks.BLOCK, dtype=torch.int32, device="cpu")
        _block_loops.unpack(arena.numpy(), spill.numpy(), rows.numpy(), magnitudes.numpy())
        _blocks.dequantise(magnitudes, rows, bound, scale, inner, dither, piece, start)

    _workers.run(work, len(pieces))
    _blocks.restore_others(arena, spill, table, out)

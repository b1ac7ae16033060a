"""Optimizer state in 8 and 16 bits on the CPU: whole blocks over the worker threads."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from torch import Tensor

from squeezebox.codecs import _workers
from squeezebox.codecs._reference._states import BLOCK

_LEAST = 1024  # blocks of a thread's part: fewer are not worth waking it
_NONE = np.empty(0, np.float32)


def _over_blocks(work: Callable[[slice, slice], None], numel: int) -> None:
    """``work(elements, blocks)`` on every part."""
    parts = _workers.spans(-(-numel // BLOCK), _LEAST)

    def one(index: int) -> None:
        first, last = parts[index]
        work(slice(first * BLOCK, min(last * BLOCK, numel)), slice(first, last))

    _workers.run(one, len(parts))


def pack_squares(flat: Tensor, key: int, start: int, codes: Tensor, heads: Tensor) -> None:
    """Codes and heads of squares."""
    from squeezebox.codecs._cpu import _state_loops

    source, packed, head = flat.numpy(), codes.numpy(), heads.numpy()
    _over_blocks(
        lambda own, blocks: _state_loops.pack_squares(
            source[own], key, start + own.start, packed[own], head[blocks]
        ),
        flat.numel(),
    )


def unpack_squares(codes: Tensor, heads: Tensor, out: Tensor) -> None:
    """Squares, into ``out``."""
    from squeezebox.codecs._cpu import _state_loops

    packed, head, target = codes.numpy(), heads.numpy(), out.numpy()
    _over_blocks(
        lambda own, blocks: _state_loops.unpack_squares(packed[own], head[blocks], target[own]),
        out.numel(),
    )


def pack_signed(
    flat: Tensor, squares: Tensor | None, key: int, start: int, codes: Tensor, steps: Tensor
) -> None:
    """Codes and steps of signed values."""
    from squeezebox.codecs._cpu import _state_loops

    source, packed, step = flat.numpy(), codes.numpy(), steps.numpy()
    square = _NONE if squares is None else squares.numpy()
    _over_blocks(
        lambda own, blocks: _state_loops.pack_signed(
            source[own], square[own], key, start + own.start, packed[own], step[blocks]
        ),
        flat.numel(),
    )


def unpack_signed(codes: Tensor, steps: Tensor, squares: Tensor | None, out: Tensor) -> None:
    """Values, into ``out``."""
    from squeezebox.codecs._cpu import _state_loops

    packed, step, target = codes.numpy(), steps.numpy(), out.numpy()
    square = _NONE if squares is None else squares.numpy()
    _over_blocks(
        lambda own, blocks: _state_loops.unpack_signed(packed[own], step[blocks], square[own], target[own]),
        out.numel(),
    )


def pack_short(flat: Tensor, key: int, start: int, codes: Tensor) -> None:
    """The first 16 bits."""
    from squeezebox.codecs._cpu import _state_loops

    source, packed = flat.numpy(), codes.numpy()
    _over_blocks(
        lambda own, blocks: _state_loops.pack_short(source[own], key, start + own.start, packed[own]),
        flat.numel(),
    )


def unpack_short(codes: Tensor, out: Tensor) -> None:
    """Values, into ``out``."""
    from squeezebox.codecs._cpu import _state_loops

    packed, target = codes.numpy(), out.numpy()
    _over_blocks(lambda own, _: _state_loops.unpack_short(packed[own], target[own]), out.numel())

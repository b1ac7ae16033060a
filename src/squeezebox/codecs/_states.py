"""An optimizer's state of one parameter, in 16 or 8 bits an element."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from squeezebox.codecs._reference._states import BLOCK

_squeezebox: Any = torch.ops.squeezebox
_TURN = 0x632BE5AB  # odd: keys of one tensor come again after 2^32 rounds


class StateCodes:
    """Codes of a flat tensor, rounded stochastically; pieces of it are packed and unpacked by themselves.

    In 16 bits (bfloat16) an element is wrong by less than 2^-7 of itself. In 8 bits a square is wrong by less
    than an eighth of itself, or of the block's largest less 2^-31 where that is more; another value by less
    than a 127th of its block's largest, both in units of the root of ``squares`` where there are some.
    A block is 256 elements. Zeros stay zero. Where one element is infinite or NaN, its block may be.

    Args:
        like: of which shape and on which device.
        bits: 16 or 8.
        squares: whether elements are averages of squares, never negative.
        key: random numbers depend on it, and on how often all was packed.
    """

    def __init__(self, like: Tensor, bits: int, *, squares: bool, key: int) -> None:
        blocks = -(-like.numel() // BLOCK)

        def empty(count: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(count, dtype=dtype, device=like.device)

        self._key, self._round = key, 0
        self._pack: Callable[..., None]
        self._unpack: Callable[..., None]
        if bits == 16:
            self._pack, self._unpack = _squeezebox.pack_short, _squeezebox.unpack_short
            self._codes, self._heads = empty(like.numel(), torch.int16), None
        elif squares:
            self._pack, self._unpack = _squeezebox.pack_squares, _squeezebox.unpack_squares
            self._codes, self._heads = empty(like.numel(), torch.uint8), empty(blocks, torch.int32)
        else:
            self._pack, self._unpack = _squeezebox.pack_signed, _squeezebox.unpack_signed
            self._codes, self._heads = empty(like.numel(), torch.int8), empty(blocks, torch.float32)
        self.has_units = bits == 8 and not squares

    @staticmethod
    def bytes_of(numel: int, bits: int) -> int:
        """What ``numel`` elements take in 16 or 8 bits: the codes, and four bytes a block of those in 8."""
        return 2 * numel if bits == 16 else numel + 4 * -(-numel // BLOCK)

    @property
    def parts(self) -> list[Tensor]:
        """The codes, and what blocks have."""
        return [self._codes] if self._heads is None else [self._codes, self._heads]

    def pack(self, values: Tensor, start: int = 0, squares: Tensor | None = None) -> None:
        """Take float32 elements from ``start``, a whole number of blocks, on."""
        if start == 0:
            self._round += 1
        key = (self._key + self._round * _TURN) & 0x7FFFFFFF
        own = [values, squares] if self.has_units else [values]
        self._pack(*own, key, start, *self._pieces(start, start + values.numel()))

    def unpack(self, start: int, stop: int, out: Tensor, squares: Tensor | None = None) -> Tensor:
        """Elements from ``start``, a whole number of blocks, to ``stop``, into float32 memory."""
        own = [squares] if self.has_units else []
        self._unpack(*self._pieces(start, stop), *own, out)
        return out

    def _pieces(self, start: int, stop: int) -> list[Tensor]:
        codes, *heads = self.parts
        return [codes[start:stop], *(each[start // BLOCK : -(-stop // BLOCK)] for each in heads)]

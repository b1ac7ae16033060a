"""A group's gradients with what is owed of them, added up where they are read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property

import torch
from torch import Tensor

Sizes = Sequence[int]
Piece = Sequence[tuple[int, int]]  # places of parameters, and how many elements of each
PIECE = 1 << 20  # elements that are packed, or unpacked and summed, at once: they stay in a cache


class Wanted:
    """What the ranks want of one: ``gradient`` plus ``owed``, flat tensors, of parameters of these ``sizes``.

    The sum is a tensor of its own nowhere: it would take memory for a whole group, and time to get that.
    """

    def __init__(self, gradient: Tensor, owed: Tensor | None, sizes: Sizes) -> None:
        self._gradient, self._owed, self.sizes = gradient, owed, sizes
        self.dtype = gradient.dtype if owed is None else owed.dtype

    @cached_property
    def squares(self) -> Tensor:
        """The sum of squares of each parameter's, in float64; read before the gradient changes."""
        found = torch.zeros(len(self.sizes), dtype=torch.float64, device="cpu")
        for piece, own in self.pieces():
            norms = torch.stack(torch._foreach_norm(parts_of(own, piece), 2.0)).double()
            found.index_add_(0, torch.tensor([place for place, _ in piece]), norms.square())
        return found

    def peaks(self) -> list[tuple[int, float]]:
        """Each parameter's element of the largest magnitude: its place among all, and its value."""
        found = [(0, 0.0)] * len(self.sizes)
        begin = 0
        for piece, own in self.pieces():
            for (number, count), part in zip(piece, parts_of(own, piece), strict=True):
                place = int(part.abs().argmax())
                value = float(part[place])
                if abs(value) > abs(found[number][1]):
                    found[number] = begin + place, value
                begin += count
        return found

    def read(self, begin: int, out: Tensor) -> Tensor:
        """The elements from ``begin`` on, into ``out``."""
        own = self._gradient[begin : begin + out.numel()]
        return (
            out.copy_(own)
            if self._owed is None
            else torch.add(self._owed[begin:][: out.numel()], own, out=out)
        )

    def pieces(self) -> Iterator[tuple[Piece, Tensor]]:
        """All elements, in pieces that may be written to; the next one overwrites it."""
        room = self._gradient.new_empty(min(PIECE, self._gradient.numel()), dtype=self.dtype)
        begin = 0
        for piece in pieces_of(self.sizes):
            out = room[: sum(count for _, count in piece)]
            yield piece, self.read(begin, out)
            begin += out.numel()

    def whole(self) -> Tensor:
        """In a tensor of its own."""
        return self.read(0, self._gradient.new_empty(self._gradient.numel(), dtype=self.dtype))


def pieces_of(sizes: Sizes) -> Iterator[Piece]:
    """The parameters that lie in each piece."""
    piece: list[tuple[int, int]] = []
    room = PIECE
    for place, size in enumerate(sizes):
        left = size
        while left:
            count = min(left, room)
            piece.append((place, count))
            left, room = left - count, room - count
            if not room:
                yield piece
                piece, room = [], PIECE
    if piece:
        yield piece


def parts_of(flat: Tensor, piece: Piece) -> list[Tensor]:
    """A piece's parameters."""
    return list(flat.split([count for _, count in piece]))

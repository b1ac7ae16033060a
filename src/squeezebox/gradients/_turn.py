"""One group of parameters in one pass: its gradients are packed, exchanged and averaged; losses are kept."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from squeezebox.gradients._coders import Coder
from squeezebox.gradients._exchange import MOST_GATHERED, Exchange
from squeezebox.gradients._low_rank import LowRank
from squeezebox.gradients._residuals import Names
from squeezebox.gradients._wanted import Wanted

_WHOLE = -1  # in place of a message's size: this rank has NaN or infinity


@dataclass(kw_only=True, slots=True)
class Turn:
    """A group's gradients on their way.

    Args:
        names: of the group's parameters, in their order.
        flat: this rank's gradients, contiguous; takes the mean over ranks.
        sizes: of these parameters.
        residual: what all ranks are still owed of this one's gradients; takes what is lost now.
        level: of the coder.
        step: number of the pass.
        keeps_unused: the residual of a parameter without a gradient here waits for one.
    """

    names: Names
    flat: Tensor
    sizes: Sequence[int]
    residual: Tensor
    level: float
    step: int
    keeps_unused: bool = False
    lost_squares: float = 0.0
    wanted_squares: float = 0.0
    went_whole: bool = False

    def begin_whole(
        self, exchange: Exchange, dtype: torch.dtype | None = None, *, is_alone: bool = False
    ) -> Callable[[], None]:
        """As DistributedDataParallel itself does, or rounded to ``dtype`` on the way if that holds it.

        Where this thread ``is_alone`` to use the exchange, it is on its way at once.
        """
        flat = self.flat if dtype is None else self.flat.to(dtype)
        flat.mul_(1.0 / exchange.ranks)
        wait = exchange.begin_add(flat) if is_alone else None

        def job() -> None:
            if wait is None:
                exchange.add(flat)
            else:
                wait()
            if dtype is None:
                return
            mean = flat.to(self.flat.dtype)
            if not torch.isfinite(torch.linalg.vector_norm(mean)):  # it is the same on all ranks
                self.went_whole = True
                self.begin_whole(exchange)()
                return
            self.flat.copy_(mean)

        return job

    def begin_packed(self, coder: Coder, exchange: Exchange) -> Callable[[], None]:
        """Pack now; what is returned does the rest."""
        owed = self._set_aside()
        wanted = Wanted(self.flat, self.residual, self.sizes)
        squares = float(wanted.squares.sum())
        is_finite = math.isfinite(squares)
        self.wanted_squares = squares if is_finite else 0.0
        if exchange.ranks > MOST_GATHERED:
            whole = wanted.whole()
            parts = [Wanted(part, None, sizes) for part, sizes in shards(whole, self.sizes, exchange.ranks)]
            exchanged = partial(self._scattered, coder, exchange, whole)
        else:
            parts, exchanged = [wanted], partial(self._gathered, coder, exchange, wanted)
        messages = [coder.encode(part, self.level, self.step) for part in parts] if is_finite else []

        def job() -> None:
            try:
                exchanged(messages)
            finally:
                self._take_back(owed)

        return job

    def begin_low_rank(self, low_rank: LowRank, exchange: Exchange) -> Callable[[], None]:
        """What is returned reduces factors, from which every rank has the same mean."""
        owed = self._set_aside()
        wanted = Wanted(self.flat, self.residual, self.sizes).whole()
        norm = float(torch.linalg.vector_norm(wanted))
        self.wanted_squares = norm * norm

        def job() -> None:
            try:
                if not self._goes_whole(exchange, exchange.counts([0 if math.isfinite(norm) else _WHOLE])):
                    mean = wanted.clone()
                    low_rank.average(exchange, self.names, mean)
                    self._keep(wanted.sub_(mean))
                    self.flat.copy_(mean)
            finally:
                self._take_back(owed)

        return job

    def _set_aside(self) -> list[Tensor | None]:
        """What is owed of parameters without a gradient here, which does not go."""
        if not self.keeps_unused:
            return []
        found = [None if part.any() else owed.clone() for part, owed in self._parts()]
        for kept, (_, owed) in zip(found, self._parts(), strict=True):
            if kept is not None:
                owed.zero_()
        return found

    def _take_back(self, aside: Sequence[Tensor | None]) -> None:
        for kept, (_, owed) in zip(aside, self._parts(), strict=False):
            if kept is not None:
                owed.add_(kept)

    def _parts(self) -> list[tuple[Tensor, Tensor]]:
        """The gradient of each parameter, and what is owed."""
        sizes = list(self.sizes)
        return list(zip(self.flat.split(sizes), self.residual.split(sizes), strict=True))

    def _gathered(self, coder: Coder, exchange: Exchange, wanted: Wanted, messages: list[Tensor]) -> None:
        """Everybody gets everybody's message: (W - 1) of them."""
        counts = exchange.counts([each.numel() for each in messages] or [_WHOLE])
        if self._goes_whole(exchange, counts):
            return
        found = exchange.gather(messages[0], [sizes[0] for sizes in counts])
        begun, room = 0, torch.empty(0, dtype=wanted.dtype, device="cpu")
        for pieces in zip(*(coder.decode(each, self.sizes, wanted.dtype) for each in found), strict=True):
            here = slice(begun, begun + pieces[0].numel())
            if room.numel() < pieces[0].numel():
                room = torch.empty_like(pieces[0])
            lost = wanted.read(begun, room[: pieces[0].numel()]).sub_(pieces[exchange.rank])
            self.lost_squares += float(torch.linalg.vector_norm(lost)) ** 2
            self.residual[here].copy_(lost)
            for piece in pieces[1:]:  # in one order, so that all ranks have the same sum
                pieces[0].add_(piece)
            self.flat[here].copy_(pieces[0].mul_(1.0 / exchange.ranks))
            begun = here.stop

    def _scattered(self, coder: Coder, exchange: Exchange, wanted: Tensor, messages: list[Tensor]) -> None:
        """Every rank averages a shard and sends it on: 2 (W - 1) / W messages, packed twice."""
        counts = exchange.counts([each.numel() for each in messages] or [_WHOLE] * exchange.ranks)
        if self._goes_whole(exchange, counts):
            return
        found = exchange.scatter(messages, [sizes[exchange.rank] for sizes in counts])
        parts = shards(wanted, self.sizes, exchange.ranks)
        own, sizes = parts[exchange.rank]
        total = torch.zeros_like(own)
        for message in found:
            total.add_(_decoded(coder, message, sizes, own))
        for packed, (part, part_sizes) in zip(messages, parts, strict=True):
            part.sub_(_decoded(coder, packed, part_sizes, part))
        total.mul_(1.0 / exchange.ranks)
        message = coder.encode(Wanted(total, None, sizes), self.level, self.step)
        again = exchange.gather(message, [row[0] for row in exchange.counts([message.numel()])])
        mean = torch.empty_like(wanted)
        means = shards(mean, self.sizes, exchange.ranks)
        for packed, (part, part_sizes) in zip(again, means, strict=True):
            part.copy_(_decoded(coder, packed, part_sizes, part))
        # What the second packing loses of the mean, this rank owes as if it were its own gradient's.
        own.add_(total.sub_(means[exchange.rank][0]), alpha=exchange.ranks)
        self._keep(wanted)
        self.flat.copy_(mean)

    def _goes_whole(self, exchange: Exchange, counts: list[list[int]]) -> bool:
        """Where a rank has NaN or infinity, all gradients go as they are and residuals stay."""
        if all(sizes[0] != _WHOLE for sizes in counts):
            return False
        self.went_whole, self.wanted_squares = True, 0.0
        self.begin_whole(exchange)()
        return True

    def _keep(self, lost: Tensor) -> None:
        self.lost_squares = float(torch.linalg.vector_norm(lost)) ** 2
        self.residual.copy_(lost)


def _decoded(coder: Coder, message: Tensor, sizes: Sequence[int], like: Tensor) -> Tensor:
    """The whole tensor of a message."""
    out, begun = torch.empty_like(like), 0
    for piece in coder.decode(message, sizes, like.dtype):
        out[begun : begun + piece.numel()].copy_(piece)
        begun += piece.numel()
    return out


def shards(flat: Tensor, sizes: Sequence[int], count: int) -> list[tuple[Tensor, list[int]]]:
    """A flat tensor in ``count`` parts as even as can be, each with the sizes of its parameters' parts."""
    ends = list(itertools.accumulate(sizes))
    found = []
    for number in range(count):
        first, end = (flat.numel() * each // count for each in (number, number + 1))
        cuts = [first, *(each for each in ends if first < each < end), end]
        found.append((flat[first:end], [b - a for a, b in itertools.pairwise(cuts)]))
    return found

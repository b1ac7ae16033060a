"""Collectives of a group of ranks, counted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from squeezebox.gradients._link import all_reduce_bytes

MOST_GATHERED = 4  # ranks up to which everybody sends everything to everybody


class Exchange:
    """What the ranks of a group hand to each other; every rank calls the same in the same order.

    ``sent_bytes`` are those that this rank has put onto the wire: of an all-reduce 2 (W - 1) / W times the
    tensor, as a ring does.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.ranks, self.rank = dist.get_world_size(group), dist.get_rank(group)
        self.sent_bytes = 0

    def add(self, tensor: Tensor) -> None:
        """Every rank's tensors summed up, in place."""
        self.count_reduced(tensor.nbytes)
        dist.all_reduce(tensor, group=self.group)

    def begin_add(self, tensor: Tensor) -> Callable[[], object]:
        """The same, until what is returned has been called."""
        self.count_reduced(tensor.nbytes)
        work = dist.all_reduce(tensor, group=self.group, async_op=True)
        assert work is not None
        wait: Callable[[], object] = work.wait
        return wait

    def count_reduced(self, nbytes: int) -> None:
        """Somebody else has summed up ``nbytes`` of all ranks over this group."""
        self.sent_bytes += all_reduce_bytes(nbytes, self.ranks)

    def counts(self, numbers: Sequence[int]) -> list[list[int]]:
        """Every rank's integers, by rank."""
        return self._begin_rows(torch.tensor(numbers, dtype=torch.int64, device="cpu"))()

    def numbers(self, numbers: Sequence[float]) -> list[list[float]]:
        """Every rank's numbers, by rank."""
        return self.begin_numbers(numbers)()

    def begin_numbers(self, numbers: Sequence[float]) -> Callable[[], list[list[float]]]:
        """The same; what is returned waits for them."""
        return self._begin_rows(torch.tensor(numbers, dtype=torch.float64, device="cpu"))

    def first_text(self, text: str) -> str:
        """The first rank's text."""
        mine = torch.frombuffer(bytearray(text.encode() if self.rank == 0 else b" "), dtype=torch.uint8)
        sizes = [row[0] for row in self.counts([mine.numel()])]
        return bytes(self.gather(mine, sizes)[0].numpy()).decode()

    def gather(self, message: Tensor, sizes: Sequence[int]) -> list[Tensor]:
        """Every rank's message, whose sizes are known; they go as long as the longest."""
        most = max(sizes)
        mine = message.new_zeros(most)
        mine[: message.numel()] = message
        found = message.new_empty((self.ranks, most))
        self.sent_bytes += (self.ranks - 1) * most
        dist.all_gather(list(found.unbind()), mine, group=self.group)
        return [found[rank, :size] for rank, size in enumerate(sizes)]

    def scatter(self, messages: Sequence[Tensor], sizes: Sequence[int]) -> list[Tensor]:
        """A message to every rank; what each of them has for this one, in these sizes."""
        mine = torch.cat(list(messages))
        found = mine.new_empty(sum(sizes))
        self.sent_bytes += mine.numel() - messages[self.rank].numel()
        dist.all_to_all_single(
            found, mine, list(sizes), [each.numel() for each in messages], group=self.group
        )
        return list(found.split(list(sizes)))

    def _begin_rows(self, mine: Tensor) -> Callable[[], list[list[Any]]]:
        found = mine.new_empty((self.ranks, mine.numel()))
        self.sent_bytes += (self.ranks - 1) * mine.nbytes
        work = dist.all_gather(list(found.unbind()), mine, group=self.group, async_op=True)
        assert work is not None

        def rows() -> list[list[Any]]:
            work.wait()
            read: list[list[Any]] = found.tolist()
            return read

        return rows

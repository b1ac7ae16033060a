"""Collectives of a group of ranks, counted, and on demand as slow as over another link."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

from squeezebox.schema import Link

MOST_GATHERED = 4  # ranks up to which everybody sends everything to everybody


class Exchange:
    """What the ranks of a group hand to each other; every rank calls the same in the same order.

    ``sent_bytes`` are those that this rank has put onto the wire: of an all-reduce 2 (W - 1) / W times the
    tensor, as a ring does. With a ``link``, each call takes at least what it would over that.
    """

    def __init__(self, group: dist.ProcessGroup, link: Link | None = None) -> None:
        self.group, self.link = group, link
        self.ranks, self.rank = dist.get_world_size(group), dist.get_rank(group)
        self.sent_bytes = 0

    def add(self, tensor: Tensor) -> None:
        """Every rank's tensors summed up, in place."""
        with self._sent(all_reduce_bytes(tensor.nbytes, self.ranks)):
            dist.all_reduce(tensor, group=self.group)

    def count_reduced(self, nbytes: int) -> None:
        """Somebody else has summed up ``nbytes`` of all ranks over this group."""
        self.sent_bytes += all_reduce_bytes(nbytes, self.ranks)

    def counts(self, numbers: Sequence[int]) -> list[list[int]]:
        """Every rank's numbers, by rank."""
        mine = torch.tensor(numbers, dtype=torch.int64, device="cpu")
        found = mine.new_empty((self.ranks, len(numbers)))
        with self._sent((self.ranks - 1) * mine.nbytes):
            dist.all_gather(list(found.unbind()), mine, group=self.group)
        rows: list[list[int]] = found.tolist()
        return rows

    def gather(self, message: Tensor, sizes: Sequence[int]) -> list[Tensor]:
        """Every rank's message, whose sizes are known; they go as long as the longest."""
        most = max(sizes)
        mine = message.new_zeros(most)
        mine[: message.numel()] = message
        found = message.new_empty((self.ranks, most))
        with self._sent((self.ranks - 1) * most):
            dist.all_gather(list(found.unbind()), mine, group=self.group)
        return [found[rank, :size] for rank, size in enumerate(sizes)]

    def scatter(self, messages: Sequence[Tensor], sizes: Sequence[int]) -> list[Tensor]:
        """A message to every rank; what each of them has for this one, in these sizes."""
        mine = torch.cat(list(messages))
        found = mine.new_empty(sum(sizes))
        with self._sent(mine.numel() - messages[self.rank].numel()):
            dist.all_to_all_single(
                found, mine, list(sizes), [each.numel() for each in messages], group=self.group
            )
        return list(found.split(list(sizes)))

    @contextmanager
    def _sent(self, nbytes: int) -> Iterator[None]:
        begun = time.monotonic()
        yield
        self.sent_bytes += nbytes
        if self.link is not None:
            time.sleep(max(0.0, begun + self.link.seconds(nbytes) - time.monotonic()))


def all_reduce_bytes(nbytes: int, ranks: int) -> int:
    """What each rank sends in a ring all-reduce of a tensor."""
    return 2 * (ranks - 1) * nbytes // ranks

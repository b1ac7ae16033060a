"""Bags of tables that lie on several ranks: indices go to the rows' ranks, and sums come back."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from squeezebox.schema import EmbeddingPlan, OptionError, TableShard

Look = Callable[[int, Tensor, Tensor, str], Tensor]


class TableRanks:
    """The ranks of a plan, each with bags of its own and shards of tables.

    A shard gets the bags of all ranks, one rank's behind another's, as one process with them all would.

    Attributes:
        own: the tables of this rank's shards.
        counts: how many shards each rank has.
    """

    def __init__(self, plan: EmbeddingPlan, group: dist.ProcessGroup | None) -> None:
        if not dist.is_initialized():
            raise OptionError(
                f"the plan is for {plan.ranks} ranks: start them with torchrun, and call "
                "torch.distributed.init_process_group first."
            )
        if dist.get_world_size(group) != plan.ranks:
            raise OptionError(
                f"the plan is for {plan.ranks} ranks, and the group has {dist.get_world_size(group)}. "
                "Start as many, or plan for these."
            )
        self.rank = dist.get_rank(group)
        self._plan, self._group = plan, group
        self._of = [[each for each in plan.shards if each.rank == rank] for rank in range(plan.ranks)]
        self.own = [each.table for each in self._of[self.rank]]
        self.counts = [len(each) for each in self._of]

    def generator(self) -> torch.Generator:
        """The first rank's random numbers."""
        state = self.gathered(torch.get_rng_state())[0]
        generator = torch.Generator()
        generator.set_state(state)
        return generator

    def gathered(self, value: Any) -> list[Any]:
        """Every rank's value."""
        return everyones(value, self._plan.ranks, self._group)

    def join(self, parts: Tensor) -> None:
        """Add, bit by bit, what ranks have of a tensor where the others have zeros."""
        dist.all_reduce(parts.view(torch.uint8), group=self._group)

    def lookup(
        self,
        indices: Sequence[Tensor],
        offsets: Sequence[Tensor] | None,
        look: Look,
        *,
        mode: str,
        dtype: torch.dtype,
        problem: OptionError | None,
    ) -> list[Tensor]:
        """This rank's bags of every table.

        Args:
            indices: as the layer takes them.
            offsets: as the layer takes them.
            look: ``look(shard, indices, offsets, mode)`` gives bags of one of this rank's shards.
            mode: "sum" or "mean".
            dtype: of the tables.
            problem: what is wrong with this rank's indices; all ranks then raise.

        Raises:
            OptionError: the problem, or that another rank has one.
        """
        bags = [
            _flat(each, None if offsets is None else offsets[table])
            for table, each in enumerate(() if problem else indices)
        ]
        messages = [_message(bags, shards, self._plan) for shards in self._of] if bags else []
        counts = self._counts(bags, messages, problem)
        tables, own = len(self._plan.tables), self._of[self.rank]
        sizes = counts[:, :tables].tolist()
        came = self._exchanged(messages, counts[:, tables + self.rank].tolist())
        parts = [_parsed(each, own, size) for each, size in zip(came, sizes, strict=True)]
        found = []
        for number, shard in enumerate(own):
            lengths, ids = (torch.cat([part[2 * number + side] for part in parts]) for side in (0, 1))
            is_share = self._plan.is_split_by_rows(shard.table)
            begins = lengths.cumsum(0) - lengths
            found.append(look(number, ids - shard.first_row, begins, "sum" if is_share else mode))
        begin = torch.zeros(0, dtype=dtype, requires_grad=torch.is_grad_enabled())
        returned: Any = _Returned.apply(self, sizes, begin, *found)  # type: ignore[no-untyped-call]
        return self._assembled(iter(returned), [lengths for lengths, _ in bags], mode)

    def swap(
        self, given: Sequence[Sequence[Tensor]], sizes: list[list[int]], *, back: bool
    ) -> list[list[Tensor]]:
        """Blocks of bags x columns to each rank, for those that each has for this one.

        Args:
            given: blocks for each rank; an empty one for the type comes first.
            sizes: each rank's bags of every table.
            back: each shard's rank gives bags to the rank whose they are; else that gives their gradients.
        """
        shards = self._of if back else [self._of[self.rank]] * self._plan.ranks
        bags = [sizes[self.rank]] * self._plan.ranks if back else sizes
        shapes = [
            [(count[each.table], each.dim) for each in of] for of, count in zip(shards, bags, strict=True)
        ]
        vectors = [torch.cat([each.reshape(-1) for each in blocks]) for blocks in given]
        came = self._exchanged(vectors, [sum(rows * dim for rows, dim in each) for each in shapes])
        return [
            [
                block.view(shape)
                for block, shape in zip(vector.split([a * b for a, b in each]), each, strict=True)
            ]
            for vector, each in zip(came, shapes, strict=True)
        ]

    def _exchanged(self, given: Sequence[Tensor], sizes: list[int]) -> Sequence[Tensor]:
        """A vector to each rank for one from each, of these sizes."""
        out = given[0].new_empty(sum(sizes))
        own = [len(each) for each in given]
        dist.all_to_all_single(out, torch.cat(list(given)), sizes, own, group=self._group)
        found: Sequence[Tensor] = out.split(sizes)
        return found

    def _counts(
        self, bags: list[tuple[Tensor, Tensor]], messages: list[Tensor], problem: OptionError | None
    ) -> Tensor:
        """Of every rank: bags of each table, and elements of its message to each rank."""
        table = torch.zeros(
            self._plan.ranks, len(self._plan.tables) + self._plan.ranks + 1, dtype=torch.int64
        )
        own = [*(len(lengths) for lengths, _ in bags), *map(len, messages), 0]
        table[self.rank] = torch.tensor(own) if problem is None else 1
        dist.all_reduce(table, group=self._group)
        if problem is not None:
            raise problem
        if table[:, -1].any():
            bad = int(table[:, -1].argmax())
            raise OptionError(f"Rank {bad} has indices that do not fit; its own error says which.")
        return table

    def _assembled(self, parts: Iterator[Tensor], lengths: Sequence[Tensor], mode: str) -> list[Tensor]:
        """Of each table, its shards' columns next to each other, or the sum of its shards' rows."""
        of = {
            (each.table, each.first_row, each.first_column): next(parts) for own in self._of for each in own
        }
        found = []
        for table, count in enumerate(lengths):
            shards = [of[table, each.first_row, each.first_column] for each in self._plan.of(table)]
            if not self._plan.is_split_by_rows(table):
                found.append(torch.cat(shards, 1) if len(shards) > 1 else shards[0])
                continue
            total = sum(shards[1:], shards[0])
            found.append(total / count.clamp(min=1)[:, None] if mode == "mean" else total)
        return found


def everyones(value: Any, ranks: int, group: dist.ProcessGroup | None) -> list[Any]:
    """Every rank's value."""
    found: list[Any] = [None] * ranks
    dist.all_gather_object(found, value, group=group)
    return found


class _Returned(torch.autograd.Function):
    """Bags of all ranks from each rank's shards, for own bags of all ranks' shards."""

    @staticmethod
    def forward(ctx: Any, ranks: TableRanks, sizes: list[list[int]], empty: Tensor, *found: Tensor) -> Any:
        ctx.ranks, ctx.sizes, ctx.empty = ranks, sizes, empty.detach()
        blocks = [
            each.split([size[table] for size in sizes]) for each, table in zip(found, ranks.own, strict=True)
        ]
        given = [[ctx.empty, *(each[rank] for each in blocks)] for rank in range(len(sizes))]
        return tuple(each for came in ranks.swap(given, sizes, back=True) for each in came)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        remaining = iter(gradients)
        given = [[ctx.empty, *itertools.islice(remaining, count)] for count in ctx.ranks.counts]
        came = ctx.ranks.swap(given, ctx.sizes, back=False)
        return None, None, ctx.empty, *(torch.cat(parts) for parts in zip(*came, strict=True))


def _flat(indices: Tensor, offsets: Tensor | None) -> tuple[Tensor, Tensor]:
    """How many rows each bag has, and all bags' one behind another."""
    if offsets is None:
        return torch.full((len(indices),), indices.shape[1]), indices.flatten().long()
    return torch.diff(offsets.long(), append=torch.tensor([len(indices)])), indices.long()


def _message(
    bags: Sequence[tuple[Tensor, Tensor]], shards: Sequence[TableShard], plan: EmbeddingPlan
) -> Tensor:
    """For each shard the lengths of bags, and their rows that it has."""
    parts = [torch.empty(0, dtype=torch.int64)]
    for shard in shards:
        lengths, ids = bags[shard.table]
        if plan.is_split_by_rows(shard.table):
            bag = torch.arange(len(lengths)).repeat_interleave(lengths)
            is_here = (ids >= shard.first_row) & (ids < shard.end_row)
            lengths, ids = torch.bincount(bag[is_here], minlength=len(lengths)), ids[is_here]
        parts += [lengths, ids]
    return torch.cat(parts)


def _parsed(message: Tensor, shards: Sequence[TableShard], bags: list[int]) -> list[Tensor]:
    """Lengths and rows of the first shard, of the second, and so on."""
    found: list[Tensor] = []
    for shard in shards:
        lengths, message = message[: bags[shard.table]], message[bags[shard.table] :]
        count = int(lengths.sum())
        found += [lengths, message[:count]]
        message = message[count:]
    return found

"""Placements of embedding tables: a sample of bags proposes some, and those are measured."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from squeezebox.layers._table_ranks import everyones
from squeezebox.layers._table_rows import KNOWN_BYTES
from squeezebox.layers._table_shards import planned, problem_of, require_tables
from squeezebox.layers._tables import Factory, ShardedEmbeddingBag, row_state
from squeezebox.planner import Placement, TableSample, TableSearch
from squeezebox.reports import parse_size
from squeezebox.schema import EmbeddingPlan, OptionError

_ROUNDS = 2  # a placement's time depends on where its tensors came to lie
Batch = tuple[Sequence[Tensor], Sequence[Tensor] | None]


def plan_embeddings(
    tables: Sequence[tuple[int, int]],
    batches: Sequence[Batch],
    memory: int | str,
    *,
    optimizer: Factory,
    mode: str = "sum",
    group: dist.ProcessGroup | None = None,
    most: int = 4,
    folder: str | Path | None = None,
    dtype: torch.dtype | None = None,
) -> EmbeddingPlan:
    """Which rank has which tables, or parts of them, and which rows' memory, from a sample of steps.

    A cost by lookups, rows and columns proposes placements. The best of them, and whole tables sorted by
    lookups, then train on the sample, with tables of full size whose weights are zero, and the fastest is
    taken. The first half of the batches teaches which rows are looked up often, the second half is timed. In
    a process group all ranks call this together, each with its own bags of the same steps, and get one plan.

    Args:
        tables: (rows, dim) of each.
        batches: (indices, offsets) of each step, as :class:`ShardedEmbeddingBag` takes them; offsets may be
            None. At least two; 20 tell more.
        memory: of this rank, for rows in memory, as for the layer; ranks may differ.
        optimizer: as for the layer.
        mode: "sum" or "mean".
        group: the ranks; all of them if not given, or this process alone without torch.distributed.
        most: how many placements are measured, next to that by lookups.
        folder: where the tables' files are meanwhile; by default a temporary folder on a disk.
        dtype: of the weights.

    Returns:
        The plan, for ``ShardedEmbeddingBag(plan, optimizer=...)`` on as many ranks.

    Raises:
        OptionError: there are fewer than two batches, ranks have different numbers of them, or indices do
            not fit their table.
        BudgetError: the memory is too little to know where each row is; says how much would do.
        OutputError: the disk has not enough room for the tables.
    """
    require_tables(tables)
    ranks = dist.get_world_size(group) if dist.is_initialized() else 1
    memory_bytes, looked = parse_size("memory", memory), _looked(tables, batches)
    everyone = [(memory_bytes, looked)] if ranks == 1 else everyones((memory_bytes, looked), ranks, group)
    _require(everyone, looked)
    dtype = dtype or torch.get_default_dtype()
    parts = 1 + len(row_state(optimizer, dtype))
    search = TableSearch(
        [_sample(table, size, [own for _, own in everyone]) for table, size in enumerate(tables)],
        [nbytes for nbytes, _ in everyone],
        known_bytes=KNOWN_BYTES,
        element_bytes=parts * torch.empty(0, dtype=dtype).element_size(),
    )
    placements = search.best(most)
    sizes = tuple((rows, dim) for rows, dim in tables)
    other = planned(sizes, memory_bytes).shards if ranks == 1 else search.by_lookups()
    if other is not None and other not in placements:
        placements.append(other)
    seconds: dict[Placement, float] = {}
    for shards in placements * _ROUNDS:
        plan = EmbeddingPlan(tables=sizes, ranks=ranks, shards=shards)
        layer = ShardedEmbeddingBag(
            plan, optimizer=optimizer, mode=mode, group=group, draw=False, folder=folder, dtype=dtype
        )
        own = _seconds(layer, batches)
        slowest = own if ranks == 1 else max(everyones(own, ranks, group))
        seconds[shards] = min(slowest, seconds.get(shards, slowest))
        del layer  # its memory, before the next one's
    best, *others = sorted(placements, key=lambda shards: seconds[shards])
    return EmbeddingPlan(
        tables=sizes,
        ranks=ranks,
        shards=best,
        seconds=seconds[best],
        others=tuple(seconds[each] for each in others),
    )


_Looked = list[list[tuple[np.ndarray, int]]] | str  # of each step and table: indices and bags; or a problem


def _looked(tables: Sequence[tuple[int, int]], batches: Sequence[Batch]) -> _Looked:
    """What is looked up, or what is wrong with it."""
    if len(batches) < 2:
        return f"{len(batches)} batches came; give at least 2, one to learn from and one to time."
    found: list[list[tuple[np.ndarray, int]]] = []
    for step, (indices, offsets) in enumerate(batches):
        for what, given in (("indices", indices), ("offsets", offsets)):
            if given is not None and len(given) != len(tables):
                return f"batch {step} has {what} of {len(given)} tables, and there are {len(tables)}."
        found.append([])
        for table, each in enumerate(indices):
            begins = None if offsets is None else offsets[table]
            problem = problem_of(table, tables[table][0], each, begins)
            if problem:
                return f"in batch {step}, {problem}"
            found[-1].append((each.flatten().numpy(), len(each if begins is None else begins)))
    return found


def _require(everyone: Sequence[tuple[int, _Looked]], own: _Looked) -> None:
    if isinstance(own, str):
        raise OptionError(own)
    for rank, (_, looked) in enumerate(everyone):
        if isinstance(looked, str):
            raise OptionError(f"Rank {rank} has batches that do not fit; its own error says why.")
        if len(looked) != len(own):
            raise OptionError(
                f"Rank {rank} has {len(looked)} batches, and another has {len(own)}; give equally many."
            )


def _sample(table: int, size: tuple[int, int], everyone: Sequence[Any]) -> TableSample:
    """What the batches of all ranks look up in a table."""
    steps = [[looked[step][table] for looked in everyone] for step in range(len(everyone[0]))]
    distinct = [np.unique(np.concatenate([ids for ids, _ in step])) for step in steps]
    ids, half = np.unique(np.concatenate(distinct)), len(steps) // 2
    early, late = np.zeros(len(ids), np.int64), np.zeros(len(ids))
    for step, each in enumerate(distinct):
        (early if step < half else late)[np.searchsorted(ids, each)] += 1
    return TableSample(
        size=size,
        bags=statistics.fmean(sum(bags for _, bags in step) for step in steps),
        lookups=statistics.fmean(sum(len(indices) for indices, _ in step) for step in steps),
        ids=ids,
        early=early,
        late=late / (len(steps) - half),
    )


def _seconds(layer: ShardedEmbeddingBag, batches: Sequence[Batch]) -> float:
    """A step's, once memory has the rows that the first half of the batches looks up most."""
    half, times = len(batches) // 2, []
    for batch in [*batches[:half], *batches]:
        begun = time.perf_counter()
        outputs = layer(*batch)
        torch.autograd.backward(outputs, [torch.ones_like(each) for each in outputs])
        layer.step()
        times.append(time.perf_counter() - begun)
    return statistics.median(times[2 * half :])

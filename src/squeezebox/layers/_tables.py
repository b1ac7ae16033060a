"""Embedding tables whose rows lie in memory or in a file, by how often they are looked up."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from squeezebox.layers._table_ranks import TableRanks
from squeezebox.layers._table_rows import TableRows, chunks
from squeezebox.layers._table_shards import planned, problem_of, require_table
from squeezebox.memory import RowFile, usual_folder
from squeezebox.schema import EmbeddingPlan, OptionError, TableShard, in_one_line

_DRAWN = 16  # torch draws fewer normal numbers in another way
Factory = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


@dataclass(frozen=True, slots=True)
class _Looked:
    """Rows that were looked up: which, their weight, their records, and the table's writes until then."""

    ids: np.ndarray
    weight: nn.Parameter
    records: Tensor
    writes: int


class ShardedEmbeddingBag(nn.Module):
    """Bags of embeddings from tables that may be larger than memory.

    ``layer(indices, offsets)`` gives for each table what ``nn.EmbeddingBag(rows, dim, sparse=True)`` does,
    to the bit, and after backward :meth:`step` changes the rows that were looked up as the optimizer changes
    that module's weight. A row and its optimizer state lie next to each other: in memory, as long as
    there is room and then for the rows looked up most often, else in a file without a name. The weights are
    no parameters of the module, so that other optimizers leave them alone, and so does ``zero_grad()`` of a
    model that holds the layer: call its own :meth:`zero_grad` to forget gradients. ``state_dict()`` has them
    as that of an nn.ModuleList of the nn.EmbeddingBags, as tensors whose bytes lie in a file without a name.

    With a plan for several ranks, each rank has its shards of the tables, and gives bags of its own. All
    ranks call forward, backward and :meth:`step` together, and also what gives or takes whole tables. Each
    table is trained as one process would with the bags of all ranks, the first rank's first, and the sum of
    all ranks' losses. One that the plan splits by rows differs by rounding: its bags are sums of sums.

    Args:
        tables: (rows, dim) of each table, or a plan of :func:`squeezebox.plan_embeddings`. Weights are drawn
            as nn.EmbeddingBag draws them, by the first rank's random numbers.
        memory: bytes for rows in memory, with 12 bytes for each row of the tables, such as "2GiB". A step
            takes what its own distinct rows need, several times over, in addition. A plan has its own.
        optimizer: makes the optimizer of a list of parameters: one that takes sparse gradients, such as
            ``lambda tables: torch.optim.SparseAdam(tables, lr=0.01)``. SGD, Adagrad and SparseAdam do.
        mode: "sum" or "mean".
        group: the ranks of the plan; all of them if not given.
        draw: False leaves weights zero, where a state is loaded next.
        folder: where the file is; by default a temporary folder on a disk.
        dtype: of the weights, float32 or float64; torch's default type if not given.

    Attributes:
        optimizer: the optimizer that was made: change its learning rate as usual, but call :meth:`step` here.

    Raises:
        OptionError: a table has no rows or columns, the mode or type is another one, the optimizer takes no
            sparse gradients or changes rows that were not looked up, or the plan is for other ranks.
        BudgetError: memory is too little to know where each row is.
        OutputError: the folder cannot be written to, or its disk has not enough room.
    """

    def __init__(
        self,
        tables: Sequence[tuple[int, int]] | EmbeddingPlan,
        memory: int | str | None = None,
        *,
        optimizer: Factory,
        mode: str = "sum",
        group: Any = None,
        draw: bool = True,
        folder: str | Path | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if mode not in ("sum", "mean"):
            raise OptionError(f'mode is {mode!r}; give "sum" or "mean".')
        plan = planned(tables, memory)
        dtype = dtype or torch.get_default_dtype()
        if dtype not in (torch.float32, torch.float64):
            raise OptionError(f"tables of {dtype} are not supported; give dtype=torch.float32 or float64.")
        self._states = row_state(optimizer, dtype)
        self._tables, self._mode, self._dtype = list(plan.tables), mode, dtype
        self._ranks = None if plan.ranks == 1 and group is None else TableRanks(plan, group)
        rank = 0 if self._ranks is None else self._ranks.rank
        self._shards = [each for each in plan.shards if each.rank == rank]
        self._weights = [nn.Parameter(torch.empty(1, shard.dim, dtype=dtype)) for shard in self._shards]
        self.optimizer = optimizer(self._weights or [nn.Parameter(torch.empty(1, 1, dtype=dtype))])
        if self._ranks is not None and len(self.optimizer.param_groups) > 1:
            raise OptionError("on ranks the optimizer has one group of parameters; leave the others out.")
        self._begins_with_state = bool(self.optimizer.state)
        self._waiting: list[list[_Looked]] = [[] for _ in self._shards]
        self._folder = Path(usual_folder().path if folder is None else folder)
        self._rows = [TableRows(each, len(self._states), dtype, self._folder) for each in self._shards]
        for place, value in enumerate(self._states.values()):
            for rows, shard in zip(self._rows, self._shards, strict=True):
                if value:
                    rows.fill(1 + place, np.broadcast_to(value, (shard.rows, shard.dim)))
        if draw:
            self._draw()

    def forward(self, indices: Sequence[Tensor], offsets: Sequence[Tensor] | None = None) -> list[Tensor]:
        """One tensor of bags x dim for each table.

        Args:
            indices: for each table the rows to look up: bags x rows, or all bags' one behind another.
            offsets: for each table where each bag begins, in the latter case.

        Raises:
            OptionError: an index is out of range, indices or offsets are not integers or have another shape,
                or there are not as many tensors as tables.
        """
        problem = self._problem(indices, offsets)
        if self._ranks is not None:
            return self._ranks.lookup(
                indices, offsets, self._bags, mode=self._mode, dtype=self._dtype, problem=problem
            )
        if problem is not None:
            raise problem
        return [
            self._bags(table, each, None if offsets is None else offsets[table], self._mode)
            for table, each in enumerate(indices)
        ]

    def step(self) -> None:
        """Change the rows that were looked up since the last step, by their gradients."""
        changed = []
        for shard, parameter in enumerate(self._weights):
            parameter.grad = None
            if self._waiting[shard]:
                changed.append((shard, self._load(shard, self._waiting[shard])))
        with _checks_as_set():
            self.optimizer.step()
        for shard, ids in changed:
            parameter = self._weights[shard]
            state = self.optimizer.state.get(parameter, {})
            values = [parameter.detach(), *(state[name] for name in self._states)]
            self._rows[shard].write(ids, (torch.cat(values, 1) if self._states else values[0]).numpy())
        self.zero_grad()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients that came since the last step."""
        for waiting in self._waiting:
            for each in waiting:
                each.weight.grad = None  # a graph that is kept may give it another one
            waiting.clear()

    def weight(self, table: int, start: int = 0, stop: int | None = None) -> Tensor:
        """A copy of a table's rows from start to stop.

        Raises:
            OptionError: there is no such table, or it has no such rows.
        """
        require_table(table, len(self._tables))
        rows = self._tables[table][0]
        stop = rows if stop is None else stop
        if not 0 <= start <= stop <= rows:
            raise OptionError(f"table {table} has rows 0 to {rows - 1:,}, and not {start:,} to {stop:,}.")
        return self._part(table, 0, start, stop)

    def optimizer_state_dict(self) -> dict[str, Any]:
        """What the optimizer's ``state_dict()`` would be for plain tables, parameter 0 being the first."""
        found = self.optimizer.state_dict()
        shards = enumerate(self._shards)  # a rank without any has a parameter that is of none
        own = {shard.table: found["state"][number] for number, shard in shards if number in found["state"]}
        if self._ranks is not None:
            own = {table: state for known in self._ranks.gathered(own) for table, state in known.items()}
            found["param_groups"][0]["params"] = list(range(len(self._tables)))
        found["state"] = {
            table: own[table]
            | {name: self._column(table, 1 + place) for place, name in enumerate(self._states)}
            for table in sorted(own)
        }
        return found

    def load_optimizer_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over the state of an optimizer of this layer, or of plain tables.

        Raises:
            OptionError: it is another kind of optimizer's, or of other tables; nothing has changed then.
        """
        self._require_state(state_dict)
        one = {}
        for number, shard in enumerate(self._shards):
            state = state_dict["state"].get(shard.table)
            for place, (name, value) in enumerate(self._states.items()):
                begun = torch.tensor(value, dtype=self._dtype).expand(shard.rows, shard.dim)
                values = begun if state is None else state[name][shard.place]
                _fill(self._rows[number], 1 + place, values, self._dtype)
            if state is not None:
                one[number] = {
                    name: value[:1, : shard.dim] if name in self._states else value
                    for name, value in state.items()
                }
        groups = state_dict["param_groups"]
        if self._ranks is not None:
            groups = [groups[0] | {"params": list(range(max(len(self._shards), 1)))}]
        self.optimizer.load_state_dict(state_dict | {"state": one, "param_groups": groups})

    def __getstate__(self) -> Any:
        raise OptionError(
            "a ShardedEmbeddingBag is not copied, as its rows lie in a file; make another one, and load this "
            "one's state_dict() into it."
        )

    def _draw(self) -> None:
        """Normal numbers for all weights, table by table, as nn.EmbeddingBag draws them."""
        generator = None if self._ranks is None else self._ranks.generator()
        for table, (rows, dim) in enumerate(self._tables):
            for ids in chunks(0, rows, least=-(-_DRAWN // dim)):
                drawn = torch.empty(len(ids), dim, dtype=self._dtype).normal_(generator=generator).numpy()
                for number, shard in self._held(table):
                    here = slice(max(shard.first_row - ids[0], 0), max(shard.end_row - ids[0], 0))
                    values = drawn[here, shard.first_column : shard.end_column]
                    if len(values):
                        self._rows[number].fill(0, values, max(int(ids[0]) - shard.first_row, 0))

    def _held(self, table: int) -> list[tuple[int, TableShard]]:
        """A table's shards that are here, with their numbers."""
        return [(number, shard) for number, shard in enumerate(self._shards) if shard.table == table]

    def _part(self, table: int, place: int, start: int, stop: int) -> Tensor:
        """One part of a table's records from start to stop, from all ranks."""
        found = torch.zeros(stop - start, self._tables[table][1], dtype=self._dtype)
        for number, shard in self._held(table):
            first, end = max(start, shard.first_row), min(stop, shard.end_row)
            if first < end:
                records = self._rows[number].read(np.arange(first, end) - shard.first_row)
                values = torch.from_numpy(records[:, place * shard.dim : (place + 1) * shard.dim])
                found[first - start : end - start, shard.first_column : shard.end_column] = values
        if self._ranks is not None:
            self._ranks.join(found)
        return found

    def _column(self, table: int, place: int) -> Tensor:
        """One part of all of a table's records, in a mapped file without a name."""
        rows, dim = self._tables[table]
        copy = RowFile(self._folder, rows, dim, np.dtype(str(self._dtype)[6:]), "a copy of a table")
        for ids in chunks(0, rows):
            copy.write(ids, self._part(table, place, ids[0], ids[-1] + 1).numpy())
        return torch.from_numpy(copy.mapped())

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for table in range(len(self._tables)):
            destination[f"{prefix}{table}.weight"] = self._column(table, 0)

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        names = {f"{prefix}{table}.weight": table for table in range(len(self._tables))}
        missing_keys.extend(name for name in names if name not in state_dict)
        if strict:
            unexpected_keys.extend(
                name for name in state_dict if name.startswith(prefix) and name not in names
            )
        given = {table: state_dict[name] for name, table in names.items() if name in state_dict}
        problems = [
            f"table {table} is {self._tables[table]}, and {tuple(weight.shape)} came for it."
            for table, weight in given.items()
            if tuple(weight.shape) != self._tables[table]
        ]
        error_msgs.extend(problems)
        if not problems:  # other modules' keys are in these lists too, and strict is what torch makes of them
            self.zero_grad()
            for number, shard in enumerate(self._shards):
                if shard.table in given:
                    _fill(self._rows[number], 0, given[shard.table].detach()[shard.place], self._dtype)

    @property
    def rows_in_memory(self) -> list[int]:
        """How many rows of each table are in this process's memory now."""
        return [
            sum(self._rows[number].held for number, _ in self._held(table))
            for table in range(len(self._tables))
        ]

    def hot_rows(self, table: int) -> Tensor:
        """Which rows of a table are in this process's memory now, in order.

        Raises:
            OptionError: there is no such table.
        """
        require_table(table, len(self._tables))
        held = [self._rows[number].hot() + shard.first_row for number, shard in self._held(table)]
        return torch.from_numpy(np.unique(np.concatenate([np.zeros(0, np.int64), *held])))

    def _require_state(self, state_dict: dict[str, Any]) -> None:
        kind, states = type(self.optimizer).__name__, state_dict["state"]
        own, given = self.optimizer.param_groups[0], state_dict["param_groups"][0]
        missing = [name for name, value in own.items() if _is_number(value) and name not in given]
        missing += [name for state in states.values() for name in self._states if name not in state]
        if missing:
            raise OptionError(
                f"this state has no {missing[0]}, so it is not of {kind}; give that of {kind}, or make the "
                "layer with the optimizer that it is of."
            )
        tables = set(range(len(self._tables)))
        if not states.keys() <= tables or (self._begins_with_state and states.keys() != tables):
            raise OptionError(
                f"the state is of tables {sorted(states)}, and here are tables 0 to {len(tables) - 1}; load "
                "the state of these tables."
            )
        for table, state in states.items():
            for name in self._states:
                if tuple(state[name].shape) != self._tables[table]:
                    raise OptionError(
                        f"{name} of table {table} is {tuple(state[name].shape)}, and the table "
                        f"{self._tables[table]}; load the state of these tables."
                    )

    def _problem(self, indices: Sequence[Tensor], offsets: Sequence[Tensor] | None) -> OptionError | None:
        for what, given in (("indices", indices), ("offsets", offsets)):
            if given is not None and len(given) != len(self._tables):
                return OptionError(f"{len(given)} tensors of {what} came for {len(self._tables)} tables.")
        for table, each in enumerate(indices):
            found = problem_of(
                table, self._tables[table][0], each, None if offsets is None else offsets[table]
            )
            if found is not None:
                return OptionError(f"{found} Nothing was changed.")
        return None

    def _bags(self, shard: int, indices: Tensor, offsets: Tensor | None, mode: str) -> Tensor:
        ids, inverse = self._rows[shard].distinct(indices.numpy())
        ids = ids if ids.size else np.zeros(1, np.int64)  # torch has no bags of a table without rows
        records = torch.from_numpy(self._rows[shard].read(ids))
        found = records[:, : self._shards[shard].dim].contiguous()
        weight = nn.Parameter(found, requires_grad=torch.is_grad_enabled())
        if weight.requires_grad:
            self._rows[shard].count(ids)
            note = partial(_note, self._waiting[shard], ids, records, self._rows[shard].writes)
            weight.register_post_accumulate_grad_hook(note)
        local = torch.from_numpy(inverse.reshape(tuple(indices.shape)))
        return F.embedding_bag(
            local, weight, None if offsets is None else offsets.long(), mode=mode, sparse=True
        )

    def _load(self, shard: int, waiting: list[_Looked]) -> np.ndarray:
        """Give the optimizer the rows that are waiting, with their gradients and state; returns which."""
        rows, first = self._rows[shard], waiting[0]
        if len(waiting) == 1 and first.writes == rows.writes:
            ids, records, places = first.ids, first.records, np.arange(len(first.ids))
        else:
            ids, places = rows.distinct(np.concatenate([each.ids for each in waiting]))
            records = torch.from_numpy(rows.read(ids))
        parameter, begin, total = self._weights[shard], 0, None
        parts = records.split(self._shards[shard].dim, 1)
        parameter.data = parts[0].contiguous()
        for each in waiting:
            given: Any = each.weight.grad
            here = torch.from_numpy(places[begin : begin + len(each.ids)])[given._indices()[0]]
            begin += len(each.ids)
            with _checks_as_set():
                gradient = torch.sparse_coo_tensor(
                    here[None], given._values(), tuple(parameter.shape), check_invariants=False
                )
                total = gradient if total is None else total + gradient  # as torch adds those of one table
        parameter.grad = total
        state = self.optimizer.state.get(parameter)
        if state:
            state.update(
                {name: part.contiguous() for name, part in zip(self._states, parts[1:], strict=True)}
            )
        return ids


def _note(
    waiting: list[_Looked], ids: np.ndarray, records: Tensor, writes: int, weight: nn.Parameter
) -> None:
    """Have the next step use a gradient, in the order in which they come."""
    if all(each.weight is not weight for each in waiting):
        waiting.append(_Looked(ids, weight, records, writes))


def _fill(rows: TableRows, place: int, values: Tensor, dtype: torch.dtype) -> None:
    """One part of all records; of another dtype, some at a time."""
    for ids in chunks(0, len(values)):
        rows.fill(place, values[ids[0] : ids[-1] + 1].to(dtype).numpy(), int(ids[0]))


def row_state(factory: Factory, dtype: torch.dtype) -> dict[str, float]:
    """What the optimizer keeps of each element, with the value it begins with.

    Raises:
        OptionError: a step fails on sparse gradients, changes rows without gradient, or keeps what is not of
            single elements.
    """
    weight = nn.Parameter(torch.ones(2, 1, dtype=dtype))
    optimizer = factory([weight])
    begun = {name: value.flatten()[0].item() for name, value in _elementwise(optimizer, weight).items()}
    rows: list[dict[str, Tensor]] = []
    for indices in ([0, 1], [0]):
        ones = torch.ones(len(indices), 1, dtype=dtype)
        with _checks_as_set():
            where = torch.tensor([indices])
            weight.grad = torch.sparse_coo_tensor(where, ones, (2, 1), check_invariants=False)
            try:
                optimizer.step()
            except RuntimeError as error:
                kind = type(optimizer).__name__
                raise OptionError(
                    f"{kind} as it was made fails on sparse gradients ({in_one_line(error)}). Give SGD "
                    "without momentum and weight_decay, Adagrad without weight_decay, or SparseAdam."
                ) from error
        rows.append({"weight": weight.detach()[1].clone()})
        for name, value in _elementwise(optimizer, weight).items():
            rows[-1][name] = value[1].clone()
    if any(not torch.equal(value, rows[1][name]) for name, value in rows[0].items()):
        raise OptionError(
            f"{type(optimizer).__name__} changes rows that were not looked up, so that all of a table would "
            "be read in every step. Give SGD without momentum, Adagrad without lr_decay, or SparseAdam."
        )
    return {name: begun.get(name, 0.0) for name in rows[0] if name != "weight"}


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float | tuple) and not isinstance(value, bool)


def _checks_as_set() -> AbstractContextManager[None]:
    """Leave torch's checks of sparse tensors as they are, but say so: else it warns of them."""
    checks: Any = torch.sparse.check_sparse_tensor_invariants
    found: AbstractContextManager[None] = checks(enable=checks.is_enabled())
    return found


def _elementwise(optimizer: torch.optim.Optimizer, weight: nn.Parameter) -> dict[str, Tensor]:
    state = {name: value for name, value in optimizer.state[weight].items() if isinstance(value, Tensor)}
    for name, value in state.items():
        if value.is_sparse:
            raise OptionError(
                f"{type(optimizer).__name__} keeps {name} as a sparse tensor, which changes as a whole. Give "
                "SGD without momentum, Adagrad, or SparseAdam."
            )
    return {name: value for name, value in state.items() if value.shape == weight.shape}

"""Embedding tables whose rows lie in memory or in a file, by how often they are looked up."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from squeezebox.layers._table_rows import KNOWN_BYTES, TableRows
from squeezebox.memory import RowFile, usual_folder
from squeezebox.reports import parse_size
from squeezebox.schema import BudgetError, OptionError

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
    no parameters of the module, so that other optimizers leave them alone. ``state_dict()`` has them as that
    of an nn.ModuleList of the nn.EmbeddingBags, as tensors whose bytes lie in a file without a name.

    Args:
        tables: (rows, dim) of each table. Weights are drawn as nn.EmbeddingBag draws them.
        memory: bytes for rows in memory, with 12 bytes for each row of the tables, such as "2GiB". A step
            takes what its own distinct rows need, several times over, in addition.
        optimizer: makes the optimizer of a list of parameters: one that takes sparse gradients, such as
            ``lambda tables: torch.optim.SparseAdam(tables, lr=0.01)``. SGD, Adagrad and SparseAdam do.
        mode: "sum" or "mean".
        folder: where the file is; by default a temporary folder on a disk.
        dtype: of the weights; torch's default type if not given.

    Attributes:
        optimizer: the optimizer that was made: change its learning rate as usual, but call :meth:`step` here.

    Raises:
        OptionError: a table has no rows or columns, the mode is another one, or the optimizer changes rows
            that were not looked up.
        BudgetError: memory is too little to know where each row is.
        OutputError: the folder cannot be written to, or its disk has not enough room.
    """

    def __init__(
        self,
        tables: Sequence[tuple[int, int]],
        memory: int | str,
        *,
        optimizer: Factory,
        mode: str = "sum",
        folder: str | Path | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if not tables or min(min(table) for table in tables) < 1:
            raise OptionError(f"tables are {list(tables)}; give (rows, dim) of each, both at least 1.")
        if mode not in ("sum", "mean"):
            raise OptionError(f'mode is {mode!r}; give "sum" or "mean".')
        dtype = dtype or torch.get_default_dtype()
        initial = _row_state(optimizer, dtype)
        self._tables, self._mode, self._states = [tuple(table) for table in tables], mode, initial
        self._weights = [nn.Parameter(torch.empty(1, dim, dtype=dtype)) for _, dim in tables]
        self.optimizer = optimizer(self._weights)
        self._begins_with_state = bool(self.optimizer.state)
        self._waiting: list[list[_Looked]] = [[] for _ in tables]
        self._rows: list[TableRows] = []
        self._folder = Path(usual_folder().path if folder is None else folder)
        for (rows, dim), nbytes in zip(tables, _shares(tables, parse_size("memory", memory)), strict=True):
            values = [None, *initial.values()]
            self._rows.append(
                TableRows(rows, dim, values, dtype=dtype, memory_bytes=nbytes, folder=self._folder)
            )

    def forward(self, indices: Sequence[Tensor], offsets: Sequence[Tensor] | None = None) -> list[Tensor]:
        """One tensor of bags x dim for each table.

        Args:
            indices: for each table the rows to look up: bags x rows, or all bags' one behind another.
            offsets: for each table where each bag begins, in the latter case.

        Raises:
            OptionError: an index is out of range, or there are not as many tensors as tables.
        """
        if len(indices) != len(self._tables) or (offsets is not None and len(offsets) != len(indices)):
            raise OptionError(f"{len(indices)} tensors of indices came for {len(self._tables)} tables.")
        for table, each in enumerate(indices):
            self._require_rows(table, each)
        return [
            self._bags(table, each, None if offsets is None else offsets[table])
            for table, each in enumerate(indices)
        ]

    def step(self) -> None:
        """Change the rows that were looked up since the last step, by their gradients."""
        changed = []
        for table, parameter in enumerate(self._weights):
            parameter.grad = None
            waiting = [each for each in self._waiting[table] if each.weight.grad is not None]
            if waiting:
                changed.append((table, self._load(table, waiting)))
        with _checks_as_set():
            self.optimizer.step()
        for table, ids in changed:
            parameter = self._weights[table]
            state = self.optimizer.state[parameter]
            values = [parameter.detach(), *(state[name] for name in self._states)]
            self._rows[table].write(ids, (torch.cat(values, 1) if self._states else values[0]).numpy())
        self.zero_grad()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget what was looked up since the last step."""
        self._waiting = [[] for _ in self._tables]

    def weight(self, table: int, start: int = 0, stop: int | None = None) -> Tensor:
        """A copy of a table's rows from start to stop."""
        rows, dim = self._tables[table]
        ids = np.arange(start, rows if stop is None else stop)
        return torch.from_numpy(self._rows[table].read(ids)[:, :dim].copy())

    def optimizer_state_dict(self) -> dict[str, Any]:
        """What the optimizer's ``state_dict()`` would be for plain tables, parameter 0 being the first."""
        found = self.optimizer.state_dict()
        for table, parameter in enumerate(self._weights):
            if parameter in self.optimizer.state:
                found["state"][table] = found["state"][table] | {
                    name: self._column(table, 1 + place) for place, name in enumerate(self._states)
                }
        return found

    def load_optimizer_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over the state of an optimizer of this layer, or of plain tables.

        Raises:
            OptionError: it is another kind of optimizer's, or of other tables; nothing has changed then.
        """
        self._require_state(state_dict)
        for table, size in enumerate(self._tables):
            state = state_dict["state"].get(table)
            for place, (name, value) in enumerate(self._states.items()):
                values = np.broadcast_to(value, size) if state is None else state[name].numpy()
                self._rows[table].fill(1 + place, values)
        one = {
            table: {name: value[:1] if name in self._states else value for name, value in state.items()}
            for table, state in state_dict["state"].items()
        }
        self.optimizer.load_state_dict(state_dict | {"state": one})

    def _column(self, table: int, place: int) -> Tensor:
        """One part of all of a table's records, in a mapped file without a name."""
        rows, dim = self._tables[table]
        kind = self._weights[table].detach().numpy().dtype
        copy = RowFile(self._folder, rows, dim, kind, "a copy of a table")
        for ids in self._rows[table].chunks():
            copy.write(ids, self._rows[table].read(ids)[:, place * dim : (place + 1) * dim])
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
        for table, weight in given.items():
            if tuple(weight.shape) != self._tables[table]:
                error_msgs.append(
                    f"table {table} is {self._tables[table]}, and {tuple(weight.shape)} came for it."
                )
        if not error_msgs and not (strict and (missing_keys or unexpected_keys)):
            self.zero_grad()
            for table, weight in given.items():
                self._rows[table].fill(0, weight.detach().numpy())

    @property
    def rows_in_memory(self) -> list[int]:
        """How many rows of each table are in memory now."""
        return [rows.held for rows in self._rows]

    def hot_rows(self, table: int) -> Tensor:
        """Which rows of a table are in memory now, in order."""
        return torch.from_numpy(self._rows[table].hot())

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

    def _require_rows(self, table: int, indices: Tensor) -> None:
        rows = self._tables[table][0]
        if indices.numel() and (int(indices.min()) < 0 or int(indices.max()) >= rows):
            raise OptionError(
                f"indices of table {table} go from {int(indices.min()):,} to {int(indices.max()):,}, but "
                f"it has rows 0 to {rows - 1:,}. Nothing was changed; correct them, or make the table larger."
            )

    def _bags(self, table: int, indices: Tensor, offsets: Tensor | None) -> Tensor:
        ids, inverse = self._rows[table].distinct(indices.numpy())
        ids = ids if ids.size else np.zeros(1, np.int64)  # torch has no bags of a table without rows
        records = torch.from_numpy(self._rows[table].read(ids))
        found = records[:, : self._tables[table][1]].contiguous()
        weight = nn.Parameter(found, requires_grad=torch.is_grad_enabled())
        if weight.requires_grad:
            self._rows[table].count(ids)
            self._waiting[table].append(_Looked(ids, weight, records, self._rows[table].writes))
        local = torch.from_numpy(inverse.reshape(tuple(indices.shape)))
        return F.embedding_bag(
            local, weight, None if offsets is None else offsets.long(), mode=self._mode, sparse=True
        )

    def _load(self, table: int, waiting: list[_Looked]) -> np.ndarray:
        """Give the optimizer the rows that are waiting, with their gradients and state; returns which."""
        rows, first = self._rows[table], waiting[0]
        if len(waiting) == 1 and first.writes == rows.writes:
            ids, records, places = first.ids, first.records, np.arange(len(first.ids))
        else:
            ids, places = rows.distinct(np.concatenate([each.ids for each in waiting]))
            records = torch.from_numpy(rows.read(ids))
        parameter, begin = self._weights[table], 0
        parts = records.split(self._tables[table][1], 1)
        parameter.data = parts[0].contiguous()
        where, values = [], []
        for each in waiting:
            gradient: Any = each.weight.grad
            here = torch.from_numpy(places[begin : begin + len(each.ids)])
            where.append(here[gradient._indices()[0]])
            values.append(gradient._values())
            begin += len(each.ids)
        parameter.grad = torch.sparse_coo_tensor(
            torch.cat(where)[None], torch.cat(values), tuple(parameter.shape), check_invariants=False
        )
        state = self.optimizer.state[parameter]
        if state:
            state.update(
                {name: part.contiguous() for name, part in zip(self._states, parts[1:], strict=True)}
            )
        return ids


def _shares(tables: Sequence[tuple[int, int]], memory_bytes: int) -> list[int]:
    """Memory for each table's rows, by its size."""
    known = KNOWN_BYTES * sum(rows for rows, _ in tables)
    if memory_bytes <= known:
        raise BudgetError(
            f"memory= is {memory_bytes:,} bytes, and to know where each row is takes {known:,}. Give more."
        )
    sizes = [rows * dim for rows, dim in tables]
    return [int((memory_bytes - known) * size / sum(sizes)) for size in sizes]


def _row_state(factory: Factory, dtype: torch.dtype) -> dict[str, float]:
    """What the optimizer keeps of each element, with the value it begins with.

    Raises:
        OptionError: a step changes rows without gradient, or keeps what is not of single elements.
    """
    weight = nn.Parameter(torch.ones(2, 1, dtype=dtype))
    optimizer = factory([weight])
    begun = {name: value.flatten()[0].item() for name, value in _elementwise(optimizer, weight).items()}
    rows: list[dict[str, Tensor]] = []
    for indices in ([0, 1], [0]):
        ones = torch.ones(len(indices), 1, dtype=dtype)
        weight.grad = torch.sparse_coo_tensor(torch.tensor([indices]), ones, (2, 1), check_invariants=False)
        with _checks_as_set():
            optimizer.step()
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
    """Leave torch's checks of sparse tensors as they are, but say so: else it warns of its own optimizers."""
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

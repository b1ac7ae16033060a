"""Experts whose weights lie on several ranks: tokens or weights move, and no imbalance runs out of memory."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from squeezebox.layers._dispatch import MODES, Dispatch, Sizes, dispatch
from squeezebox.layers._experts import check_routing, check_tokens
from squeezebox.schema import OptionError, UnsupportedModelError

_eagerly: Any = torch._disable_dynamo  # type: ignore[attr-defined]  # torch.compiler's loads the compiler


class Experts(nn.Module):
    """SwiGLU experts, sharded over a process group.

    Rank r has experts r E/W to (r + 1) E/W - 1 of W ranks. All ranks call forward and backward together, with
    tokens of their own, as many as each has. Gradients of ``first`` and ``second`` are of the sum of all
    ranks' losses. Backward keeps the input and the routing alone, and moves tokens or weights once more.
    With the same random state on all ranks, the experts are those that one process would draw.

    Args:
        experts: E; W divides it.
        dim: D, of a token.
        hidden: H, of an expert.
        group: the ranks; all of them if not given.
        mode: "tokens" moves tokens to experts, "weights" experts to tokens, "auto" for every rank and expert
            what is fewer bytes.
        budget_bytes: what forward and backward may allocate on each rank, the output and all gradients
            included; tokens go in as many chunks as that takes.

    Attributes:
        first: (E/W, 2 H, D). second: (E/W, D, H).
        last: the :class:`Dispatch` of the last forward.
    """

    def __init__(
        self,
        experts: int,
        dim: int,
        hidden: int,
        *,
        group: dist.ProcessGroup | None = None,
        mode: str = "auto",
        budget_bytes: int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        ranks = dist.get_world_size(group)
        if experts < 1 or experts % ranks:
            raise OptionError(f"{ranks} ranks do not divide {experts} experts; pick a multiple of {ranks}.")
        if mode not in MODES:
            raise OptionError(f"mode={mode!r} is none of {', '.join(MODES)}.")
        self.experts, self.group, self.mode, self.budget_bytes = experts, group, mode, budget_bytes
        self.last: Dispatch | None = None
        self.first = nn.Parameter(torch.empty(experts // ranks, 2 * hidden, dim, dtype=dtype))
        self.second = nn.Parameter(torch.empty(experts // ranks, dim, hidden, dtype=dtype))
        own = len(self.first)
        for weight in (self.first, self.second):
            mine = dict(enumerate(weight.detach(), dist.get_rank(group) * own))
            for expert in range(experts):  # all of them, so that no two ranks draw the same one
                drawn = mine.get(expert, torch.empty_like(weight[0]))
                nn.init.uniform_(drawn, -1 / math.sqrt(weight.shape[2]), 1 / math.sqrt(weight.shape[2]))

    @_eagerly
    def forward(self, x: Tensor, ids: Tensor, gates: Tensor) -> Tensor:
        """The gated sum of each token's experts, of shape (T, D).

        Args:
            x: (T, D), of the weights' dtype; T may be 0.
            ids: (T, k), integers below E.
            gates: (T, k); NaN gives that token NaN, and no other.

        Raises:
            OptionError: on all ranks, if one of them has an id out of range, or shapes or a dtype that do not
                match.
            UnsupportedModelError: under autocast.
            BudgetError: on all ranks, if one of them cannot stay within the budget.
        """
        counts = _exchange_counts(x, gates, ids, self.experts, self.first, self.group)
        sizes = Sizes(
            dim=self.first.shape[2],
            hidden=self.second.shape[2],
            choices=ids.shape[1],
            itemsize=self.first.element_size(),
        )
        self.last = dispatch(counts, sizes, self.mode, self.budget_bytes)
        place = _Place(self.last, dist.get_rank(self.group), self.group)
        found: Tensor = _Sharded.apply(  # type: ignore[no-untyped-call]
            x, gates.to(x.dtype).contiguous(), ids, self.first, self.second, place
        )
        return found

    def extra_repr(self) -> str:
        """Sizes."""
        return f"experts={self.experts}, of them here={len(self.first)}, mode={self.mode}"


def _exchange_counts(x: Tensor, gates: Tensor, ids: Tensor, experts: int, weight: Tensor, group: Any) -> Any:
    """Every rank's pairs for every expert; a rank with bad input tells all, so that none waits for it."""
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    table = torch.zeros(ranks, experts + 1, dtype=torch.int64, device=x.device)
    problem: OptionError | UnsupportedModelError | None = None
    try:
        check_routing(x, gates, ids, experts)
        check_tokens(x, weight)
        table[rank, :experts] = torch.bincount(ids.flatten(), minlength=experts)
    except (OptionError, UnsupportedModelError) as error:
        problem, table[rank, experts] = error, 1
    dist.all_reduce(table, group=group)
    if problem is not None:
        raise problem
    *rows, bad = table.t().tolist()
    if any(bad):
        raise OptionError(
            f"Rank {bad.index(1)} has tokens or routing that the layer does not take; its own error says why."
        )
    return tuple(zip(*rows, strict=True))


@dataclass(frozen=True, slots=True)
class _Place:
    """A rank's part in a dispatch."""

    plan: Dispatch
    rank: int
    group: Any

    @property
    def ranks(self) -> range:
        return range(len(self.plan.counts))

    def own(self, rank: int) -> range:
        here = len(self.plan.counts[0]) // len(self.ranks)
        return range(rank * here, (rank + 1) * here)

    def splits(self, chunk: int) -> tuple[list[int], list[int]]:
        """Rows given to and got from each rank."""
        plan = self.plan
        given = [sum(plan.sent(self.rank, each, chunk) for each in self.own(other)) for other in self.ranks]
        got = [sum(plan.sent(other, each, chunk) for each in self.own(self.rank)) for other in self.ranks]
        return given, got

    def rows(self, order: Tensor, chunk: int) -> Tensor:
        """Which of this rank's pairs move in a chunk, by the rank that they move to."""
        found, start = [order[:0]], 0
        for expert, count in enumerate(self.plan.counts[self.rank]):
            if not self.plan.borrowed[self.rank][expert]:
                first, last = self.plan.part(self.rank, expert, chunk)
                found.append(order[start + first : start + last])
            start += count
        return torch.cat(found)

    def borrowed_rows(self, order: Tensor, expert: int) -> list[Tensor]:
        """This rank's pairs of an expert that it borrows, chunk by chunk."""
        start = sum(self.plan.counts[self.rank][:expert])
        parts = (self.plan.part(self.rank, expert, chunk) for chunk in range(self.plan.chunks))
        return [order[start + first : start + last] for first, last in parts if last > first]

    def pieces(self, got: Tensor, chunk: int) -> list[list[Tensor]]:
        """Of the rows that came, those of each own expert: views, one a rank."""
        found: list[list[Tensor]] = [[] for _ in self.own(self.rank)]
        start = 0
        for other in self.ranks:
            for index, expert in enumerate(self.own(self.rank)):
                count = self.plan.sent(other, expert, chunk)
                found[index].append(got[start : start + count])
                start += count
        return found

    def swap(self, given: Tensor, into: list[int], out: list[int]) -> Tensor:
        """Rows to each rank for rows from each rank; those given are gone."""
        got = given.new_empty(sum(out), given.shape[1])
        dist.all_to_all_single(got, given, out, into, group=self.group)
        free([given])
        return got

    def borrowers(self, expert: int) -> list[int]:
        return [other for other in self.ranks if self.plan.borrowed[other][expert]]

    def hand(self, tensors: list[Tensor], source: int, target: int) -> None:
        """Tensors from one rank to another; the others have nothing to do."""
        world: Any = dist.group.WORLD
        end = dist.get_global_rank(self.group or world, source if self.rank == target else target)
        for tensor in tensors:
            (dist.send if self.rank == source else dist.recv)(tensor, end, group=self.group)


class _Sharded(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, gates: Tensor, ids: Tensor, first: Tensor, second: Tensor, place: _Place
    ) -> Tensor:
        """Keep this rank's input and routing."""
        order, choices = ids.flatten().argsort(stable=True), ids.shape[1]
        ctx.place = place
        ctx.save_for_backward(x, gates, order, first, second)
        out = torch.zeros_like(x)
        for chunk in range(place.plan.chunks):
            rows = place.rows(order, chunk)
            given, got = place.splits(chunk)
            sent = torch.cat([x[rows // choices], gates.view(-1)[rows, None]], 1)
            came = place.swap(sent, given, got)
            answer = came.new_empty(len(came), x.shape[1])
            pairs = zip(place.pieces(came, chunk), place.pieces(answer, chunk), strict=True)
            for expert, (parts, answers) in enumerate(pairs):
                packed = torch.cat(parts)
                _scatter(_expert(packed, first[expert], second[expert]), answers)
            free([came])
            back = place.swap(answer, got, given)
            out.index_add_(0, rows // choices, back)
            free([back])

        def work(expert: int, weights: list[Tensor]) -> None:
            for rows in place.borrowed_rows(order, expert):
                packed = torch.cat([x[rows // choices], gates.view(-1)[rows, None]], 1)
                out.index_add_(0, rows // choices, _expert(packed, *weights))

        _lend(place, [first, second], work)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Move tokens with the gradient of their output, or weights once more."""
        x, gates, order, first, second = ctx.saved_tensors
        place, choices = ctx.place, gates.shape[1]
        of_x, of_gates = torch.zeros_like(x), torch.zeros_like(gates)
        of_first, of_second = torch.zeros_like(first), torch.zeros_like(second)

        def pack(rows: Tensor) -> Tensor:
            return torch.cat([x[rows // choices], grad[rows // choices], gates.view(-1)[rows, None]], 1)

        def take(rows: Tensor, answer: Tensor) -> None:
            of_x.index_add_(0, rows // choices, answer[:, :-1])
            of_gates.view(-1)[rows] = answer[:, -1]

        for chunk in range(place.plan.chunks):
            rows = place.rows(order, chunk)
            given, got = place.splits(chunk)
            came = place.swap(pack(rows), given, got)
            answer = came.new_empty(len(came), x.shape[1] + 1)
            pairs = zip(place.pieces(came, chunk), place.pieces(answer, chunk), strict=True)
            for expert, (parts, answers) in enumerate(pairs):
                of_weights = of_first[expert], of_second[expert]
                _scatter(_back(torch.cat(parts), first[expert], second[expert], *of_weights), answers)
            free([came])
            back = place.swap(answer, got, given)
            take(rows, back)
            free([back])

        def work(expert: int, weights: list[Tensor]) -> list[Tensor]:
            of_weights = [torch.zeros_like(each) for each in weights]
            for rows in place.borrowed_rows(order, expert):
                take(rows, _back(pack(rows), *weights, *of_weights))
            return of_weights

        _lend(place, [first, second], work, [of_first, of_second])
        return of_x, of_gates, None, of_first, of_second, None


def _lend(
    place: _Place, weights: list[Tensor], work: Callable[..., Any], of_weights: list[Tensor] | None = None
) -> None:
    """Expert by expert, the owner sends weights and gets gradients: no two ranks wait for each other."""
    for expert in range(len(place.plan.counts[0])):
        owner, index = divmod(expert, len(weights[0]))
        borrowers = place.borrowers(expert)
        if place.rank == owner:
            for other in borrowers:
                place.hand([each[index] for each in weights], owner, other)
            for other in borrowers if of_weights else ():
                for each in of_weights or ():
                    got = torch.empty_like(each[index])
                    place.hand([got], other, owner)
                    each[index] += got
                    free([got])
        elif place.rank in borrowers:
            lent = [torch.empty_like(each[0]) for each in weights]
            place.hand(lent, owner, place.rank)
            found = work(expert, lent)
            if of_weights:
                place.hand(found, place.rank, owner)
            free([*lent, *(found or ())])


def free(tensors: list[Tensor]) -> None:
    """Now, and not when gloo's thread gets round to dropping what it sent or received."""
    for each in tensors:
        each.untyped_storage().resize_(0)


def _scatter(rows: Tensor, places: list[Tensor]) -> None:
    for part, place in zip(rows.split([len(each) for each in places]), places, strict=True):
        place.copy_(part)


def _expert(packed: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """Gated output for rows of (token, gate)."""
    gate, up = F.linear(packed[:, :-1], first).chunk(2, dim=-1)
    return F.linear(F.silu(gate) * up, second).mul_(packed[:, -1:])


def _back(packed: Tensor, first: Tensor, second: Tensor, of_first: Tensor, of_second: Tensor) -> Tensor:
    """(gradient of the token, of its gate) for rows of (token, gradient, gate); weights' are added."""
    dim = first.shape[1]
    here, above, scale = packed[:, :dim], packed[:, dim:-1], packed[:, -1:]
    product = F.linear(here, first)
    gate, up = product.chunk(2, dim=-1)
    active = F.silu(gate)
    hidden = active * up
    of_hidden = above @ second
    answer = packed.new_empty(len(packed), dim + 1)
    torch.sum(of_hidden * hidden, -1, out=answer[:, -1])
    of_second.addmm_((above * scale).t(), hidden)
    del hidden
    of_hidden.mul_(scale)
    of_product = torch.empty_like(product)
    of_product[:, : gate.shape[1]] = torch.ops.aten.silu_backward(of_hidden * up, gate)
    torch.mul(of_hidden, active, out=of_product[:, gate.shape[1] :])
    of_first.addmm_(of_product.t(), here)
    answer[:, :-1] = of_product @ first
    return answer

"""Activations split over the sequence: parts and wholes, and products of which one side is whole.

Korthikanti et al., Reducing Activation Recomputation in Large Transformer Models
(arXiv:2205.05198), section 4.2.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from squeezebox.layers._sharded import free


@dataclass(frozen=True, slots=True)
class Place:
    """This rank among those that share a sequence."""

    rank: int
    ranks: int
    group: Any

    @classmethod
    def of(cls, group: dist.ProcessGroup | None) -> Place:
        """In a group; None is all ranks."""
        return cls(dist.get_rank(group), dist.get_world_size(group), group)

    def part(self, whole: Tensor) -> Tensor:
        """This rank's positions (B, S/W, ...) of all (B, S, ...)."""
        length = whole.shape[1] // self.ranks
        return whole.narrow(1, self.rank * length, length).contiguous()

    def gather(self, part: Tensor) -> Tensor:
        """All positions, from every rank's."""
        parts = part.new_empty(self.ranks, *part.shape)
        dist.all_gather(list(parts), part.contiguous(), group=self.group)
        whole = parts.transpose(0, 1).flatten(1, 2)
        if whole.untyped_storage().data_ptr() != parts.untyped_storage().data_ptr():  # no view
            free([parts])
        return whole

    def add(self, whole: Tensor) -> Tensor:
        """This rank's positions of the sum over ranks, added in the order of ranks."""
        batch, length, *rest = whole.shape
        given = whole.new_empty(self.ranks, batch, length // self.ranks, *rest)
        given.copy_(whole.view(batch, self.ranks, length // self.ranks, *rest).transpose(0, 1))
        got = torch.empty_like(given)
        dist.all_to_all_single(got.view(-1), given.view(-1), group=self.group)
        total = got.sum(0)
        free([given, got])
        return total


class Part(torch.autograd.Function):
    """This rank's part of what all ranks have alike."""

    @staticmethod
    def forward(ctx: Any, whole: Tensor, place: Place) -> Tensor:
        """Cut."""
        ctx.place = place
        return place.part(whole)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        """All ranks have the whole gradient."""
        return ctx.place.gather(grad), None


class Whole(torch.autograd.Function):
    """All parts, for a use that is alike on all ranks."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, place: Place) -> Tensor:
        """Gather."""
        ctx.place = place
        return place.gather(part)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        """The gradient is alike on all ranks too."""
        return ctx.place.part(grad), None


class Gather(torch.autograd.Function):
    """All parts, for a use that is each rank's own (the paper's g)."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, place: Place) -> Tensor:
        """Gather."""
        ctx.place = place
        return place.gather(part)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        """Every rank has an addend of the gradient."""
        return ctx.place.add(grad.contiguous()), None


class Add(torch.autograd.Function):
    """This rank's part of the sum over ranks (the paper's g-bar)."""

    @staticmethod
    def forward(ctx: Any, addend: Tensor, place: Place) -> Tensor:
        """Exchange and add."""
        ctx.place = place
        return place.add(addend.contiguous())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        """Every addend has the whole gradient."""
        return ctx.place.gather(grad), None


class Again:
    """All positions, gathered in backward for the first product that asks, and let go after the last."""

    def __init__(self, place: Place) -> None:
        self._place, self._users, self._left = place, 0, 0
        self._whole: Tensor | None = None

    def join(self) -> None:
        """One more product will ask."""
        self._users = self._left = self._users + 1

    def whole(self, part: Tensor) -> Tensor:
        """Gathered from the part, unless that was done."""
        whole = self._place.gather(part) if self._whole is None else self._whole
        self._left -= 1
        self._whole = whole if self._left else None
        self._left = self._left or self._users
        return whole


class _Product(torch.autograd.Function):
    """x W^T + b of all positions, of which this rank's own are kept (section 4.2.2)."""

    @staticmethod
    def forward(
        ctx: Any, whole: Tensor, weight: Tensor, bias: Tensor | None, part: Tensor, again: Again
    ) -> Tensor:
        """Keep the part."""
        ctx.again = again
        if ctx.needs_input_grad[1]:  # else backward needs no whole
            again.join()
        ctx.save_for_backward(part, weight)
        return F.linear(whole, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Gather the whole once more."""
        part, weight = ctx.saved_tensors
        of_whole, of_weight, of_bias = ctx.needs_input_grad[:3]
        rows = grad.flatten(0, -2)
        whole = ctx.again.whole(part) if of_weight else None
        return (
            grad @ weight if of_whole else None,
            None if whole is None else rows.t() @ whole.flatten(0, -2),
            rows.sum(0) if of_bias else None,
            None,
            None,
        )


class Shared:
    """What the columns of a block share: the whole input, and the part that they keep of it."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self.clear()

    def clear(self) -> None:
        """Hold nothing."""
        self._part: Tensor | None = None
        self._whole: Tensor | None = None
        self._seen: weakref.ref[Tensor] | None = None
        self._again = Again(self._place)

    def gather(self, part: Tensor, *, hold: bool) -> Tensor:
        """All positions; held for other columns with the same input if nobody else does."""
        if self._part is part and self._whole is not None:
            return self._whole
        self.clear()
        whole: Tensor = Gather.apply(part, self._place)  # type: ignore[no-untyped-call]
        self._part, self._seen = part, weakref.ref(whole)
        self._whole = whole if hold else None
        return whole

    def product(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """A linear layer, which keeps this rank's part of x if that is what was gathered."""
        if self._part is None or self._seen is None or self._seen() is not x:
            return F.linear(x, weight, bias)
        kind, part = x.device.type, self._part.detach()
        if torch.is_autocast_enabled(kind):
            dtype = torch.get_autocast_dtype(kind)
            x, weight, part = x.to(dtype), weight.to(dtype), part.to(dtype)
            bias = bias if bias is None else bias.to(dtype)
        found: Tensor = _Product.apply(x, weight, bias, part, self._again)  # type: ignore[no-untyped-call]
        return found


class Columns(nn.Module):
    """A linear layer of which this rank has a share of the outputs.

    Attributes:
        weight: a DTensor, (outputs, inputs), split over outputs. bias: a DTensor, (outputs,), or None.
    """

    addend_of_ranks = True  # its input's gradient here is one; their sum is the gradient

    def __init__(
        self, weight: nn.Parameter, bias: nn.Parameter | None, shared: Shared, *, gathers: bool
    ) -> None:
        super().__init__()
        self.weight, self.bias, self._shared, self._gathers = weight, bias, shared, gathers

    def forward(self, x: Tensor) -> Tensor:
        """This rank's outputs at all positions."""
        x = self._shared.gather(x, hold=True) if self._gathers else x
        return self._shared.product(x, _local(self.weight), None if self.bias is None else _local(self.bias))


class Rows(nn.Module):
    """A linear layer of which this rank has a share of the inputs.

    Attributes:
        weight: a DTensor, (outputs, inputs), split over inputs. bias: (outputs,), or None.
    """

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None, place: Place) -> None:
        super().__init__()
        self.weight, self.bias, self._place = weight, bias, place

    def forward(self, x: Tensor) -> Tensor:
        """All outputs at this rank's positions."""
        out: Tensor = Add.apply(F.linear(x, _local(self.weight)), self._place)  # type: ignore[no-untyped-call]
        return out if self.bias is None else out + self.bias.to(out.dtype)


def _local(weight: Any) -> Tensor:
    local: Tensor = weight.to_local()
    return local

"""A mixture of experts of which backward needs the input and the first product, or the input alone.

An expert maps a token x to W2 h, h = act(W1 x), and the router's gate g scales that. Plain autograd keeps
W2 h, because g's gradient is <G, W2 h>, and what act reads and makes. But <G, W2 h> = <W2^T G, h>, and h's
gradient takes W2^T G anyway. Rows lie sorted by expert, none dropped, as in MegaBlocks (MLSys'23,
arXiv:2211.15841).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from squeezebox.schema import UnsupportedModelError

Activation = Callable[[Tensor], Tensor]
Form = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Activation], tuple[Tensor, list[Tensor]]]


def rows_by_expert(ids: Tensor, experts: int) -> list[Tensor]:
    """For each expert, which of the flattened (token, choice) pairs are its own."""
    order = ids.flatten().argsort(stable=True)
    counts = torch.bincount(ids.flatten(), minlength=experts)[:experts]
    return list(order[: int(counts.sum())].split(counts.tolist()))


def loop(
    x: Tensor, gates: Tensor, ids: Tensor, first: Tensor, second: Tensor, act: Activation
) -> tuple[Tensor, list[Tensor]]:
    """One expert after the other, as transformers' eager form; and each one's first product.

    Args:
        x: (T, D).
        gates: (T, k).
        ids: (T, k), below E.
        first: (E, F, D).
        second: (E, D, H).
        act: maps (n, F) to (n, H).
    """
    out, kept = torch.zeros_like(x), []
    for expert, rows in enumerate(_by_choice(ids, first.shape[0])):
        token, choice = rows // ids.shape[1], rows % ids.shape[1]
        product = F.linear(x[token], first[expert])
        kept.append(product)
        if len(rows):
            scaled = F.linear(act(product), second[expert]) * gates[token, choice, None]
            out.index_add_(0, token, scaled.to(out.dtype))
    return out, kept


def _by_choice(ids: Tensor, experts: int) -> list[Tensor]:
    """:func:`rows_by_expert` with the first choices of all tokens before the second ones."""
    tokens, choices = ids.shape
    rows = torch.arange(tokens * choices, device=ids.device).view(tokens, choices).t().flatten()
    return [rows[each] for each in rows_by_expert(ids.t(), experts)]


def grouped(
    x: Tensor, gates: Tensor, ids: Tensor, first: Tensor, second: Tensor, act: Activation
) -> tuple[Tensor, list[Tensor]]:
    """All experts in one grouped product, as transformers' ``grouped_mm``; arguments as of :func:`loop`."""
    tokens, choices = ids.shape
    _, order = torch.sort(ids.flatten())
    counts = torch.bincount(ids.flatten(), minlength=first.shape[0])
    ends = counts.cumsum(0).to(torch.int32)
    product = F.grouped_mm(x[order // choices], first.transpose(1, 2), offs=ends)
    out = F.grouped_mm(act(product), second.transpose(1, 2), offs=ends)
    kept = _sorted(product, order, ids, first.shape[0])
    out = (out * gates.flatten()[order, None])[order.argsort()]
    return out.view(tokens, choices, x.shape[1]).sum(1).to(x.dtype), kept


def _sorted(product: Tensor, order: Tensor, ids: Tensor, experts: int) -> list[Tensor]:
    """Rows that are in ``order``, as in :func:`rows_by_expert`; they mostly are already."""
    rows = rows_by_expert(ids, experts)
    if not torch.equal(torch.cat(rows), order):
        product = product[order.argsort()[torch.cat(rows)]]
    return list(product.split([len(each) for each in rows]))


def batched(
    x: Tensor, gates: Tensor, ids: Tensor, first: Tensor, second: Tensor, act: Activation
) -> tuple[Tensor, list[Tensor]]:
    """A weight for each pair, as transformers' ``batched_mm``; arguments as of :func:`loop`."""
    flat = ids.flatten()
    spread = x.repeat_interleave(ids.shape[1], dim=0)
    product = torch.bmm(first[flat], spread.unsqueeze(-1)).squeeze(-1)
    out = torch.bmm(second[flat], act(product).unsqueeze(-1)).squeeze(-1) * gates.flatten().unsqueeze(-1)
    kept = [product[each] for each in rows_by_expert(ids, first.shape[0])]
    return out.view(*ids.shape, x.shape[1]).sum(1).to(x.dtype), kept


class Lean(torch.autograd.Function):
    """Experts in one of the forms; backward goes through them one by one."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        gates: Tensor,
        ids: Tensor,
        first: Tensor,
        second: Tensor,
        act: Activation,
        form: Form,
        recompute: bool,
    ) -> Tensor:
        """Keep the input, the router's choice, and the first products unless they are recomputed."""
        before = _random_states(x.device)
        out, kept = form(x, gates, ids, first, second, act)
        drew = any(map(_differ, before, _random_states(x.device)))
        if drew and form is not loop:
            raise UnsupportedModelError(
                "The experts' activation draws random numbers, which backward draws again expert by expert; "
                "pick the eager form, or leave dropout out of the activation."
            )
        ctx.act, ctx.by_choice, ctx.states = act, form is loop, before if drew else []
        ctx.save_for_backward(x, gates, ids, first, second, *([] if recompute else kept))
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """The gradients of x, of the gates and of both weights."""
        x, gates, ids, first, second, *kept = ctx.saved_tensors
        of_x = torch.zeros_like(x)
        of_gates = torch.zeros_like(gates, memory_format=torch.contiguous_format)  # a view is written to
        of_first, of_second = torch.zeros_like(first), torch.zeros_like(second)
        find = _by_choice if ctx.by_choice else rows_by_expert
        with _drawing_from(ctx.states, x.device):
            for expert, rows in enumerate(find(ids, first.shape[0])):
                if not len(rows):
                    continue
                token = rows // ids.shape[1]
                here, above = x[token], grad[token]
                gate = gates.flatten()[rows, None]
                product = kept[expert] if kept else F.linear(here, first[expert])
                with torch.enable_grad():
                    leaf = product.detach().requires_grad_()
                    hidden = ctx.act(leaf)
                of_hidden = above @ second[expert]
                of_gates.view(-1)[rows] = (
                    (of_hidden.to(gates.dtype) * hidden.detach()).sum(-1).to(gates.dtype)
                )
                of_second[expert] = (above * gate).to(x.dtype).t() @ hidden.detach()
                (of_product,) = torch.autograd.grad(hidden, leaf, (of_hidden * gate).to(x.dtype))
                of_first[expert] = of_product.t() @ here
                of_x.index_add_(0, token, of_product @ first[expert])
        return of_x, of_gates, None, of_first, of_second, None, None, None


def _random_states(device: torch.device) -> list[Tensor]:
    """Of the generators that an activation may draw from."""
    own = [torch.get_rng_state()]
    return [*own, torch.cuda.get_rng_state(device)] if device.type == "cuda" else own


def _differ(one: Tensor, other: Tensor) -> bool:
    return one.numpy().tobytes() != other.numpy().tobytes()  # no operator, which modes would see


@contextmanager
def _drawing_from(states: list[Tensor], device: torch.device) -> Iterator[None]:
    """What is drawn is what was drawn from these states; without any, nothing changes."""
    if not states:
        yield
        return
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.set_rng_state(states[0])
        if device.type == "cuda":
            torch.cuda.set_rng_state(states[1], device)
        yield

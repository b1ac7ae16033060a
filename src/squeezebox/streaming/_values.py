"""What of a step has no rows: parameters, what is reduced, the loss, and their gradients."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.node import map_arg
from torch.utils import _pytree as pytree

from squeezebox.streaming._graph import Streamed
from squeezebox.streaming._reductions import gathered
from squeezebox.streaming._rows import is_continuous, is_narrow, run_node
from squeezebox.streaming._stages import Stage
from squeezebox.streaming._strip import as_tuple, inputs_of
from squeezebox.streaming._trace import DETACHED

_aten = torch.ops.aten
_CHOOSING = (_aten.index.Tensor, _aten.masked_select.default, _aten.nonzero.default)
_INVERTING = (
    *(_aten.inverse.default, _aten.linalg_inv.default, _aten.linalg_solve.default),
    *(_aten.linalg_cholesky.default, _aten.cholesky.default),
    *(_aten.linalg_lu_factor.default, _aten.linalg_ldl_factor.default),
)

Seeds = dict[Node, tuple[Tensor | None, ...]]  # the loss's derivatives by what is reduced


class Values:
    """Values without rows, and gradients so far.

    Values that strips read are leaves of autograd. Those that were computed from others get copies, whose
    gradients are handed on to what they were computed from before the pass that this is needed in. Nothing of
    the model is touched before :meth:`finish`.
    """

    def __init__(self, streamed: Streamed, targets: Mapping[Node, Any]) -> None:
        self._streamed = streamed
        self._leaves = {
            node: tensor.detach().requires_grad_(node in streamed.program.trained)
            for node, tensor in streamed.program.held.items()
        }
        self._copies: dict[Node, Tensor] = {}
        self.known: dict[Node, Any] = {**self._leaves, **targets}
        self._reduced: dict[Node, tuple[Tensor, ...]] = {}
        self._read_by: tuple[Stage, dict[Node, Any]] | None = None
        self._single, self._forgotten = {*streamed.single}, set[Node]()
        self._is_made_up = False
        self.compute()

    @property
    def loss(self) -> Tensor:
        """The loss, once all passes ahead are done."""
        loss = self._streamed.program.loss
        assert loss is not None
        value: Tensor = self.known[loss]
        return value

    def turn(self) -> None:
        """The loss, if there is one, is known: on with its gradient to what was reduced and to parameters."""
        if self._streamed.program.loss is not None and self.loss.requires_grad:
            self.loss.backward(retain_graph=True)

    def finish(self) -> None:
        """Add the gradients to the parameters' and set the buffers."""
        self.hand_on(above=-1)
        for node, parameter in self._streamed.program.trained.items():
            gradient = self._leaves[node].grad
            if gradient is not None:
                parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)
        with torch.no_grad():
            for node, buffer in self._streamed.program.mutations.items():
                buffer.copy_(self.known[node])

    def set(self, node: Node, value: Any) -> None:
        """Take over what was reduced."""
        trained = node in self._streamed.differentiable
        leaves = tuple(
            each.detach().requires_grad_(trained and is_continuous(each)) for each in as_tuple(value)
        )
        self._reduced[node] = leaves
        self.known[node] = leaves[0] if isinstance(value, Tensor) else leaves

    def compute(self) -> None:
        """Compute whatever can be computed by now, and forget what nothing reads any more."""
        for node in self._fill(self.known):
            for source in self._single.intersection(node.all_input_nodes):
                if not self._is_read(source):
                    self._forgotten.add(source)
                    self.known.pop(source, None)

    def for_strips(self, stage: Stage) -> dict[Node, Any]:
        """What the stage's strips read that has no rows."""
        if self._read_by is None or self._read_by[0] is not stage:
            self._read_by = stage, {node: self._for_strip(node) for node in inputs_of(stage.work)}
        return self._read_by[1]

    def hand_on(self, above: int) -> None:
        """Hand the copies' gradients on to what they were computed from, from the highest level down."""
        ready = [node for node in self._copies if self._streamed.level[node] > above]
        for node in sorted(ready, key=lambda node: -self._streamed.level[node]):
            copy = self._copies[node]
            if copy.grad is not None:
                value = self.known[node]
                torch.autograd.backward([value], [copy.grad.to(value.dtype)], retain_graph=True)
                copy.grad = None

    def seeds(self, stage: Stage) -> Seeds:
        """The loss's derivatives by what the stage's pass reduces."""
        if not stage.reduces:
            return {node: tuple(value.grad for value in self._reduced[node]) for node in stage.work.reduced}
        guess = self._at_zero(stage)
        wanted = [node for node in stage.work.reduced if node in self._streamed.differentiable]
        zeros = [guess[node] for node in wanted]
        (loss,) = self._streamed.program.outputs
        found = torch.autograd.grad(guess[loss], zeros, allow_unused=True, retain_graph=True)
        return {node: (seed,) for node, seed in zip(wanted, found, strict=True)}

    def gradients(self) -> Iterator[tuple[str, Tensor]]:
        """Every leaf that can have a gradient, by a name that stays the same."""
        for node, leaf in [*self._leaves.items(), *self._copies.items()]:
            if leaf.requires_grad:
                yield node.name, leaf
        for node, values in self._reduced.items():
            for number, value in enumerate(values):
                if value.requires_grad:
                    yield f"{node.name}.{number}", value

    def pretend(self, stage: Stage, reduced: Iterable[Node]) -> None:
        """Make up all that a strip of the stage reads, gradients among it."""
        self._make_up(reduced)
        for values in self._reduced.values():
            for tensor in values:
                tensor.grad = torch.ones_like(tensor) if tensor.requires_grad else None
        self.for_strips(stage)
        self._make_gradients()

    def rehearse(self, stages: Sequence[Stage]) -> None:
        """Go there and back through what has no rows, with values made up, to measure that.

        Ends with all that strips find in memory: values, what autograd saves of them, and gradients.
        """
        self._make_up(self._streamed.reductions)
        self.turn()
        for stage in stages:
            self.for_strips(stage)
        self._make_gradients()
        self.hand_on(above=-1)
        self._make_gradients()

    def _make_up(self, reduced: Iterable[Node]) -> None:
        """Make up what would be reduced, and what follows from it."""
        self._is_made_up = True
        for node in reduced:
            value = node.meta["val"]
            made = tuple(_made_up(each, node.target is gathered) for each in as_tuple(value))
            self.set(node, made[0] if isinstance(value, Tensor) else made)
            self.compute()

    def _make_gradients(self) -> None:
        """Zeros where strips will add, as after a first strip."""
        for leaf in [*self._leaves.values(), *self._copies.values()]:
            if leaf.requires_grad and leaf.grad is None:
                leaf.grad = torch.zeros_like(leaf)

    def _at_zero(self, stage: Stage) -> dict[Node, Any]:
        """Values as if the pass had reduced all to zero: a linear loss has the same derivatives anywhere."""
        values = dict(self.known)
        for node in stage.work.reduced:
            val = node.meta["val"]
            values[node] = torch.zeros(
                val.shape, dtype=val.dtype, device=val.device, requires_grad=is_continuous(val)
            )
        for _ in self._fill(values):
            pass
        return values

    def _fill(self, values: dict[Node, Any]) -> Iterator[Node]:
        """Compute whatever has no rows and can be computed; gives each node that was."""
        for node in self._streamed.single:
            new = node not in values and node not in self._forgotten
            if new and all(each in values for each in node.all_input_nodes):
                arguments: Any
                arguments, keywords = (
                    map_arg(each, lambda inner: values[inner]) for each in (node.args, node.kwargs)
                )
                if self._is_made_up and node.target in _CHOOSING:
                    arguments = pytree.tree_map_only(Tensor, _all_chosen, arguments)
                if self._is_made_up and node.target in _INVERTING:
                    arguments = (_identity(arguments[0]), *arguments[1:])
                with torch.enable_grad():
                    value = run_node(node, arguments, keywords)
                values[node] = value.detach() if node.target is DETACHED else value
                yield node

    def _is_read(self, node: Node) -> bool:
        """Whether something needs the value later: an output, or what has not been computed yet."""
        program = self._streamed.program
        if node in program.outputs or node in program.mutations:
            return True
        users = [user for user in node.users if user in self._streamed.level]
        return not all(user in self.known or user in self._forgotten for user in users)

    def _for_strip(self, node: Node) -> Any:
        value = self.known[node]
        if not isinstance(value, Tensor) or (
            value.is_leaf and not (value.requires_grad and is_narrow(value))
        ):
            return value
        if node not in self._copies:
            wide = torch.zeros((), dtype=torch.float32, device=value.device).expand(value.shape)
            self._copies[node] = (wide if is_narrow(value) else value.detach().contiguous()).requires_grad_()
        copy = self._copies[node]
        return _Narrow.apply(copy, value.detach()) if is_narrow(value) else copy  # type: ignore[no-untyped-call]


class _Narrow(torch.autograd.Function):
    """A value in few bits, whose gradients by all strips add up in float32, at a leaf of its shape."""

    @staticmethod
    def forward(ctx: Any, leaf: Tensor, value: Tensor) -> Tensor:
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient.float(), None


def _made_up(value: Tensor, is_gathered: bool) -> Tensor:
    """Ones; but zeros of what may be labels or places, which are in range then."""
    is_place = is_gathered and not (is_continuous(value) or value.dtype == torch.bool)
    return torch.full(value.shape, 0 if is_place else 1, dtype=value.dtype, device=value.device)


def _all_chosen(mask: Tensor) -> Tensor:
    """A mask that chooses all there is, which takes the most memory; of other tensors themselves."""
    return torch.ones_like(mask) if mask.dtype == torch.bool else mask


def _identity(matrix: Tensor) -> Tensor:
    """One that has an inverse, computed from what has none."""
    count = matrix.shape[-1]
    return matrix - matrix.detach() + torch.eye(count, dtype=matrix.dtype, device=matrix.device)

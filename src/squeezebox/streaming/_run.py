"""One step over an image: passes that reduce, then passes back that add up gradients."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.node import map_arg

from squeezebox.streaming._graph import Streamed, is_linear
from squeezebox.streaming._reductions import State
from squeezebox.streaming._rows import run_node
from squeezebox.streaming._spool import Store
from squeezebox.streaming._strip import Part, Pass, Read, as_tuple, inputs_of, plan_pass, plan_way_back
from squeezebox.streaming._trace import DETACHED

Context = Callable[[], AbstractContextManager[Any]]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Stage:
    """A way over the image, strip by strip.

    ``reduces``: it adds up the states of the pass's reductions; ``derives``: gradients. The last pass does
    both at once where the loss is linear in what it reduces (a mean over pixels).
    """

    work: Pass
    number: int
    reduces: bool
    derives: bool

    @property
    def weight(self) -> int:
        """Its cost a row, in forward passes: backward costs about two."""
        return 3 if self.derives else 1


def stages_of(streamed: Streamed, stored: frozenset[Node], packed: bool) -> list[Stage]:
    """The ways over the image that a step takes, in order; later ones read what earlier ones have stored.

    ``packed``: a session packs what operators save, and those must be ones that it knows.
    """
    passes = {number: plan_pass(streamed, number, stored) for number in streamed.passes}
    derived = [number for number in passes if not streamed.differentiable.isdisjoint(passes[number].ends)]
    wanted = streamed.program.loss in streamed.differentiable
    derived = derived if wanted else []
    fused = (
        max(passes) if derived and max(derived) == max(passes) and is_linear(streamed, max(passes)) else None
    )
    ahead = [
        Stage(work=work, number=number, reduces=True, derives=number == fused)
        for number, work in passes.items()
    ]
    back = [
        Stage(
            work=plan_way_back(passes[number], number, stored, packed),
            number=number,
            reduces=False,
            derives=True,
        )
        for number in reversed(derived)
        if number != fused
    ]
    return ahead + back


class Run:
    """What is known of one step: values without rows, states of reductions, gradients so far.

    Values that strips read are leaves of autograd. Those that were computed from others get copies, whose
    gradients are handed on to what they were computed from before the pass that this is needed in. Nothing of
    the model is touched before :meth:`finish`.
    """

    def __init__(
        self,
        streamed: Streamed,
        read: Read,
        targets: Mapping[Node, Any],
        context: Context | None,
        store: Store,
    ) -> None:
        self.streamed = streamed
        self.states: dict[Node, State] = {}
        self._given, self._context, self._store = read, context, store
        self._begun: list[tuple[Node, int, Tensor]] = []
        self._leaves = {
            node: tensor.detach().requires_grad_(node in streamed.program.trained)
            for node, tensor in streamed.program.held.items()
        }
        self._copies: dict[Node, Tensor] = {}
        self._values: dict[Node, Any] = {**self._leaves, **targets}
        self._reduced: dict[Node, tuple[Tensor, ...]] = {}
        self._read_by: tuple[Stage, dict[Node, Any]] | None = None
        self._sloped: tuple[Stage, dict[Node, State]] | None = None
        self._compute()

    @property
    def loss(self) -> Tensor:
        """The loss, once all passes ahead are done."""
        value: Tensor = self._values[self.streamed.program.loss]
        return value

    def begin(self, stage: Stage) -> None:
        """Before a stage's first strip."""
        if not stage.reduces:
            self._hand_on(above=stage.number)

    def strip(self, stage: Stage, start: int, stop: int, again: bool = False) -> None:
        """One strip: the image's rows ``start`` to ``stop``."""
        whole = self.streamed.rows[self.streamed.program.image].count
        owned = stage.work.parts(start, stop, whole)
        if not owned:
            return
        if not stage.derives:
            with torch.no_grad():
                stage.work.run(
                    owned, self._read, self._values, lambda node, x: self._keep(node, owned[node][0], x)
                )
            return
        made: dict[Node, Tensor] = {}
        with torch.enable_grad(), self._context() if self._context else contextlib.nullcontext():
            run = stage.work.run_again if again else stage.work.run
            run(owned, self._read, self._for_strips(stage), made.__setitem__)
        if stage.reduces:
            with torch.no_grad():
                for node, x in made.items():
                    self._add(node, x)
        self._derive(stage, made, owned)

    def end(self, stage: Stage, is_last_ahead: bool) -> None:
        """After a stage's last strip."""
        if stage.reduces:
            self.reduce(stage)
            if is_last_ahead:
                self.turn()

    def reduce(self, stage: Stage) -> None:
        """Make the reductions' values of the states, and what follows from them."""
        for node in stage.work.reduced:
            self._set(node, self.streamed.reductions[node].finish(self.states[node]))
        self._compute()

    def turn(self) -> None:
        """The loss is known: on with its gradient, to what was reduced and to parameters."""
        if self.loss.requires_grad:
            self.loss.backward(retain_graph=True)

    def finish(self) -> Tensor:
        """Add the gradients to the parameters' and set the buffers; gives the loss."""
        self._hand_on(above=-1)
        for node, parameter in self.streamed.program.trained.items():
            gradient = self._leaves[node].grad
            if gradient is not None:
                parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)
        with torch.no_grad():
            for node, buffer in self.streamed.program.mutations.items():
                buffer.copy_(self._values[node])
        return self.loss.detach()

    def pretend(self, stage: Stage, start: int, stop: int) -> None:
        """Make up everything that a strip of the stage reads and is not known yet, to measure the strip.

        Parameters have gradients then, as after a first strip, and what is measured adds to them.
        """
        own = stage.work.ends if stage.reduces else ()
        self._make_up([node for node in self.streamed.reductions if node not in own])
        for values in self._reduced.values():
            for tensor in values:
                tensor.grad = torch.ones_like(tensor) if tensor.requires_grad else None
        self.prepare(stage)
        self._make_gradients()
        if not stage.reduces:
            self.strip(replace(stage, reduces=True, derives=False), start, stop)

    def rehearse(self, stages: Sequence[Stage]) -> None:
        """Go there and back through what has no rows, with values made up, to measure that.

        Ends with all that strips find in memory: values, what autograd saves of them, and gradients.
        """
        self._make_up(self.streamed.reductions)
        self.turn()
        for stage in stages:
            self.prepare(stage)
        self._make_gradients()
        self._hand_on(above=-1)
        self._make_gradients()

    def _make_up(self, reduced: Iterable[Node]) -> None:
        for node in reduced:
            value = node.meta["val"]
            ones = [torch.ones(each.shape, dtype=each.dtype, device=each.device) for each in as_tuple(value)]
            self._set(node, ones[0] if isinstance(value, Tensor) else tuple(ones))
            self._compute()

    def _make_gradients(self) -> None:
        """Zeros where strips will add, as after a first strip."""
        for leaf in [*self._leaves.values(), *self._copies.values()]:
            if leaf.requires_grad and leaf.grad is None:
                leaf.grad = torch.zeros_like(leaf)

    def gradients(self) -> Iterator[tuple[str, Tensor]]:
        """Every leaf that can have a gradient, by a name that stays the same."""
        for node, leaf in [*self._leaves.items(), *self._copies.items()]:
            if leaf.requires_grad:
                yield node.name, leaf
        for node, values in self._reduced.items():
            for number, value in enumerate(values):
                if value.requires_grad:
                    yield f"{node.name}.{number}", value

    def prepare(self, stage: Stage) -> None:
        """Make the leaves that the stage's strips read."""
        self._for_strips(stage)

    def _read(self, node: Node, start: int, stop: int) -> Tensor:
        """Rows of the image, of a target, or of what is stored, at which autograd begins then."""
        if node not in self.streamed.operators:
            return self._given(node, start, stop)
        x = self._store.read(node, start, stop)
        if torch.is_grad_enabled() and node in self.streamed.differentiable:
            self._begun.append((node, start, x.requires_grad_()))
        return x

    def _keep(self, node: Node, start: int, x: Tensor) -> None:
        if node in self.streamed.reductions:
            self._add(node, x)
        else:
            self._store.write(node, start, x)

    def _add(self, node: Node, x: Tensor) -> None:
        reduction = self.streamed.reductions[node]
        partial = reduction.partial(x.detach())
        self.states[node] = reduction.merge(self.states[node], partial) if node in self.states else partial

    def _derive(self, stage: Stage, made: Mapping[Node, Tensor], owned: Mapping[Node, Part]) -> None:
        ends: dict[Node, Tensor] = {}
        gradients: dict[Node, Tensor] = {}
        for node, x in made.items():
            gradient = self._gradient(stage, node, x.detach(), owned[node]) if x.requires_grad else None
            if gradient is not None:
                end = stage.work.ends[node]
                ends[end] = x
                gradients[end] = gradient + gradients[end] if end in gradients else gradient
        if ends:
            torch.autograd.backward([*ends.values()], [gradients.pop(end) for end in ends])
        for node, start, leaf in self._begun:
            if leaf.grad is not None:
                self._store.add(node, start, leaf.grad)
        self._begun.clear()

    def _gradient(self, stage: Stage, node: Node, x: Tensor, part: Part) -> Tensor | None:
        """The loss's derivative by an end's own rows, None if there is none."""
        if node not in self.streamed.reductions:
            return self._store.gradient(node, *part)
        slope = self._slopes(stage).get(node)
        return None if slope is None else self.streamed.reductions[node].gradient(x, slope)

    def _slopes(self, stage: Stage) -> dict[Node, State]:
        """What the stage's strips need of the loss's derivatives by what its pass reduces."""
        if self._sloped is None or self._sloped[0] is not stage:
            with torch.no_grad():
                slopes = {
                    node: self.streamed.reductions[node].slope(self.states[node], seeds)
                    for node, seeds in self._seeds(stage).items()
                    if any(seed is not None for seed in seeds)
                }
            self._sloped = stage, slopes
        return self._sloped[1]

    def _seeds(self, stage: Stage) -> dict[Node, tuple[Tensor | None, ...]]:
        """The loss's derivatives by what the stage's pass reduces."""
        if not stage.reduces:
            return {node: tuple(value.grad for value in self._reduced[node]) for node in stage.work.reduced}
        guess = self._at_zero(stage)
        wanted = [node for node in stage.work.reduced if node in self.streamed.differentiable]
        zeros = [guess[node] for node in wanted]
        found = torch.autograd.grad(
            guess[self.streamed.program.loss], zeros, allow_unused=True, retain_graph=True
        )
        return {node: (seed,) for node, seed in zip(wanted, found, strict=True)}

    def _at_zero(self, stage: Stage) -> dict[Node, Any]:
        """Values as if the pass had reduced all to zero: a linear loss has the same derivatives anywhere."""
        values = dict(self._values)
        for node in stage.work.reduced:
            val = node.meta["val"]
            values[node] = torch.zeros(
                val.shape, dtype=val.dtype, device=val.device, requires_grad=val.is_floating_point()
            )
        self._fill(values)
        return values

    def _set(self, node: Node, value: Any) -> None:
        trained = node in self.streamed.differentiable
        leaves = tuple(each.detach().requires_grad_(trained) for each in as_tuple(value))
        self._reduced[node] = leaves
        self._values[node] = leaves[0] if isinstance(value, Tensor) else leaves

    def _compute(self) -> None:
        self._fill(self._values)

    def _fill(self, values: dict[Node, Any]) -> None:
        """Compute whatever has no rows and can be computed."""
        with torch.enable_grad():
            for node in self.streamed.single:
                if node not in values and all(each in values for each in node.all_input_nodes):
                    arguments, keywords = (
                        map_arg(each, lambda inner: values[inner]) for each in (node.args, node.kwargs)
                    )
                    value = run_node(node, arguments, keywords)
                    values[node] = value.detach() if node.target is DETACHED else value

    def _for_strips(self, stage: Stage) -> dict[Node, Any]:
        """What the stage's strips read that has no rows."""
        if self._read_by is None or self._read_by[0] is not stage:
            self._read_by = stage, {node: self._for_strip(node) for node in inputs_of(stage.work)}
        return self._read_by[1]

    def _for_strip(self, node: Node) -> Any:
        value = self._values[node]
        if isinstance(value, Tensor) and not value.is_leaf:
            value = self._copies.setdefault(node, value.detach().requires_grad_())
        return value

    def _hand_on(self, above: int) -> None:
        """Hand the copies' gradients on to what they were computed from, from the highest level down."""
        ready = [node for node in self._copies if self.streamed.level[node] > above]
        for node in sorted(ready, key=lambda node: -self.streamed.level[node]):
            copy = self._copies[node]
            if copy.grad is not None:
                torch.autograd.backward([self._values[node]], [copy.grad], retain_graph=True)
                copy.grad = None

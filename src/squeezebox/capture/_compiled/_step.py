"""A model compiled with packed activations, and its report."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

import torch

from squeezebox.capture._compiled._codes import BitRule, Matcher
from squeezebox.capture._compiled._spending import Spending
from squeezebox.reports import CompiledReport, human_bytes
from squeezebox.schema import (
    AttachError,
    OptimizerPlan,
    OptionError,
    SqueezeboxError,
    UnsupportedModelError,
)

if TYPE_CHECKING:
    from squeezebox.capture._compiled._saved import Choice, Joint, Part


class Saving:
    """Says what forward saves of each graph: what was chosen, or without a choice what Inductor would save.

    Attributes:
        peak_bytes: measured with the sample, where the step is ready. From then on the same is saved for
            inputs of other shapes, unless more would live than with the sample.
        ran: the graphs that ran in the last step with the sample, by their numbers.
    """

    def __init__(self, choice: Choice | None = None, names: Sequence[Mapping[str, bool]] = ()) -> None:
        self.choice, self._names = choice, names
        self._parts: list[Part] = []
        self._cuts: list[Sequence[Sequence[Any]]] = []
        self._planned_bytes: list[int] = []
        self._followed = 0
        self.peak_bytes: int | None = None
        self.ran: list[int] = []

    def known(self) -> tuple[Joint, Choice]:
        """The graphs that ran and what is saved of them.

        Raises:
            UnsupportedModelError: no graph with gradients was compiled.
        """
        from squeezebox.capture._compiled._saved import Joint

        if not self.ran:
            raise UnsupportedModelError(
                "torch.compile made no graph with gradients of the model, and budget= takes one. "
                "It leaves a forward as it is that breaks within a loop, or has torch.compiler.disable; "
                "mend that, or squeezebox.attach() the eager model."
            )
        joint = Joint([self._parts[number] for number in self.ran])
        return joint, self.choice or joint.choice(self.starts()[0], sys.maxsize)

    def starts(self) -> list[frozenset[Any]]:
        """What Inductor would save of the graphs that ran: as it is, and in ways that hold less."""
        ways = zip(*(self._cuts[number] for number in {*self.ran}), strict=True)
        return [frozenset(node for cut in way for node in cut) for way in ways]

    def chosen(self, choice: Choice) -> Saving:
        """For the same graphs, compiled again: each compilation has nodes of its own."""
        return Saving(choice, [part.names(choice.saved) for part in self._parts])

    def again(self) -> Saving:
        """What was chosen, for the same graphs, compiled again."""
        return Saving(self.choice, self._names)

    def __call__(self, part: Part, cuts: Iterator[Sequence[Any]]) -> tuple[int, set[Any], set[Any]]:
        """The number of a joint graph, which Inductor would cut so; what forward saves, and what it packs.

        Raises:
            OptionError: more would live than with the sample.
            UnsupportedModelError: inputs of another shape make graphs of another kind.
        """
        from squeezebox.capture._compiled._saved import Joint, Packed

        number = len(self._parts) if self.peak_bytes is None else self._same(part)
        is_chosen = number < len(self._names)
        cuts = map(part.with_draws, cuts)
        own = [] if is_chosen else [next(cuts)]
        saved = part.saved(self._names[number] if is_chosen else part.names(own[0]))
        planned = Joint([part]).choice(saved, sys.maxsize).peak_bytes
        if self.peak_bytes is None:
            self._parts.append(part)
            self._cuts.append([] if is_chosen else [*own, *cuts])
            self._planned_bytes.append(planned)
        else:
            self._check_fits(self.peak_bytes, planned - self._planned_bytes[number])
        packed = {each.node for each in saved if isinstance(each, Packed)}
        return number, {node for node in part.graph.nodes if node in saved or node in packed}, packed

    def begin(self) -> None:
        """Note from now on which graphs run."""
        if self.peak_bytes is None:
            self.ran.clear()

    def followed(self, compiled: Callable[..., Any]) -> Callable[..., Any]:
        """As the argument; where it is of a graph that was cut now, with notes of when it runs."""
        if self._followed == len(self._parts):
            return compiled
        number, self._followed = self._followed, len(self._parts)

        def noted(*args: Any) -> Any:
            if self.peak_bytes is None:
                self.ran.append(number)
            return compiled(*args)

        return noted

    def _same(self, part: Part) -> int:
        """The sample's graph of these operators."""
        names = part.names(part.graph.nodes)
        same = (n for n, other in enumerate(self._parts) if other.names(other.graph.nodes) == names)
        number = 0 if len(self._parts) == 1 else next(same, None)
        if number is None:
            raise UnsupportedModelError(
                "the model compiles to several graphs, and for this training input, of another shape or "
                "dtype, to others than for its sample. Make a step for this input, or pad it."
            )
        return number

    def _check_fits(self, peak_bytes: int, more_bytes: int) -> None:
        if more_bytes > 0:
            more = human_bytes(peak_bytes + more_bytes)
            raise OptionError(
                f"the step's peak with its sample is {human_bytes(peak_bytes)}, and this training input "
                f"would take about {more}: it is of another shape or dtype, has a gradient, comes under "
                "autocast, or other parameters are trained. Make a step with your largest batch as its "
                "sample, or one for this input."
            )


class Updates(Protocol):
    """An optimizer's updates in backward, as squeezebox.optim makes them."""

    def accumulated(self, parameter: torch.nn.Parameter) -> None:
        """Update a parameter that has all of its gradient, or let it wait for others."""

    def check_forward(self) -> None:
        """Refuse what would be wrong before it is."""

    def unseen(self) -> AbstractContextManager[None]:
        """Around what would look at gradients that are used up."""

    def close(self) -> None:
        """Leave the optimizer as it would be without."""


def _joined(reports: Sequence[CompiledReport]) -> CompiledReport:
    tensors = [tensor for report in reports for tensor in report.tensors]
    return CompiledReport(
        saved_bytes=sum(report.saved_bytes for report in reports),
        packed_bytes=sum(report.packed_bytes for report in reports),
        tensors=tuple(sorted(tensors, key=lambda row: -row.saved_bytes)),
        copied_bytes=sum(report.copied_bytes for report in reports),
    )


def _accumulate(parameter: torch.nn.Parameter, gradient: torch.Tensor) -> None:
    parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient


def _accumulate_copy(parameter: torch.nn.Parameter, gradient: torch.Tensor) -> None:
    """What stays after backward: kernels that come later write over the gradient itself."""
    _accumulate(parameter, gradient.clone() if parameter.grad is None else gradient)


class CompiledStep:
    """A compiled model of which the saved activations are packed. Call it as the model.

    Made by ``squeezebox.compile``. ``module`` is the model itself: its parameters are the ones trained.
    ``noise`` is the relative gradient noise measured when it was made, and ``peak_bytes`` the peak of a step
    with its sample; None where they were not.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        choose: Callable[[tuple[Any, ...], dict[str, Any]], BitRule],
        check: Callable[[], None],
        *,
        fullgraph: bool = False,
        options: Mapping[str, Any] | None = None,
        save: Saving | None = None,
        spending: Spending | None = None,
        slices: int = 1,
        reuse: bool = False,
    ) -> None:
        self.module = model
        self.noise: float | None = None
        self.peak_bytes: int | None = None
        self._save, self._spending, self._slices, self._reuse = save, spending, slices, reuse
        self._backend: Any = None
        self._choose, self._check = choose, check
        self._fullgraph, self._options = fullgraph, options
        self._compiled: Callable[..., Any] | None = None
        self._updates: Updates | None = None
        self._plan: OptimizerPlan | None = None
        self._reports: dict[int, CompiledReport] = {}  # by the graph

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The model's result. The first call compiles, and so does one with inputs of another shape."""
        self._check()
        if self._updates is not None:
            self._updates.check_forward()
        if self._compiled is None:
            self._compiled = self._compile(self._choose(args, kwargs))
        with contextlib.ExitStack() as around:
            if self._save is not None:
                self._save.begin()
                around.enter_context(torch._dynamo.config.patch(fail_on_recompile_limit_hit=True))
            if self._updates is not None:
                around.enter_context(self._updates.unseen())
            return self._run(*args, **kwargs)

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        assert self._compiled is not None
        try:
            return self._compiled(*args, **kwargs)
        except torch._dynamo.exc.FailOnRecompileLimitHit as error:
            raise OptionError(
                f"the step was compiled for {torch._dynamo.config.recompile_limit} forms of input, and torch "
                "would run others uncompiled, beyond the budget. Pad inputs to fewer shapes, or raise "
                "torch._dynamo.config.recompile_limit."
            ) from error
        except torch._dynamo.exc.BackendCompilerFailed as error:
            if isinstance(error.inner_exception, SqueezeboxError):
                raise error.inner_exception from error
            raise

    def update_by(self, updates: Updates, plan: OptimizerPlan) -> None:
        """Have these take gradients in backward, as planned, from now on."""
        self._updates, self._plan = updates, plan

        def take(parameter: torch.nn.Parameter, gradient: torch.Tensor) -> None:
            _accumulate(parameter, gradient)
            updates.accumulated(parameter)

        if self._spending is not None:
            self._spending.take = take

    def close(self) -> None:
        """Leave the optimizer as it would be without: its states in memory, and updates to its own step.

        Gradients are then kept as torch.compile's are, so that the peak is above the budget.
        """
        if self._updates is not None:
            self._updates.close()
        self._updates = self._plan = None
        if self._spending is not None:
            self._spending.take = _accumulate_copy

    def report(self) -> CompiledReport:
        """What the training graph compiled last saves; within a budget, what all graphs of the model do.

        Raises:
            AttachError: no forward pass with gradients was compiled yet.
        """
        if not self._reports:
            raise AttachError(
                "there is nothing to report: no forward pass with gradients was compiled yet. Call the step "
                "on a batch once, with gradients enabled, and ask again."
            )
        ran = self._save.ran if self._save is not None else self._reports
        whole = _joined([self._reports[number] for number in ran])
        return dataclasses.replace(whole, noise=self.noise, optimizer=self._plan, slices=self.slices)

    @property
    def slices(self) -> int:
        """Of the batch, in which the first layers are worked; 1 where they are compiled like the others."""
        return self._slices if self._backend is not None and self._backend.sliced else 1

    def _reuses(self) -> bool:
        """Whether freed memory is held for later tensors: within a budget for the sample, as measured."""
        return self._save is None or (self._reuse and self._save.peak_bytes is None)

    def _compile(self, rule: BitRule) -> Callable[..., Any]:
        from squeezebox.capture._compiled import _adapter, _rewrite  # slow to import, and not always needed

        matcher = Matcher(rule)
        number, packed = 0, set[str]()

        def save(part: Part, cuts: Iterator[Sequence[Any]]) -> Container[Any]:
            nonlocal number, packed
            assert self._save is not None
            known = dataclasses.replace(part, codes=_rewrite.codes(part.graph, part.forward, matcher))
            number, saved, nodes = self._save(known, cuts)
            packed = {node.name for node in nodes}
            return saved

        def rewrite(plain: _adapter.Split, split: _adapter.Split) -> None:
            packs = (lambda _: True) if self._save is None else (lambda node: node.name in packed)
            self._reports[number] = _rewrite.rewrite(plain, split, matcher, packs)
            if self._save is None:
                matcher.check()

        fingerprint = json.dumps(dataclasses.asdict(rule), sort_keys=True)
        saving = (save, self._save.followed) if self._save is not None else None
        own = fingerprint, self._options, saving, self._spending, self._slices, self._reuses
        self._backend = backend = _adapter.Backend(rewrite, *own)
        compiled: Callable[..., Any] = torch.compile(
            self.module, backend=backend, fullgraph=self._fullgraph, dynamic=False, **_adapter.ISOLATED
        )
        return compiled

"""A model compiled with packed activations, and its report."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
from collections.abc import Callable, Container, Mapping, Sequence
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
    from squeezebox.capture._compiled._saved import Choice, Joint


class Saving:
    """Says what forward saves of one graph: what was chosen, or without a choice what Inductor would save.

    Attributes:
        starts: what Inductor would save, as it is and where recomputation is cheap.
        peak_bytes: measured with the sample, where the step is ready. From then on the same is saved for
            inputs of other shapes, unless more would live than with the sample.
    """

    def __init__(self, choice: Choice | None) -> None:
        self._choice = choice
        self._joint: Joint | None = None
        self._planned_bytes = 0
        self.starts: list[frozenset[Any]] = []
        self.peak_bytes: int | None = None

    def known(self) -> tuple[Joint, Choice]:
        """The graph and what is saved of it.

        Raises:
            UnsupportedModelError: no graph with gradients was compiled.
        """
        if self._joint is None or self._choice is None:
            raise UnsupportedModelError(
                "torch.compile made no graph with gradients of the model, and budget= takes one. Remove "
                "torch.compiler.disable where it marks the model, or squeezebox.attach() the eager model."
            )
        return self._joint, self._choice

    def __call__(
        self,
        graph: Any,
        forward: Sequence[Any],
        results: int,
        cuts: Sequence[Sequence[Any]],
        spent: Mapping[Any, int],
    ) -> Container[Any]:
        """As the adapter's ``Save``."""
        from squeezebox.capture._compiled._saved import Joint

        joint = Joint(graph, forward, results, spent)
        if self._choice is None:
            self._choice = joint.choice(frozenset(cuts[0]), sys.maxsize)
        names = {node.name for node in self._choice.saved}  # each compilation has nodes of its own
        saved = frozenset(node for node in graph.nodes if node.name in names)
        planned = joint.choice(saved, sys.maxsize).peak_bytes
        if self.peak_bytes is not None:
            self._check_fits(self.peak_bytes, planned)
            return saved
        if self._joint is not None:
            raise UnsupportedModelError(
                "the model compiles to several graphs, and budget= takes one. fullgraph=True says where it "
                "breaks: mend that, or use bits= or noise=."
            )
        self._joint, self._planned_bytes = joint, planned
        self.starts = [frozenset(cut) for cut in cuts]
        return saved

    def _check_fits(self, peak_bytes: int, planned_bytes: int) -> None:
        if planned_bytes > self._planned_bytes:
            more = human_bytes(peak_bytes + planned_bytes - self._planned_bytes)
            raise OptionError(
                f"the step's peak with its sample is {human_bytes(peak_bytes)}, and this training input, of "
                f"another shape or dtype, would take about {more}. Make a step with your largest batch as "
                "its sample, or one for this input."
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


def _accumulate(parameter: torch.nn.Parameter, gradient: torch.Tensor) -> None:
    parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient


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
    ) -> None:
        self.module = model
        self.noise: float | None = None
        self.peak_bytes: int | None = None
        self._save, self._spending = save, spending
        self._choose, self._check = choose, check
        self._fullgraph, self._options = fullgraph, options
        self._compiled: Callable[..., Any] | None = None
        self._updates: Updates | None = None
        self._plan: OptimizerPlan | None = None
        self._reports: list[CompiledReport] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The model's result. The first call compiles, and so does one with inputs of another shape."""
        self._check()
        if self._updates is not None:
            self._updates.check_forward()
        if self._compiled is None:
            self._compiled = self._compile(self._choose(args, kwargs))
        try:
            with self._updates.unseen() if self._updates is not None else contextlib.nullcontext():
                return self._compiled(*args, **kwargs)
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
            self._spending.take = _accumulate

    def report(self) -> CompiledReport:
        """What the training graph compiled last saves.

        Raises:
            AttachError: no forward pass with gradients was compiled yet.
        """
        if not self._reports:
            raise AttachError(
                "there is nothing to report: no forward pass with gradients was compiled yet. Call the step "
                "on a batch once, with gradients enabled, and ask again."
            )
        return dataclasses.replace(self._reports[-1], noise=self.noise, optimizer=self._plan)

    def _compile(self, rule: BitRule) -> Callable[..., Any]:
        from squeezebox.capture._compiled import _adapter, _rewrite  # slow to import, and not always needed

        def packed(plain: _adapter.Split, split: _adapter.Split) -> None:
            if self._save is not None:
                self._reports.append(_rewrite.kept(plain, split))
                return
            matcher = Matcher(rule)
            self._reports.append(_rewrite.rewrite(plain, split, matcher))
            matcher.check()

        fingerprint = json.dumps(dataclasses.asdict(rule), sort_keys=True)
        if self._save is not None:
            fingerprint = "kept"  # what is saved is part of the graphs, and so of their keys
        backend = _adapter.Backend(packed, fingerprint, self._options, self._save, self._spending)
        compiled: Callable[..., Any] = torch.compile(
            self.module, backend=backend, fullgraph=self._fullgraph, dynamic=False, **_adapter.ISOLATED
        )
        return compiled

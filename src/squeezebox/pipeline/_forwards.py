"""A rank's forwards: from the batch or the rank before to the loss or the rank after."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from squeezebox.pipeline._cut import cut
from squeezebox.pipeline._feed import Feed
from squeezebox.pipeline._links import Links
from squeezebox.pipeline._setup import device_of, example
from squeezebox.pipeline._stage import Passage, Stage
from squeezebox.pipeline._wire import apart
from squeezebox.schedules import Action, Kind
from squeezebox.schema import PipelinePlan, UnsupportedModelError


class Forwards:
    """Forwards of a rank's ``stages``, with the connections that they need.

    ``loss_fn`` is called where the last stage is, for a part of the batch's mean loss.
    """

    def __init__(
        self,
        plan: PipelinePlan,
        stages: Mapping[int, Stage],
        links: Links,
        feed: Feed,
        loss_fn: Callable[..., Tensor],
    ) -> None:
        self.plan, self.stages, self.links = plan, stages, links
        self._feed, self._loss_fn = feed, loss_fn

    def is_loss(self, stage: int) -> bool:
        """Whether the loss follows on this stage."""
        return stage == len(self.plan.stages) - 1

    def run(self, action: Action) -> Passage:
        """Do one, and hand on what comes out."""
        stage, number = action.stage, action.microbatch
        if stage == 0:
            buffers: list[Tensor] = []
            leaves = list(self._feed.inputs.pop(number))
        else:
            buffers, leaves = self.links.receive(stage, number)
        if self.is_loss(stage):
            loss_of = functools.partial(self._loss_of, self._feed.targets.pop(number, None))
            return Passage(action.version, buffers, leaves, [*self.stages[stage](*leaves, loss_of=loss_of)])
        outputs = self.stages[stage](*leaves)
        self.links.send(stage, number, apart(outputs, buffers))
        kept = [output for output in outputs if output.requires_grad]
        return Passage(action.version, buffers, leaves, kept)

    def of_batch(self, batch: int) -> Tensor | None:
        """All forwards of a batch and nothing else: its mean loss where the last stage is."""
        self.links.expect(self.plan.microbatches)
        first, losses = batch * self.plan.microbatches, []
        for number in range(first, first + self.plan.microbatches):
            for stage in self.stages:
                passage = self.run(Action(kind=Kind.FORWARD, stage=stage, microbatch=number))
                self.links.release(stage, passage.received, None)
                losses += passage.outputs if self.is_loss(stage) else []
        self.links.settle()
        return torch.stack(losses).sum() if losses else None

    def in_evaluation(self, model: nn.Module) -> Forwards:
        """The same with the graph that the model has in evaluation mode, and connections of their own.

        Raises:
            UnsupportedModelError: this graph is cut elsewhere, so that ranks lack weights.
        """
        pieces = cut(model, example(self.plan, device_of(model)))
        stages = {}
        for number, own in self.stages.items():
            planned = self.plan.stages[number]
            stages[number] = stage = Stage(pieces[planned.first : planned.end], recompute=False)
            if {*map(id, stage.parameters())} != {*map(id, own.parameters())}:
                raise UnsupportedModelError(
                    f"in evaluation mode the model's graph is cut elsewhere than in training, at stage "
                    f"{number}, so ranks lack weights. Put all ranks' state_dict() together, and evaluate in "
                    "one process."
                )
        return Forwards(self.plan, stages, self.links.plain("evaluation"), self._feed, self._loss_fn)

    def _loss_of(self, target: Any, *outputs: Any) -> Tensor:
        output = outputs[0] if len(outputs) == 1 else outputs
        loss = self._loss_fn(output) if target is None else self._loss_fn(output, target)
        return loss / self.plan.microbatches

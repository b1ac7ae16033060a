"""A rank's part of training, action by action."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from squeezebox.pipeline._cut import cut
from squeezebox.pipeline._data import Feed
from squeezebox.pipeline._health import Assembly, Health
from squeezebox.pipeline._links import Links
from squeezebox.pipeline._setup import device_of, example, keywords
from squeezebox.pipeline._shards import Shards
from squeezebox.pipeline._stage import Passage, Stage
from squeezebox.pipeline._updates import Settings, Updates
from squeezebox.pipeline._weights import Flat, Weights
from squeezebox.pipeline._wire import Traffic, apart
from squeezebox.schedules import Action, Kind, Schedule, published
from squeezebox.schema import OptionError, PipelinePlan, UnsupportedModelError


class Forwards:
    """Forwards of a rank's ``stages`` of the ``model``, with the connections that they need.

    ``loss_fn`` is called where the last stage is, for a part of the batch's mean loss. ``samples`` are in
    each microbatch. ``enter`` has the newest weights of a stage ready, where no schedule says which.
    """

    def __init__(
        self,
        plan: PipelinePlan,
        model: nn.Module,
        stages: Mapping[int, Stage],
        links: Links,
        feed: Feed,
        loss_fn: Callable[..., Tensor],
        samples: int,
        enter: Callable[[int], None],
    ) -> None:
        self._enter = enter
        self.plan, self.stages, self.links, self.feed = plan, stages, links, feed
        self._model, self._loss_fn, self._samples = model, loss_fn, samples
        self._smaller: dict[int, Forwards] = {}
        self._prepared: set[int] = set()  # samples of smaller microbatches, of all pipelines

    def is_loss(self, stage: int) -> bool:
        """Whether the loss follows on this stage."""
        return stage == len(self.plan.stages) - 1

    def suited(self, microbatch: int) -> Forwards:
        """These, or for a smaller microbatch others, with connections of their own.

        Raises:
            UnsupportedModelError: the graph is another for so few samples, and ranks lack weights for it.
        """
        samples = self.feed.size(microbatch)
        if samples == self._samples:
            return self
        if samples not in self._smaller:
            what = f"microbatches of {samples}"
            stages = stages_again(self.plan, self.stages, self._model, samples, what)
            self._smaller[samples] = self._like(stages, f"{self.links.wires.purpose}, {what}", samples)
        return self._smaller[samples]

    def run(self, action: Action) -> Passage:
        """Do one, and hand on what comes out."""
        stage, number = action.stage, action.microbatch
        if stage == 0:
            buffers: list[Tensor] = []
            leaves = list(self.feed.inputs.pop(number))
        else:
            if self._samples < self.plan.microbatch:
                self.links.expect_at(stage, number)
            buffers, leaves = self.links.receive(stage, number)
        if self.is_loss(stage):
            loss_of = functools.partial(self.loss_of, number, self.feed.targets.pop(number))
            return Passage(action.version, buffers, leaves, [*self.stages[stage](*leaves, loss_of=loss_of)])
        outputs = self.stages[stage](*leaves)
        self.links.send(stage, number, apart(outputs, buffers))
        kept = [output for output in outputs if output.requires_grad]
        return Passage(action.version, buffers, leaves, kept)

    def begin(self, batch: int) -> None:
        """A batch's microbatches will come, smaller ones when it is their turn."""
        first = batch * self.plan.microbatches
        whole = self.feed.sizes(batch).count(self.plan.microbatch)
        self.links.expect(range(first, first + whole))

    def of_batch(self, batch: int) -> Tensor | None:
        """All forwards of a batch and nothing else: its mean loss where the last stage is."""
        self.begin(batch)
        first, losses = batch * self.plan.microbatches, []
        for number, stage in itertools.product(range(first, first + self.plan.microbatches), self.stages):
            self._enter(stage)
            if self.feed.takes(stage, number) and self.feed.size(number):
                own = self.suited(number)
                passage = own.run(Action(kind=Kind.FORWARD, stage=stage, microbatch=number))
                own.links.release(stage, number, passage.received, None)
                losses += passage.outputs if self.is_loss(stage) else []
        self.links.settle()
        return self.mean(batch, losses)

    def mean(self, batch: int, losses: Sequence[Tensor]) -> Tensor | None:
        """The mean loss of the samples that this rank has taken, from their microbatches' parts."""
        if not losses:
            return None
        total, share = torch.stack([*losses]).sum(), self.feed.share(batch)
        return total if share == 1.0 else total / share

    def in_evaluation(self, model: nn.Module, assembly: Assembly) -> Forwards:
        """The same with the graph that the model has in evaluation mode, and connections of their own.

        Raises:
            Refused: this graph is cut elsewhere, so that a rank lacks weights.
        """
        options = self.plan, self.stages, model, self._samples, "evaluation mode"
        stages = assembly.make(lambda: stages_again(*options))
        return self._like(stages, "evaluation", self._samples)

    def prepare(self, batch: int, assembly: Assembly) -> None:
        """Have what a batch's smaller microbatches need, if the schedule flushes; every rank must ask for it.

        Raises:
            Refused: the graph is another for so few samples, and a rank lacks weights for it.
        """
        new = self.feed.smaller(batch) - self._prepared
        if new and published(self.plan.schedule).flushes:  # else ranks may still wait for one another
            last = batch * self.plan.microbatches + len(self.feed.sizes(batch)) - 1
            assembly.make(lambda: self.suited(last))
            self._prepared |= new

    def loss_of(self, number: int, target: Any, *outputs: Any) -> Tensor:
        """A microbatch's part of the batch's mean loss."""
        output = outputs[0] if len(outputs) == 1 else outputs
        loss = self._loss_fn(output) if target is None else self._loss_fn(output, target)
        _require_loss(loss)
        return loss / self.feed.parts(number)

    def _like(self, stages: Mapping[int, Stage], purpose: str, samples: int) -> Forwards:
        links = self.links.plain(purpose)
        options = self.feed, self._loss_fn, samples, self._enter
        return Forwards(self.plan, self._model, stages, links, *options)


def _require_loss(loss: Any) -> None:
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        found = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise OptionError(f"loss_fn returned {found}: it must be one number, in a tensor. Return the mean.")
    if torch.is_grad_enabled() and not loss.requires_grad:
        raise OptionError(
            "loss_fn returned a loss that no gradient goes through, such as a detached one. Return the "
            "tensor that the model's output leads to."
        )


def stages_again(
    plan: PipelinePlan, stages: Mapping[int, Stage], model: nn.Module, samples: int, what: str
) -> dict[int, Stage]:
    """A rank's ``stages`` with the graph that the model has now, for microbatches of ``samples``.

    Raises:
        UnsupportedModelError: for ``what`` it is, this graph is cut elsewhere, so that ranks lack weights.
    """
    inputs = tuple(each[:samples] for each in example(plan, device_of(model)))
    pieces = cut(model, inputs, keywords(plan))
    made = {}
    for number, own in stages.items():
        planned = plan.stages[number]
        again = planned.policy == "recompute"
        made[number] = stage = Stage(pieces[planned.first : planned.end], recompute=again)
        if {*map(id, stage.parameters())} != {*map(id, own.parameters())}:
            raise UnsupportedModelError(
                f"for {what} the model's graph is cut elsewhere than in training, at stage {number}, so a "
                f"rank lacks weights. Leave {what} out, or put all ranks' state_dict() together and go on in "
                "one process."
            )
    return made


class Turns:
    """A rank's actions in order, from batch to batch, of which it may look at the next one."""

    def __init__(self, schedule: Schedule, rank: int) -> None:
        self._schedule, self._rank = schedule, rank
        self.restart(0)

    def restart(self, batch: int) -> None:
        """Go on with this batch, in empty pipelines."""
        assert self._schedule.turns is not None
        self._actions = self._schedule.turns(self._rank, batch)
        self._ahead: Action | None = None

    def ahead(self) -> Action:
        """The next one, without taking it."""
        self._ahead = self._ahead or next(self._actions)
        return self._ahead

    def take(self) -> Action:
        """The next one."""
        action, self._ahead = self.ahead(), None
        return action

    def until(self, batch: int) -> Iterator[Action]:
        """Those before the first one of a later batch."""
        while self.batch_of(self.ahead()) <= batch:
            yield self.take()

    def batch_of(self, action: Action) -> int:
        """The batch that an action is for."""
        return self._schedule.batch_of(action)

    @property
    def updates(self) -> int:
        """How many of its stages' updates a rank does in a batch, for each of them."""
        return max(map(self._schedule.updates_of, self._schedule.stages_of(self._rank)))


class Training:
    """What a rank does to train, and what lasts from action to action and from batch to batch.

    Batches before ``late_from`` have gradients of the newest weights, those after it of earlier ones, for
    which ``updates`` may correct.
    """

    def __init__(
        self,
        turns: Turns,
        forwards: Forwards,
        weights: Weights | Shards,
        updates: Updates,
        health: Health,
        late_from: int | None,
    ) -> None:
        self._turns, self._forwards, self._health = turns, forwards, health
        self._weights, self._updates, self._late_from = weights, updates, late_from
        self._links, self._stages = forwards.links, forwards.stages
        self.batch = 0
        """Batches begun so far."""
        self._ended_stages = 0
        self._flights: dict[tuple[int, int], Passage] = {}
        self._losses: list[Tensor] = []
        self._gradients: Flat | None = None
        self._settings: dict[int, Settings] = {}

    def step(self) -> Tensor | None:
        """Do all up to the first action of the next batch: the batch's mean loss on the last rank."""
        self._settings[self.batch] = self._updates.settings()
        self._forwards.begin(self.batch)
        for action in self._turns.until(self.batch):
            self._do(action)
        version = self._turns.ahead().version
        self._reach(version, version)
        loss, self._losses = self._forwards.mean(self.batch, self._losses), []
        self.batch += 1
        return loss

    def drain(self) -> None:
        """Finish all microbatches and updates under way."""
        while self._ended_stages < self._made(self.batch) * len(self._stages):
            action = self._turns.take()
            if self._turns.batch_of(action) < self.batch:
                self._do(action)
        self._turns.restart(self.batch)
        self._reach(self._made(self.batch), self._turns.ahead().version)
        self._links.settle()

    def restart(self, batch: int) -> range:
        """Go on after ``batch`` batches, with nothing under way.

        Returns:
            The versions of the weights from the oldest one that will be read to the newest.
        """
        newest = self._made(batch)
        self.batch, self._ended_stages = batch, newest * len(self._stages)
        self._turns.restart(batch)
        return range(self._turns.ahead().version, newest + 1)

    def _made(self, batch: int) -> int:
        """The version that ``batch`` batches make."""
        return batch * self._turns.updates

    def evaluation(self, model: nn.Module, assembly: Assembly) -> Forwards:
        """The passes of a batch in evaluation mode; Refused if a rank lacks weights for them."""
        return self._forwards.in_evaluation(model, assembly)

    def traffic(self) -> tuple[Traffic, ...]:
        """What was sent in training so far."""
        return self._links.traffic()

    def _do(self, action: Action) -> None:
        self._health.works(f"works at {action}")
        key = action.stage, action.microbatch
        if action.kind is Kind.UPDATE:
            self._weights.leave()
            self._end_stage(action)
            return
        is_there = self._forwards.feed.size(action.microbatch) > 0
        if is_there or isinstance(self._weights, Shards):  # whose replicas may have that microbatch
            self._ready(action)
        if not is_there:
            return
        forwards = self._forwards.suited(action.microbatch)
        if action.kind is Kind.FORWARD:
            self._flights[key] = passage = forwards.run(action)
            if forwards.is_loss(action.stage):
                self._losses += (loss.detach() for loss in passage.outputs)
        else:
            self._backward(action, self._flights[key], forwards)
            if action.kind is not Kind.INPUT:
                passage = self._flights.pop(key)
                forwards.links.release(*key, passage.received, passage.gradients)

    def _ready(self, action: Action) -> None:
        """Have an action's version made and read, and in backward room for its gradients."""
        if action.kind is Kind.FORWARD:
            self._reach(action.version, action.version)
        elif self._gradients is None:
            self._gradients = self._updates.gradients()
            self._weights.accumulate_into(self._gradients)
        # Autograd noted the parameters, not their values.
        self._weights.select(action.version, action.stage, backward=action.kind is not Kind.FORWARD)

    def _backward(self, action: Action, passage: Passage, forwards: Forwards) -> None:
        if action.kind is not Kind.WEIGHT and not forwards.is_loss(action.stage):
            passage.gradients = forwards.links.receive_gradients(action.stage, action.microbatch)
        weights = [each for each in forwards.stages[action.stage].parameters() if each.requires_grad]
        if action.kind is Kind.WEIGHT:
            passage.backward_to_weights(weights)
            return
        is_whole = action.kind is Kind.BACKWARD
        results = passage.backward() if is_whole else passage.backward_to_inputs(weights)
        if action.stage:
            returned = apart(results, passage.gradients or [])
            forwards.links.send_gradients(action.stage, action.microbatch, returned)

    def _end_stage(self, update: Action) -> None:
        """A stage's gradients of an update are complete; with those of all stages, it is queued."""
        self._ended_stages += 1
        if self._ended_stages % len(self._stages) == 0:
            batch = self._turns.batch_of(update)
            late = self._late_from is not None and batch >= self._late_from
            # A replica that a small batch has no microbatch for has nothing to add.
            gradients = self._gradients or self._updates.gradients()
            self._updates.queue(gradients, self._settings[batch], late=late)
            self._settings = {each: own for each, own in self._settings.items() if each >= batch}
            self._gradients = None

    def _reach(self, version: int, oldest: int) -> None:
        """Have this version made; from ``oldest`` on they stay, and those that are still to be read."""
        if self._weights.newest < version:
            oldest = min(version, oldest, *(each.version for each in self._flights.values()))
            self._updates.reach(version, oldest, self._health.await_outcome)

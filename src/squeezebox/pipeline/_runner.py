"""The runner: a rank's part of a pipeline, action by action."""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from squeezebox.pipeline._checkpoint import newest, random_states, read, restore_random_states, write
from squeezebox.pipeline._cut import cut
from squeezebox.pipeline._feed import Feed
from squeezebox.pipeline._health import Health
from squeezebox.pipeline._links import Links
from squeezebox.pipeline._packing import Wire
from squeezebox.pipeline._setup import (
    agree,
    check_options,
    check_stages,
    device_of,
    example,
    groups_of,
    own_store,
    placed,
    schedule_of,
    shared,
)
from squeezebox.pipeline._stage import Passage, Stage, evaluating
from squeezebox.pipeline._updates import Exchange, Result, Updates
from squeezebox.pipeline._weights import Flat, Weights, forget
from squeezebox.pipeline._wire import Traffic, apart
from squeezebox.schedules import Action, Kind, Schedule
from squeezebox.schema import (
    FormatError,
    OptionError,
    PipelineError,
    PipelinePlan,
    UnsupportedModelError,
)

_serials = itertools.count()  # runners of a process, in the order that all ranks make them in


class Runner:
    """One rank of a pipeline that trains a model.

    All ranks make one, with the same model, plan and options, after torch.distributed.init_process_group().
    Afterwards this rank holds the weights of its own stages only: the model's other parameters are gone
    (they keep their shape, and are NaN), and the optimizer has only this rank's.

    Schedules that flush give the gradients of the same microbatches accumulated in a single process, to
    the bit where one rank holds each parameter. "2bw" is W(t+1) = W(t) - lr * g(W(t-1)), in which the
    optimizer gets gradients that are one batch late (arXiv:2006.09503); what "pipedream" reads,
    ``squeezebox.schedules.pipedream`` says.

    Args:
        model: any module that ``cut`` can part, on all ranks alike.
        plan: which blocks make which stage, and how a batch goes through them.
        optimizer: made with the model's parameters. Its groups stay, so learning-rate schedulers work.
        loss_fn: called with a microbatch's output and target; its mean over microbatches is minimised.
        clip: bound of the norm of all ranks' gradients together.
        skip_overflow: with an infinite or NaN gradient anywhere, a batch changes nothing.
        correction: of the delay of gradients in 2bw (arXiv:2606.30634), for one more buffer of weights.
        warmup: batches at the start that 2bw and pipedream flush, reading the newest weights.
        schedule: of your own, instead of the one that the plan names: for its ranks, stages and microbatches,
            and with a flush after each batch. What the plan foretells is not of it.
        wire: what activations and their gradients may lose on their way between ranks, to go in fewer bytes
            (default: nothing, and they go as they are).
        patience: seconds after which a rank that is waited for counts as failed.

    Stages run where the model's parameters are.

    Raises:
        PipelineError: ranks, plan and model do not agree, or one of them does not appear.
        OptionError: options that do not go together.
        UnsupportedModelError: the model cannot be cut.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: PipelinePlan,
        *,
        optimizer: torch.optim.Optimizer,
        loss_fn: Callable[..., Tensor],
        clip: float | None = None,
        skip_overflow: bool = False,
        correction: bool = False,
        warmup: int = 0,
        schedule: Schedule | None = None,
        wire: Wire | None = None,
        patience: float = 60.0,
    ) -> None:
        if wire is not None and device_of(model).type != "cpu":
            raise OptionError(
                f"wire= packs what crosses between CPUs; the model is on {device_of(model)}. Leave it out."
            )
        check_options(plan, clip, skip_overflow, correction, patience)
        self.plan, self._model, self._loss_fn = plan, model, loss_fn
        self._identity = f"{plan!r}, warmup={warmup}, correction={correction}"
        self._schedule = schedule_of(plan, warmup, schedule)
        self._warmup = warmup
        self._place = placed(plan)
        pieces = cut(model, example(plan, device_of(model)))
        self._store = own_store(next(_serials))
        check_stages(plan, pieces)
        agree(self._store, self._place, plan, self._schedule, pieces, wire, patience)
        placement = self._schedule.placement
        self.stages = {
            number: Stage(pieces[stage.first : stage.end], recompute=stage.policy == "recompute")
            for number, stage in enumerate(plan.stages)
            if placement[number] == self._place.rank
        }
        own, tied = shared(plan, pieces, self._place.rank, placement)
        if plan.schedule == "pipedream" and tied:
            raise OptionError(
                "weights are tied over stages, and PipeDream's stages update each on its own. Take 2bw."
            )
        self._groups = groups_of(self._place, tied, own)
        self._weights = Weights(own)
        self._weights.hand_over(optimizer)
        forget(model, [each for stage in self.stages.values() for each in stage.parameters()])
        self.optimizer = optimizer
        exchange = Exchange(
            replicas=self._groups.replicas,
            pipeline=self._groups.pipeline,
            ties=self._groups.ties,
            clip=clip,
            skip_overflow=skip_overflow,
        )
        exchange.level(self._weights.versions[0])
        self._updates = Updates(self._weights, optimizer, exchange, correction)
        self._patience = patience
        self._health = Health(self._store, self._place.number, self._place.names(placement), patience)
        self._links = Links(
            self._store,
            self._place,
            self._schedule,
            self._groups,
            self._health,
            patience,
            device_of(model),
            wire,
        )
        self._evaluation: tuple[dict[int, Stage], Links] | None = None
        self._loads, self._gathers, self._meetings = itertools.count(), itertools.count(), itertools.count()
        self._batch = 0
        self._failed = False
        self._flights: dict[tuple[int, int], Passage] = {}
        self._feed = Feed(plan, is_first=self.is_first, is_last=self.is_last)
        self._losses: list[Tensor] = []
        self._gradients: Flat | None = None
        self._settings: dict[int, Any] = {}
        self._ended_stages = 0
        self._turns = self._from(0)
        self._ahead: Action | None = None

    @property
    def replica(self) -> int:
        """Which of the plan's equal pipelines this rank is in."""
        return self._place.replica

    @property
    def is_first(self) -> bool:
        """Whether this rank takes the model's inputs."""
        return 0 in self.stages

    @property
    def is_last(self) -> bool:
        """Whether this rank has the loss."""
        return len(self.plan.stages) - 1 in self.stages

    @property
    def weights_bytes(self) -> int:
        """Bytes of all versions of this rank's weights as they are now."""
        return sum(part.nbytes for flat in self._weights.versions.values() for part in flat.parts)

    def gather(self, value: Any) -> list[Any]:
        """Everybody's plain values, in the order of ranks; every rank must call it.

        Raises:
            PipelineError: another rank failed.
        """
        with self._guarded():
            key, count = f"gather/{next(self._gathers)}", self._place.ranks * self._place.replicas
            self._store.set(f"{key}/{self._place.number}", json.dumps(value))
            told = [
                self._health.await_key(f"{key}/{number}", f"waits for what rank {number} has", number)
                for number in range(count)
            ]
            return [json.loads(each) for each in told]

    def step(self, inputs: Any = None, target: Any = None) -> Tensor | None:
        """Train on one batch, of which this rank's pipeline gets ``microbatches * microbatch`` samples.

        Args:
            inputs: a tensor or a tuple of them, batch first; other ranks than the first may leave it out.
            target: a tensor, or None for a loss of the output alone; only the last rank needs it.

        Returns:
            The batch's mean loss on the last rank, None on all others.

        Raises:
            OptionError: the batch has another size than the plan's.
            PipelineError: another rank failed; the message names it. No further step is possible.
        """
        with self._guarded():
            self._feed.take(self._batch, inputs, target)
            self._settings[self._batch] = self._updates.settings()
            self._links.expect(self.plan.microbatches)
            while not self._is_of_later_batch(action := self._next()):
                self._do(action)
            self._ahead = action
            self._reach(action.version)
            self._batch += 1
            losses, self._losses = self._losses, []
            return torch.stack(losses).sum() if losses else None

    def drain(self) -> None:
        """Finish all microbatches and updates under way: do it before evaluation and checkpoints.

        Raises:
            PipelineError: another rank failed.
        """
        if self._ahead is None:
            return
        with self._guarded():
            while self._ended_stages < self._batch * len(self.stages):
                action = self._next()
                if not self._is_of_later_batch(action, self._batch - 1):
                    self._do(action)
            self._turns, self._ahead = self._from(self._batch), None
            self._ahead = self._next()
            self._reach(self._batch)
            self._links.settle()

    def evaluate(self, inputs: Any = None, target: Any = None) -> Tensor | None:
        """The mean loss of one batch with the newest weights, in evaluation mode; trains nothing.

        Arguments, result and errors are those of :meth:`step`. What is under way is finished first.
        """
        self.drain()
        with self._guarded(), torch.no_grad(), evaluating(self._model):
            if self._evaluation is None:
                self._evaluation = self._evaluator()
            stages, links = self._evaluation
            self._feed.take(self._batch, inputs, target)
            links.expect(self.plan.microbatches)
            self._weights.select(self._weights.newest)
            first, losses = self._batch * self.plan.microbatches, []
            for number in range(first, first + self.plan.microbatches):
                for stage in stages:
                    action = Action(kind=Kind.FORWARD, stage=stage, microbatch=number)
                    passage = self._forward(action, stages, links)
                    links.release(stage, passage.received, None)
                    losses += passage.outputs if self._is_loss(action) else []
            links.settle()
            return torch.stack(losses).sum() if losses else None

    def save(self, directory: str | Path) -> None:
        """Write a checkpoint to ``directory/batch-N``, which appears when all ranks have written their part.

        It holds all versions of the weights, the optimizer's state, buffers, random states and what the wire
        still owes; what is under way is finished first. Everything goes on from there to the bit.

        Raises:
            OutputError: a file could not be written; earlier checkpoints are as they were.
            PipelineError: another rank failed.
        """
        self.drain()
        with self._guarded():
            state = {
                "batch": self._batch,
                "plan": self._identity,
                "versions": {version: flat.parts for version, flat in self._weights.versions.items()},
                "updates": self._updates.state(),
                "buffers": {number: dict(stage.named_buffers()) for number, stage in self.stages.items()},
                "random": random_states(),
                "links": self._links.state(),
            }
            write(Path(directory), self._batch, self._place.number, state, self._meet)

    def load(self, directory: str | Path, batch: int | None = None) -> int:
        """Go on from a checkpoint: the newest complete one, or that after so many batches.

        Returns:
            How many batches it has seen.

        Raises:
            FormatError: there is none, it is damaged, or it was made with another plan.
            PipelineError: another rank failed.
        """
        self.drain()
        with self._guarded():
            state = read(Path(directory), self._agreed(Path(directory), batch), self._place.number)
            if state["plan"] != self._identity:
                raise FormatError(
                    f"the checkpoint in {directory} was made with another plan, warm-up or correction. Give "
                    "the runner those that it was made with."
                )
            self._weights.restore(state["versions"])
            self._updates.restore(state["updates"])
            for number, stage in self.stages.items():
                for name, buffer in stage.named_buffers():
                    buffer.copy_(state["buffers"][number][name])
            restore_random_states(state["random"])
            self._links.restore(state.get("links", {}))
            self._batch = int(state["batch"])
            self._ended_stages = self._batch * len(self.stages)
            self._turns, self._ahead = self._from(self._batch), None
            return self._batch

    def state_dict(self) -> dict[str, Tensor]:
        """The newest weights and the buffers of this rank's stages, by their names in the model.

        All ranks' together are the model's ``state_dict()``. What is under way is finished first.
        """
        self.drain()
        self._weights.select(self._weights.newest)
        own = {id(each) for stage in self.stages.values() for each in [*stage.parameters(), *stage.buffers()]}
        return {
            name: tensor.detach().clone()
            for name, tensor in self._model.state_dict(keep_vars=True).items()
            if id(tensor) in own
        }

    def traffic(self) -> tuple[Traffic, ...]:
        """What this rank has sent to others since it was made: bytes and noise, by boundary and direction.

        Activations come first. Evaluation is not counted, nor what stages of one rank hand to each other.
        """
        return self._links.traffic()

    def _agreed(self, directory: Path, batch: int | None) -> int:
        """The batch whose checkpoint all ranks load: the first one's choice."""
        key = f"load/{next(self._loads)}"
        if self._place.number == 0:
            found = newest(directory) if batch is None else batch
            self._store.set(key, str(-1 if found is None else found))
        chosen = int(self._health.await_key(key, "waits for the first rank's choice of a checkpoint", 0))
        if chosen < 0:
            raise FormatError(f"there is no complete checkpoint in {directory}. Name the right directory.")
        return chosen

    def _meet(self, what: str) -> None:
        """Wait for all ranks to come here."""
        number, everybody = self._place.number, self._place.ranks * self._place.replicas
        key = f"meet/{next(self._meetings)}"
        self._store.set(f"{key}/{number}", "")
        for each in range(everybody):
            self._health.await_key(f"{key}/{each}", f"waits until rank {each} has {what}", each)

    def _evaluator(self) -> tuple[dict[int, Stage], Links]:
        """Stages in evaluation mode, of the same parameters and buffers, and their connections."""
        pieces = cut(self._model, example(self.plan, device_of(self._model)))
        stages = {
            number: Stage(pieces[stage.first : stage.end], recompute=False)
            for number, stage in enumerate(self.plan.stages)
            if number in self.stages
        }
        for number, stage in stages.items():
            if {*map(id, stage.parameters())} != {*map(id, self.stages[number].parameters())}:
                raise UnsupportedModelError(
                    f"in evaluation mode the model's graph is cut elsewhere than in training, at stage "
                    f"{number}, so ranks lack weights. Put all ranks' state_dict() together, and evaluate in "
                    "one process."
                )
        return stages, self._links.again("evaluation")

    def close(self) -> None:
        """End this runner's threads, when what it sent has arrived; what it was waiting for is left."""
        if not self._failed:
            self._links.close()
        self._updates.stop()
        self._health.stop()

    def _guarded(self) -> Any:
        if self._failed:
            raise PipelineError(
                "this runner has failed and cannot go on. Start all ranks anew from the last checkpoint."
            )
        self._failed = True  # until the guard is left without an error
        self._health.works("begins")
        return self._health.guard(self._groups.all(), self._succeed)

    def _succeed(self) -> None:
        self._failed = False

    def _awaited(self, outcome: Future[Result]) -> Result:
        """What the ranks have told each other of a batch's gradients."""
        self._health.waits("waits for the other ranks' gradients", self._place.number)
        try:
            result = outcome.result(self._patience)
        except FutureTimeout as error:  # another class than TimeoutError in Python 3.10
            raise TimeoutError(f"nothing came within {self._patience:.0f} s") from error
        self._health.resumes()
        return result

    def _from(self, batch: int) -> Iterator[Action]:
        assert self._schedule.turns is not None
        return self._schedule.turns(self._place.rank, batch)

    def _next(self) -> Action:
        action, self._ahead = self._ahead or next(self._turns), None
        return action

    def _is_of_later_batch(self, action: Action, batch: int | None = None) -> bool:
        return self._schedule.batch_of(action) > (self._batch if batch is None else batch)

    def _do(self, action: Action) -> None:
        self._health.works(f"works at {action}")
        if action.kind is Kind.UPDATE:
            self._end_stage(action.microbatch)
            return
        key = action.stage, action.microbatch
        if action.kind is Kind.FORWARD:
            self._reach(action.version)
            self._weights.select(action.version)
            self._flights[key] = passage = self._forward(action, self.stages, self._links)
            if self._is_loss(action):
                self._losses += (loss.detach() for loss in passage.outputs)
            return
        passage = self._flights[key]
        if action.kind is not Kind.WEIGHT and not self._is_loss(action):
            passage.gradients = self._links.receive_gradients(*key)
        self._backward(action, passage)
        if action.kind is not Kind.INPUT:
            del self._flights[key]
            self._links.release(action.stage, passage.received, passage.gradients)

    def _is_loss(self, action: Action) -> bool:
        return action.stage == len(self.plan.stages) - 1

    def _forward(self, action: Action, stages: dict[int, Stage], links: Links) -> Passage:
        stage, number = action.stage, action.microbatch
        if stage == 0:
            buffers: list[Tensor] = []
            leaves = list(self._feed.inputs.pop(number))
        else:
            buffers, leaves = links.receive(stage, number)
        if self._is_loss(action):
            loss_of = functools.partial(self._loss_of, self._feed.targets.pop(number, None))
            return Passage(action.version, buffers, leaves, [*stages[stage](*leaves, loss_of=loss_of)])
        outputs = stages[stage](*leaves)
        links.send(stage, number, apart(outputs, buffers))
        kept = [output for output in outputs if output.requires_grad]
        return Passage(action.version, buffers, leaves, kept)

    def _loss_of(self, target: Any, *outputs: Any) -> Tensor:
        output = outputs[0] if len(outputs) == 1 else outputs
        loss = self._loss_fn(output) if target is None else self._loss_fn(output, target)
        return loss / self.plan.microbatches

    def _backward(self, action: Action, passage: Passage) -> None:
        self._weights.select(action.version)  # autograd noted the parameters, not their values
        if self._gradients is None:
            self._gradients = self._updates.gradients()
            self._weights.accumulate_into(self._gradients)
        weights = [each for each in self.stages[action.stage].parameters() if each.requires_grad]
        if action.kind is Kind.WEIGHT:
            passage.backward_to_weights(weights)
            return
        if action.kind is Kind.BACKWARD:
            results = passage.backward()
        else:
            results = passage.backward_to_inputs(weights)
        if action.stage:
            returned = apart(results, passage.gradients or [])
            self._links.send_gradients(action.stage, action.microbatch, returned)

    def _end_stage(self, batch: int) -> None:
        """A stage's gradients of a batch are complete; with those of all stages, its update is queued."""
        self._ended_stages += 1
        if self._ended_stages % len(self.stages) == 0:
            assert self._gradients is not None
            late = self._schedule.name == "2bw" and batch > self._warmup
            self._updates.queue(self._gradients, self._settings.pop(batch), late=late)
            self._gradients = None

    def _reach(self, version: int) -> None:
        """Have this version made; older ones stay as long as they are still to be read."""
        if self._weights.newest >= version:
            return
        oldest = min([version, *(each.version for each in self._flights.values())])
        if self._ahead is not None:
            oldest = min(oldest, self._ahead.version)
        self._updates.reach(version, oldest, self._awaited)

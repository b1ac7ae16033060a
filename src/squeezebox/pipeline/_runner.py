"""The runner: a rank of a pipeline, put together."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from squeezebox.memory import freed_returned
from squeezebox.pipeline._checkpoint import has, is_there, newest, write
from squeezebox.pipeline._construction import Construction
from squeezebox.pipeline._cut import cut, without_piece
from squeezebox.pipeline._data import Channel, Feed, Reader, batches_of
from squeezebox.pipeline._health import Assembly, Health, Refused
from squeezebox.pipeline._initial import Initial
from squeezebox.pipeline._links import Links, Wires
from squeezebox.pipeline._packing import Wire
from squeezebox.pipeline._setup import (
    agree,
    check_optimizer,
    check_options,
    check_shards,
    check_stages,
    device_of,
    example,
    groups_of,
    keywords,
    placed,
    schedule_of,
    shared,
)
from squeezebox.pipeline._shards import Shards, check_elements
from squeezebox.pipeline._stage import Stage, evaluating
from squeezebox.pipeline._state import State
from squeezebox.pipeline._store import own_store
from squeezebox.pipeline._torch import TorchPasses, TorchTraining, engine_of, joined_by, require_suited
from squeezebox.pipeline._training import Forwards, Training, Turns
from squeezebox.pipeline._updates import Exchange, Updates, issues_in_order, level
from squeezebox.pipeline._weights import Weights, forget, require_known
from squeezebox.pipeline._wire import Traffic
from squeezebox.schedules import Schedule, Sharing
from squeezebox.schema import FormatError, OptionError, OutputError, PipelinePlan

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
        vertical_sync: all stages of pipedream read the version that the first one reads, for an input.
        shard: the replicas of a plan keep a part of weights, gradients and the optimizer's state each
            (default: as the plan says). They gather a stage's weights when they come to it, and scatter its
            gradients when they leave: in "breadth-first" once a batch (arXiv:2211.05953). The optimizer must
            step each element by itself; only a plan looks whether it is known to.
        schedule: of your own, instead of the one that the plan names: for its ranks, stages and microbatches,
            and with a flush after each batch. The plan's predictions are not of it.
        wire: what activations and their gradients may lose on their way between ranks, to go in fewer bytes
            (default: nothing, and they go as they are).
        patience: seconds after which a rank that is waited for counts as failed.
        engine: whose loop makes the passes: this package's "own", or "torch" for that of
            torch.distributed.pipelining, which flushes after each batch and packs nothing. Both give the same
            to the bit. Default: "torch" on CUDA where the schedule flushes, else "own".
        device: of a model on the meta device: where stages run (default: this process's CUDA device, or the
            CPU). Stages of any other model run where its parameters are.
        construction: in which a model on the meta device was constructed. Without it, values are those that
            the modules' own ``reset_parameters()`` give, children first.
        weights: a safetensors file, or a folder of them, to read parameters from by their names; buffers
            too where they are there.

    Of a model on the meta device, a rank makes or reads the values of its own stages only, one tensor after
    the other: so the whole model may be larger than any rank's memory.

    Raises:
        PipelineError: ranks, plan and model do not agree, or one of them does not appear.
        OptionError: options that do not go together.
        FormatError: ``weights`` cannot be read, or are of another model.
        UnsupportedModelError: the model cannot be cut, or nothing says what a tensor begins with.
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
        vertical_sync: bool = False,
        shard: bool | None = None,
        schedule: Schedule | None = None,
        wire: Wire | None = None,
        patience: float = 60.0,
        engine: str | None = None,
        device: torch.device | None = None,
        construction: Construction | None = None,
        weights: str | Path | None = None,
    ) -> None:
        check_options(plan, clip, skip_overflow, correction, patience)
        check_optimizer(optimizer)
        if plan.shard if shard is None else shard:
            check_elements(optimizer, is_asked=bool(shard))
        shard = plan.shard if shard is None else shard
        plan = dataclasses.replace(plan, shard=shard)
        path = None if weights is None else Path(weights)
        initial = Initial(model, device=device, construction=construction, weights=path)
        if wire is not None and device_of(model).type != "cpu":
            raise OptionError(
                f"wire= packs what crosses between CPUs; the model is on {device_of(model)}. Leave it out."
            )
        self.engine = engine_of(plan, device_of(model), wire, engine)
        self.plan, self._model = plan, model
        order = schedule_of(plan, warmup, schedule, vertical_sync=vertical_sync)
        if self.engine == "torch":
            require_suited(plan, order, wire)
        self._place = place = placed(plan)
        pieces = cut(model, example(plan, device_of(model)), keywords(plan))
        store = own_store(next(_serials), patience)
        check_stages(plan, pieces)
        require_known(model, optimizer)
        agree(store, place, plan, order, pieces, wire, self.engine, patience)
        self._health = Health(store, place.number, place.names(order), patience, (), device_of(model))
        with self._health.guard():
            self.stages = {
                number: Stage(pieces[stage.first : stage.end], recompute=stage.policy == "recompute")
                for number, stage in enumerate(plan.stages)
                if place.rank in order.ranks_of(number)
            }
            own, tied = shared(plan, pieces, place.rank, order)
            if plan.schedule == "pipedream" and tied:
                raise OptionError(
                    "weights are tied over stages, and PipeDream's stages update each on its own. Take 2bw."
                )
            trained = {
                number: [each for each in stage.parameters() if each.requires_grad]
                for number, stage in self.stages.items()
            }
            if shard:
                is_tied = bool(tied) or sum(map(len, trained.values())) > len(own)
                check_shards(plan, self.engine, is_tied)
            self._health.waits("waits for all ranks to connect", place.number)
            groups = groups_of(place, order, tied, own, patience, shard=shard)
            joined = [joined_by(place, patience)] if self.engine == "torch" else []
            self._health.connected([*groups.all(), *joined])
            self._health.works("begins")
            known = {id(parameter): name for name, parameter in model.named_parameters()}
            held = [each for stage in self.stages.values() for each in stage.parameters()]
            spare = without_piece(model, pieces) if self.is_first else []
            initial.require([*held, *spare], known)
            optimized = [
                [known[id(each)] for each in group["params"] if id(each) in known]
                for group in optimizer.param_groups
            ]
            self._weights: Weights | Shards
            if shard:
                assert groups.replicas is not None
                options = initial.of, groups.replicas, self._health, patience
                with freed_returned():  # what the model took before
                    self._weights = Shards(trained, known, *options)
            else:
                self._weights = Weights(own, known, initial.of)
            kept = self._weights.kept if isinstance(self._weights, Shards) else self._weights
            self._weights.hand_over(optimizer)
            initial.fill([*(each for each in held if not each.requires_grad), *spare])
            forget(model, [*held, *spare])
            self.optimizer = optimizer
            turns_taken = order.ranks_of(next(iter(self.stages)))
            exchange = Exchange(
                replicas=None if shard else groups.replicas,
                pipeline=groups.pipeline,
                ties=groups.ties,
                clip=clip,
                skip_overflow=skip_overflow,
                averaged=not order.replicas or plan.schedule == "pipedream",
                in_turn=len(turns_taken),
                counted=place.rank == turns_taken[0],
            )
            self._health.waits("waits for all ranks' first weights", place.number)
            exchange.level(kept.versions[0])
            if groups.replicas is not None:
                buffers = [each for stage in self.stages.values() for each in stage.buffers()]
                level([each for each in held if not each.requires_grad] + spare + buffers, groups.replicas)
            self._health.works("begins")
            in_order = issues_in_order(device_of(model))
            self._updates = Updates(kept, optimizer, optimized, exchange, correction, in_order=in_order)
            self._assembly = Assembly(store, self._health, place.number, place.ranks * place.replicas)
            wires = Wires(place, order, groups, self._health, patience, device_of(model), wire)
            self._links = Links(store, place, order, self._health, wires)
            self._reader, self._is_in_pass = Reader(), False
            self._state = State(
                model=model,
                plan=plan,
                place=place,
                stages=self.stages,
                spare=spare,
                weights=kept,
                shards=self._weights if isinstance(self._weights, Shards) else None,
                updates=self._updates,
                reader=self._reader,
                wires=wires,
            )
            self._channel = Channel(
                wires.peers(is_reading=self.reads),
                groups.readers,
                self._health,
                patience,
                targeted=[place.of(rank) for rank in order.ranks_of(len(plan.stages) - 1)],
            )
            self._feed = Feed(
                plan,
                self._channel,
                device_of(model),
                order,
                place,
                takes_less=self.engine == "own" and not (order.replicas and plan.schedule == "pipedream"),
            )
            self._evaluation: Forwards | TorchPasses | None = None
            self._training: Training | TorchTraining
            self._forwards = forwards = Forwards(
                plan,
                model,
                self.stages,
                self._links,
                self._feed,
                loss_fn,
                plan.microbatch,
                lambda stage: self._weights.select(self._weights.newest, stage),
            )
            if self.engine == "torch":
                make = functools.partial(
                    TorchPasses,
                    plan,
                    order,
                    place,
                    self._feed,
                    forwards.loss_of,
                    joined[0],
                    store,
                    self._health,
                )
                self._training = TorchTraining(make, self.stages, kept, self._updates, self._health)
                return
            late_from = warmup + 1 if order.name == "2bw" else None
            turns = Turns(order, place.rank)
            self._training = Training(turns, forwards, self._weights, self._updates, self._health, late_from)

    @property
    def replica(self) -> int:
        """Which of the plan's equal pipelines this rank is in."""
        return self._place.replica

    @property
    def reads(self) -> bool:
        """Whether this rank reads its pipeline's batches: the first one does."""
        return self._place.rank == 0

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
        with self._health.guard():
            return self._assembly.gather(value)

    def step(self, inputs: Any = None, target: Any = None) -> Tensor | None:
        """Train on one batch, of which a pipeline gets at most ``microbatches * microbatch`` samples.

        Args:
            inputs: a tensor, a tuple of them, or a dict by the model's keywords, batch first. The first
                rank's count, and go through the stages; other ranks may leave them out.
            target: a tensor, or a tuple or dict of them, batch first, or None for a loss of the output alone.
                The first rank's counts, and travels to the last. Where that is given one too, both must be
                equal.

        Returns:
            The batch's mean loss on the rank of the last stage, None on all others. Its replicas have that of
            their own microbatches.

        Raises:
            OptionError: the batch has more samples than the plan's, or other forms. All ranks raise it before
                anything is computed, and can go on with another batch.
            UnsupportedModelError: for so few samples, or in :meth:`evaluate`, the model's graph is cut
                elsewhere. All ranks raise it, and can go on.
            PipelineError: another rank failed; the message names it. No further step is possible.
        """
        with self._health.guard():
            self._take(inputs, target)
            self._forwards.prepare(self._training.batch, self._assembly)
            return self._training.step()

    def read(
        self, batches: Iterable[Any] | None = None, *, last: bool = False, evaluates: bool = False
    ) -> Iterator[Any]:
        """Go over batches that the first rank reads; every rank must, and gives each one to :meth:`step`.

        Their order depends on the random states in which the runner was made, not on what stages draw for
        dropout. :meth:`save` notes how many were read, and after :meth:`load` the next pass begins
        behind them. That holds for a DataLoader that shuffles, with workers, or with a generator of its own.

        Args:
            batches: tuples ``(inputs, target)``, such as a DataLoader yields; only the first rank's count.
            last: no other pass comes after this one. Where :meth:`save` follows its end, the next pass after
                :meth:`load` has nothing left to read.
            evaluates: batches are for :meth:`evaluate`. Such a pass may come within another one, and neither
                :meth:`save` nor :meth:`load` counts it.

        Yields:
            What was read on the first rank, ``()`` on all others.

        Raises:
            PipelineError: another rank failed.
            OptionError: the first rank was given nothing, replicas read different numbers of batches, or
                another pass is under way.
        """
        if self._is_in_pass and not evaluates:
            raise OptionError(
                "a pass of read() is under way, and a checkpoint notes the place in one. End that first, or "
                "read what you evaluate with evaluates=True."
            )
        self._is_in_pass |= not evaluates
        reader = Reader() if evaluates else self._reader
        found = batches_of(reader, self._channel, batches, reads=self.reads, last=last)
        try:
            while True:
                with self._health.guard():
                    try:
                        batch = next(found)
                    except StopIteration as end:
                        if end.value:
                            raise Refused(OptionError(end.value)) from None
                        return
                yield batch
        finally:
            self._is_in_pass &= evaluates

    def drain(self) -> None:
        """Finish all microbatches and updates under way: do it before evaluation and checkpoints.

        Raises:
            PipelineError: another rank failed.
        """
        with self._health.guard():
            self._training.drain()

    def evaluate(self, inputs: Any = None, target: Any = None) -> Tensor | None:
        """The mean loss of one batch with the newest weights, in evaluation mode; trains nothing.

        Arguments, result and errors are those of :meth:`step`. What is under way is finished first.
        """
        self.drain()
        with self._health.guard(), torch.no_grad(), evaluating(self._model):
            self._take(inputs, target)  # first: other ranks may still wait for the batch
            if self._evaluation is None:
                self._evaluation = self._training.evaluation(self._model, self._assembly)
            self._evaluation.prepare(self._training.batch, self._assembly)
            self._weights.select(self._weights.newest, next(iter(self.stages)))
            loss = self._evaluation.of_batch(self._training.batch)
            self._weights.leave()
            return loss

    def _take(self, inputs: Any, target: Any) -> None:
        """Part a batch; Refused if it is not as the plan has it."""
        refused = self._feed.take(self._training.batch, inputs, target)
        if refused:
            raise Refused(OptionError(refused))

    def save(self, directory: str | Path) -> None:
        """Write a checkpoint to ``directory/batch-N``, which appears when all ranks have written their part.

        It is one of torch.distributed.checkpoint, by the names of parameters: the model's and the optimizer's
        state, earlier versions of the weights, random states, where :meth:`read` is, and what the wire still
        owes. What is under way is finished first. Everything goes on from there to the bit.

        Raises:
            OutputError: a file could not be written; earlier checkpoints are as they were. If this one is
                there already, all ranks raise it and can go on.
            PipelineError: another rank failed.
        """
        self.drain()
        with self._health.guard():
            if isinstance(self._weights, Weights):
                self._weights.select(self._weights.newest)
            batch = self._training.batch
            refused = is_there(Path(directory), batch, self._assembly)
            if refused:
                raise Refused(OutputError(refused))
            write(Path(directory), batch, self._place.number, self._state.saved(batch), self._assembly)

    def load(self, directory: str | Path, batch: int | None = None) -> int:
        """Go on from the newest checkpoint that is complete for all ranks, or from the one after ``batch``.

        It may have been saved by another split, schedule or number of ranks. Then a
        :class:`~squeezebox.schema.PipelineWarning` says what training goes on without, such as random states.

        Returns:
            How many batches it has seen.

        Raises:
            FormatError: there is none, it is damaged, or it is of another model or optimizer. All ranks raise
                it before anything is changed, and can go on.
            PipelineError: another rank failed.
        """
        self.drain()
        with self._health.guard():
            chosen, refused = self._agreed(Path(directory), batch)
            if refused:
                raise Refused(FormatError(refused))
            self._state.restore(Path(directory), chosen, self._training.restart)
            return chosen

    def state_dict(self) -> dict[str, Tensor]:
        """The newest weights and the buffers of this rank's stages, by their names in the model.

        All ranks' together are the model's ``state_dict()``. What is under way is finished first.
        """
        self.drain()
        found: dict[str, Tensor] = {}
        with self._health.guard():
            for stage in self.stages:
                self._weights.select(self._weights.newest, stage)
                own = self._state.persistent([stage])
                found |= {name: tensor.clone() for name, tensor in own.items()}
            self._weights.leave()
        return found

    def traffic(self) -> tuple[Traffic, ...]:
        """What this rank has sent to others since it was made: bytes and noise, by boundary and direction.

        Activations come first. Evaluation is not counted, nor what stages of one rank hand to each other.
        """
        return self._training.traffic()

    def sharing(self) -> Sharing | None:
        """How often this rank has gathered and scattered stages with ``shard``, and the bytes that came."""
        return self._weights.shared() if isinstance(self._weights, Shards) else None

    def _agreed(self, directory: Path, batch: int | None) -> tuple[int, str]:
        """The batch whose checkpoint all ranks load, and why none of them does; "" if they do."""
        chosen = newest(directory, self._assembly) if batch is None else batch
        lacking = [] if chosen is None else self._assembly.gather(has(directory, chosen))
        if chosen is None or not all(lacking):
            whose = f" for rank {lacking.index(False)}" if lacking else ""
            return 0, f"there is no complete checkpoint in {directory}{whose}. Name the right directory."
        refusals = self._assembly.gather(self._state.refusal(directory, chosen))
        first = next((number for number, why in enumerate(refusals) if why), None)
        if first is None:
            return chosen, ""
        return chosen, refusals[self._place.number] or f"rank {first}: {refusals[first]}"

    def close(self) -> None:
        """End this runner's threads, when what it sent has arrived; what it was waiting for is left."""
        if not self._health.failed:
            self._links.close()
            with contextlib.suppress(RuntimeError):  # the other end is gone
                self._channel.settle()
        self._updates.stop()
        self._health.stop()

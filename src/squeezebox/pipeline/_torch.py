"""torch.distributed.pipelining's runtime as an engine: it makes all passes and sends all messages.

Stages, orders and updates are this package's. All that it uses of that runtime's private names is here.
"""

from __future__ import annotations

import contextlib
import functools
import pickle
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, schedules

from squeezebox.pipeline._data import Feed
from squeezebox.pipeline._health import Assembly, Health
from squeezebox.pipeline._packing import Wire
from squeezebox.pipeline._setup import Place, device_of, example
from squeezebox.pipeline._stage import Alias, Stage, buffers_of
from squeezebox.pipeline._store import PatientStore
from squeezebox.pipeline._training import stages_again
from squeezebox.pipeline._updates import Updates
from squeezebox.pipeline._weights import Weights
from squeezebox.pipeline._wire import Form, Traffic
from squeezebox.schedules import Kind, Schedule, published
from squeezebox.schema import OptionError, PipelinePlan

_FORWARDS = (
    schedules._ComputationType.FORWARD,
    schedules._ComputationType.SEND_F,
    schedules._ComputationType.RECV_F,
)


def engine_of(plan: PipelinePlan, device: torch.device, wire: Wire | None, wanted: str | None) -> str:
    """The one that is wanted; by default torch's on CUDA, where it can carry the plan out.

    Raises:
        OptionError: there is no such engine.
    """
    if wanted not in (None, "own", "torch"):
        raise OptionError(f"engine={wanted!r} is neither 'own' nor 'torch'. Leave it out to have one chosen.")
    suited = published(plan.schedule).flushes and wire is None and not plan.shard
    return wanted or ("torch" if device.type == "cuda" and suited else "own")


def require_suited(plan: PipelinePlan, schedule: Schedule, wire: Wire | None) -> None:
    """Refuse what torch's runtime has no place for.

    Raises:
        OptionError: says what that is.
    """
    if wire is not None:
        raise OptionError("wire= packs what crosses, and engine='torch' sends all as it is. Leave one out.")
    if not plan.inputs:
        raise OptionError("engine='torch' needs to know the forms of inputs: give the plan its inputs=.")
    if not published(plan.schedule).flushes:
        raise OptionError(
            f"engine='torch' has one version of the weights, and '{plan.schedule}' reads earlier ones. Leave "
            "engine= out, or take a schedule that flushes, such as 1f1b."
        )
    last = schedule.num_stages - 1
    losses = [
        action.microbatch
        for action in schedule.orders[schedule.placement[last]]
        if action.stage == last and action.kind is Kind.FORWARD
    ]
    if losses != sorted(losses):
        raise OptionError(
            f"engine='torch' knows losses by their order, and '{schedule.name}' begins with microbatch "
            f"{losses[0]} on the last stage. Leave engine= out, or take the microbatches in order there."
        )


def joined_by(place: Place, patience: float) -> dist.ProcessGroup:
    """The group of this pipeline's ranks, with ``patience`` for messages; all processes must call it."""
    groups: list[dist.ProcessGroup] = [
        dist.new_group(
            [replica * place.ranks + rank for rank in range(place.ranks)], timeout=timedelta(seconds=patience)
        )
        for replica in range(place.replicas)
    ]
    return groups[place.replica]


class _Module(nn.Module):
    """A stage whose outputs can be sent as they are and detached in place."""

    def __init__(self, stage: Stage) -> None:
        super().__init__()
        self.stage = stage

    def forward(self, *inputs: Tensor, **options: Any) -> tuple[Any, ...]:
        outputs = self.stage(*inputs, **options)
        leaves = [each for each in inputs if each.requires_grad]
        hung = [(each.contiguous(), *(leaves if each.requires_grad else ())) for each in outputs]
        return tuple(Alias.apply(*each) for each in hung)  # type: ignore[no-untyped-call]


class _Stage(PipelineStage):
    """Tells what it works at, and otherwise that it waits; counts what it sends."""

    def __init__(self, *arguments: Any, health: Health, rank: int, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._health, self._rank = health, rank
        self.sent_bytes = Counter[bool]()

    def forward_one_chunk(
        self,
        fwd_chunk_id: int,
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None = None,
        save_forward_output: bool = True,
    ) -> Any:
        own = kwargs if self.is_last else None  # they are given to all stages of a rank
        with self._working(f"{self.stage_index}F{fwd_chunk_id}"):
            return super().forward_one_chunk(fwd_chunk_id, args, own, save_forward_output)

    def backward_one_chunk(self, bwd_chunk_id: int, *arguments: Any, **options: Any) -> None:
        with self._working(f"{self.stage_index}B{bwd_chunk_id}"):
            super().backward_one_chunk(bwd_chunk_id, *arguments, **options)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        with self._working(f"{self.stage_index}W{bwd_chunk_id}"):
            super().backward_weight_one_chunk(bwd_chunk_id, last_backward)

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        return self._counted(super().get_fwd_send_ops(fwd_chunk_id), back=False)

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        return self._counted(super().get_bwd_send_ops(bwd_chunk_id), back=True)

    def _counted(self, messages: list[dist.P2POp], *, back: bool) -> list[dist.P2POp]:
        for each in messages:
            each.tensor = each.tensor.contiguous()
            self.sent_bytes[back] += each.tensor.nbytes
        return messages

    @contextlib.contextmanager
    def _working(self, what: str) -> Iterator[None]:
        """What is raised here is the stage's own error; outside of it, another rank's."""
        self._health.works(f"works at {what}")
        try:
            yield
        except RuntimeError as error:
            raise error.__cause__ or error from None  # torch's wrapping has it as its cause
        self._health.waits("waits for a message", self._rank)


class TorchPasses:
    """All passes of a batch through a rank's ``stages``, by torch's runtime.

    ``group`` has the pipeline's ranks, ``purpose`` names these passes in the store. In evaluation there are
    forwards only. Making it runs each stage but the last once, on zeros, to learn the forms of its outputs.
    """

    def __init__(
        self,
        plan: PipelinePlan,
        schedule: Schedule,
        place: Place,
        feed: Feed,
        loss_of: Callable[..., Tensor],
        group: dist.ProcessGroup,
        store: PatientStore,
        health: Health,
        stages: Mapping[int, Stage],
        purpose: str,
    ) -> None:
        self.plan, self._feed, self._loss_of = plan, feed, loss_of
        self._health, self._place, self._placement = health, place, schedule.placement
        self._trains = torch.is_grad_enabled()
        self._stages = [
            self._staged(number, stage, group, store, f"torch/{purpose}/{place.replica}")
            for number, stage in stages.items()
        ]
        self._runtime = schedules._PipelineScheduleRuntime(
            self._stages,
            plan.microbatches,
            loss_fn=(lambda outputs, _: outputs[0]) if self._trains else None,
            scale_grads=False,
        )
        lines = schedule.to_csv().splitlines()
        order = {
            rank: [schedules._Action.from_str(cell) for cell in line.split(",")]
            for rank, line in enumerate(lines)
        }
        self._runtime._prepare_schedule_with_comms(order)
        self._runtime.rank = place.rank  # the schedule's ranks may be in processes of other numbers
        for each in self._stages:
            each.stage_index_to_group_rank = {
                number: place.processes[rank] for number, rank in enumerate(schedule.placement)
            }
        if not self._trains:
            orders = self._runtime.pipeline_order_with_comms
            for rank, own in orders.items():
                orders[rank] = [action for action in own if action.computation_type in _FORWARDS]

    def run(self, batch: int) -> list[Tensor]:
        """All of a batch: the microbatches' losses where the last stage is."""
        numbers = range(batch * self.plan.microbatches, (batch + 1) * self.plan.microbatches)
        is_first, is_last = self._stages[0].is_first, self._stages[-1].is_last
        inputs = [self._feed.inputs.pop(number) if is_first else () for number in numbers]
        options: list[dict[str, Any]] = [{} for _ in numbers]
        if is_last:
            targets = [self._feed.targets.pop(number) for number in numbers]
            options = [
                {"loss_of": functools.partial(self._loss_of, number, target)}
                for number, target in zip(numbers, targets, strict=True)
            ]
        for stage in self._stages:
            stage.has_backward = self._trains
            stage.clear_runtime_states()
        self._health.waits("waits for a message", self._place.number)
        self._runtime._step_microbatches(inputs, options, [None] * len(numbers) if is_last else None)
        losses = [outputs[0].detach() for outputs in self._stages[-1].output_chunks]
        for stage in self._stages:
            stage.clear_runtime_states()
        self._health.works("ends a batch")
        return losses

    def prepare(self, batch: int, assembly: Assembly) -> None:
        """Nothing, as all microbatches are of one size."""

    def of_batch(self, batch: int) -> Tensor | None:
        """A batch's mean loss where the last stage is."""
        losses = self.run(batch)
        return torch.stack(losses).sum() if losses else None

    def traffic(self) -> tuple[Traffic, ...]:
        """What was sent so far."""
        return tuple(
            Traffic(boundary=stage.stage_index - back, back=back, plain_bytes=sent, sent_bytes=sent)
            for back in (False, True)
            for stage in self._stages
            if (sent := stage.sent_bytes[back])
        )

    def _staged(
        self, number: int, stage: Stage, group: dist.ProcessGroup, store: PatientStore, key: str
    ) -> _Stage:
        device = device_of(stage)
        if number:
            rank = self._place.of(self._placement[number - 1])
            what = f"waits for rank {rank} to tell the form of its outputs"
            forms: list[Form] = pickle.loads(self._health.await_key(f"{key}/{number - 1}", what, rank))
            given = [form.empty(device).zero_().requires_grad_(form.requires_grad) for form in forms]
        else:
            given = [*example(self.plan, device)]
        returned = [torch.zeros((), device="meta", requires_grad=self._trains)]
        if number + 1 < len(self.plan.stages):
            returned = _tried(stage, given)
            told = [Form(tuple(each.shape), each.dtype, each.requires_grad) for each in returned]
            store.set(f"{key}/{number}", pickle.dumps(told))
        return _Stage(
            _Module(stage),
            number,
            len(self.plan.stages),
            device,
            input_args=tuple(_formed(each) for each in given),
            output_args=tuple(_formed(each) for each in returned),
            group=group,
            health=self._health,
            rank=self._place.number,
        )


def _formed(tensor: Tensor) -> Tensor:
    """One of that form without values."""
    form = Form(tuple(tensor.shape), tensor.dtype, tensor.requires_grad)
    return form.empty(torch.device("meta")).requires_grad_(tensor.requires_grad)


def _tried(stage: Stage, inputs: list[Tensor]) -> list[Tensor]:
    """What a stage returns; its buffers and all random numbers are as before."""
    buffers = buffers_of(stage)
    devices = [device_of(stage)] if device_of(stage).type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        outputs = [*stage(*inputs)]
    for buffer in buffers:
        buffer.put_back()
    return outputs


class TorchTraining:
    """What a rank does to train, where torch's runtime makes all passes; the updates are the runner's.

    ``make`` makes :class:`TorchPasses` of stages, for a purpose.
    """

    def __init__(
        self,
        make: Callable[[Mapping[int, Stage], str], TorchPasses],
        stages: Mapping[int, Stage],
        weights: Weights,
        updates: Updates,
        health: Health,
    ) -> None:
        self._make, self._stages = make, stages
        self._weights, self._updates, self._health = weights, updates, health
        self._passes = make(stages, "training")
        self.batch = 0
        """Batches begun so far."""

    def step(self) -> Tensor | None:
        """Train on a batch: its mean loss on the last rank."""
        settings = self._updates.settings()
        self._weights.select(self._weights.newest)
        gradients = self._updates.gradients()
        self._weights.accumulate_into(gradients)
        loss = self._passes.of_batch(self.batch)
        self._updates.queue(gradients, settings, late=False)
        self.batch += 1
        self._updates.reach(self.batch, self.batch, self._health.await_outcome)
        return loss

    def drain(self) -> None:
        """Nothing is under way between two batches."""

    def restart(self, batch: int) -> range:
        """Go on after ``batch`` batches; returns the version of the weights that will be read."""
        self.batch = batch
        return range(batch, batch + 1)

    def evaluation(self, model: nn.Module, assembly: Assembly) -> TorchPasses:
        """The passes of a batch in evaluation mode; Refused if a rank lacks weights for them."""
        plan = self._passes.plan
        options = plan, self._stages, model, plan.microbatch, "evaluation mode"
        return self._make(assembly.make(lambda: stages_again(*options)), "evaluation")

    def traffic(self) -> tuple[Traffic, ...]:
        """What was sent in training so far."""
        return self._passes.traffic()

"""Before the first step: which ranks there are, what each holds, and whether all agree."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import math
import os
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.distributed_c10d import PrefixStore, _set_pg_timeout, default_pg_timeout
from torch.distributed.rendezvous import rendezvous

from squeezebox import schedules
from squeezebox.pipeline._cut import Piece, fingerprint
from squeezebox.pipeline._packing import Wire
from squeezebox.pipeline._store import PatientStore
from squeezebox.pipeline._updates import Tie
from squeezebox.schedules import Schedule, line_name
from squeezebox.schema import OptionError, PipelineError, PipelinePlan, in_one_line

T = TypeVar("T")


def schedule_of(
    plan: PipelinePlan, warmup: int = 0, own: Schedule | None = None, *, vertical_sync: bool = False
) -> Schedule:
    """The schedule that a plan names, with batches enough to fill the pipeline; or one of the caller's own.

    Raises:
        OptionError: there is none of that name, or it does not go with the plan's numbers.
        PlanError: the caller's own is not whole, or does not flush after each batch.
    """
    if own is not None:
        if warmup or vertical_sync:
            raise OptionError(
                f"warmup={warmup} and vertical_sync={vertical_sync} are for the plan's schedule, and "
                "schedule= is one of your own. Leave them out."
            )
        return _own_schedule(plan, own)
    row, replicas = schedules.published(plan.schedule), plan.stage_replicas
    if replicas and plan.replicas > 1:
        raise OptionError(
            f"the plan has {plan.replicas} pipelines and {list(replicas)} replicas of stages. Take one "
            "pipeline with more replicas of each stage."
        )
    loops, rest = (1, 0) if replicas else divmod(len(plan.stages), plan.ranks)
    if rest or (loops > 1 and not row.loops):
        raise OptionError(
            f"the plan has {len(plan.stages)} stages for {plan.ranks} ranks: '{plan.schedule}' takes "
            f"{'a multiple of the ranks' if rest and loops else 'one for each rank'}. Cut the model so."
        )
    least = math.lcm(*replicas)
    if plan.schedule == "pipedream" and plan.microbatches != least:
        shared = f" ({least} is the least that {list(replicas)} replicas share evenly)" if replicas else ""
        raise OptionError(
            f"PipeDream updates after every microbatch, and the plan has {plan.microbatches} in a batch. "
            f"Give it {least}{shared}, or take 2bw, which updates once a batch."
        )
    return schedules.make(
        plan.schedule,
        plan.ranks,
        plan.microbatches,
        loops=loops,
        batches=warmup + (1 if row.flushes else plan.ranks),
        warmup=warmup,
        replicas=replicas,
        vertical_sync=vertical_sync,
    )


def _own_schedule(plan: PipelinePlan, own: Schedule) -> Schedule:
    found = own.num_ranks, own.num_stages, own.microbatches
    wanted = plan.ranks, len(plan.stages), plan.microbatches
    if found != wanted or not schedules.published(plan.schedule).flushes:
        raise OptionError(
            f"schedule '{own.name}' is for {found[0]} ranks, {found[1]} stages and {found[2]} microbatches, "
            f"and the plan for {wanted[0]}, {wanted[1]} and {wanted[2]}, by {plan.schedule}. Both need the "
            "same numbers, and a plan whose schedule flushes after each batch."
        )
    if own.placement[0]:
        raise OptionError(
            f"schedule '{own.name}' has the first stage at rank {own.placement[0]}, and the runner reads "
            "batches at rank 0. Number the ranks so that it is there."
        )
    return schedules.repeated(own)


def check_shards(plan: PipelinePlan, engine: str, is_tied: bool) -> None:
    """Refuse what replicas cannot share.

    Raises:
        OptionError: says what that is.
    """
    if plan.replicas < 2 or not schedules.published(plan.schedule).flushes:
        raise OptionError(
            f"shard=True parts weights over equal pipelines that flush, and the plan has {plan.replicas}, by "
            f"{plan.schedule}. Plan for more, by breadth-first, or leave it out."
        )
    if engine == "torch" or is_tied:
        what = "weights are tied over stages" if is_tied else "engine='torch' makes the passes"
        raise OptionError(f"{what}, and shard=True needs all of a stage to itself. Leave it out.")


def check_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Refuse one that a runner cannot step.

    Raises:
        OptionError: says why.
    """
    if isinstance(optimizer, torch.optim.LBFGS | torch.optim.SparseAdam):
        raise OptionError(
            f"{type(optimizer).__name__} needs sparse gradients or a closure, and a pipeline's gradients are "
            "dense and its updates call nothing. Take another optimizer, such as AdamW."
        )


def check_options(
    plan: PipelinePlan, clip: float | None, skip_overflow: bool, correction: bool, patience: float
) -> None:
    """Refuse options that are out of range or do not go with the schedule.

    Raises:
        OptionError: says which, and what to do.
    """
    if clip is not None and not clip > 0.0:
        raise OptionError(
            f"clip={clip}: a bound of the gradients' norm must be above 0. Leave it out for none."
        )
    if not 0.0 < patience < math.inf:
        raise OptionError(
            f"patience={patience}: a rank must be waited for, and not without end. Give seconds above 0."
        )
    if plan.schedule == "pipedream" and (clip is not None or skip_overflow):
        raise OptionError(
            "PipeDream's stages update each on its own, so clip= and skip_overflow= cannot be exact with it. "
            "Take 2bw, or leave them out."
        )
    if correction and plan.schedule != "2bw":
        raise OptionError(
            f"correction=True is for gradients that are one batch late, and those of '{plan.schedule}' are "
            "not. Leave it out, or take 2bw."
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Where this process stands: its rank in its pipeline, and which of the equal pipelines that is.

    ``processes`` are those of each pipeline's ranks, by their place among the pipeline's.
    """

    rank: int
    replica: int
    ranks: int
    replicas: int
    processes: tuple[int, ...]

    @property
    def number(self) -> int:
        """Its rank among all processes."""
        return self.of(self.rank)

    def of(self, rank: int) -> int:
        """The number of another rank of this pipeline among all processes."""
        return self.replica * self.ranks + self.processes[rank]

    def names(self, schedule: Schedule) -> list[str]:
        """What each process holds, in words."""
        names = []
        for replica in range(self.replicas):
            for process in range(self.ranks):
                rank = self.processes.index(process)
                own = schedule.stages_of(rank)
                name = f"stage{'s' * (len(own) > 1)} {', '.join(map(str, own))}"
                ranks = schedule.ranks_of(own[0])
                if len(ranks) > 1:
                    name = f"{name}, replica {ranks.index(rank)}"
                names.append(name if self.replicas == 1 else f"{name} of replica {replica}")
        return names


def join() -> None:
    """Join the process group that torchrun tells of, over nccl where there is CUDA, else over gloo.

    Raises:
        PipelineError: this process was not started by torchrun, or does not reach the others.
    """
    if not dist.is_torchelastic_launched():
        raise PipelineError(
            "this process was not started by torchrun, which tells ranks of each other. Start it so: "
            "torchrun --nproc-per-node RANKS -m squeezebox.cli pipeline train PLAN ..."
        )
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    try:
        store, rank, size = next(rendezvous("env://"))
        # torchrun's store outlives a restart, with the addresses of processes that have ended.
        own = PrefixStore(f"attempt-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
        dist.init_process_group(backend, store=own, rank=rank, world_size=size)
    except RuntimeError as error:
        raise PipelineError(
            f"this rank does not reach the others over {backend}: {in_one_line(error)}. Between "
            f"machines, name the network that joins them, on each: {backend.upper()}_SOCKET_IFNAME=eth0 "
            "torchrun ..."
        ) from error


def told_by_all(value: T) -> list[T]:
    """Each process's plain value, in their order; all processes must call it."""
    told: list[T] = [value] * dist.get_world_size()
    dist.all_gather_object(told, value)
    return told


def own_device() -> torch.device:
    """The CUDA device of this process's number on its machine, or the CPU."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", dist.get_node_local_rank(0))
    torch.cuda.set_device(device)
    return device


def is_first_process() -> bool:
    """Whether this is the process with rank 0."""
    return dist.get_rank() == 0


def placed(plan: PipelinePlan) -> Place:
    """This process's place.

    Raises:
        PipelineError: torch.distributed is not set up, or has another number of processes than the plan.
    """
    if not dist.is_initialized():
        raise PipelineError(
            "torch.distributed has no process group. Start with torchrun and call "
            "torch.distributed.init_process_group() before the runner is made."
        )
    world = dist.get_world_size()
    if world != plan.ranks * plan.replicas:
        raise PipelineError(
            f"the plan is for {plan.ranks} ranks x {plan.replicas} replicas = {plan.ranks * plan.replicas} "
            f"processes, and {world} run. Start that number (torchrun --nproc-per-node), or plan for {world}."
        )
    processes = plan.processes or tuple(range(plan.ranks))
    if sorted(processes) != [*range(plan.ranks)]:
        raise PipelineError(
            f"the plan has ranks in processes {[*processes]}, and {plan.ranks} run in each pipeline: each "
            "must have one rank. Make a new plan."
        )
    replica, process = divmod(dist.get_rank(), plan.ranks)
    return Place(
        rank=processes.index(process),
        replica=replica,
        ranks=plan.ranks,
        replicas=plan.replicas,
        processes=processes,
    )


def agree(
    store: PatientStore,
    place: Place,
    plan: PipelinePlan,
    schedule: Schedule,
    pieces: Sequence[Piece],
    wire: Wire | None,
    engine: str,
    patience: float,
) -> None:
    """Refuse to start unless all ranks have the same plan, schedule, model, wire, engine and torch.

    Raises:
        PipelineError: names the rank that differs and in what.
    """
    mine = {
        "plan": json.dumps(dataclasses.asdict(plan), sort_keys=True),
        "schedule": f"{schedule.name} {zlib.crc32(repr(schedule.orders).encode()):08x}",
        "model": fingerprint(pieces),
        "wire": repr(wire),
        "engine": engine,
        "torch": torch.__version__,
    }
    store.set(f"hello/{place.number}", json.dumps(mine))
    for number in range(place.ranks * place.replicas):
        try:
            store.wait([f"hello/{number}"], timedelta(seconds=patience))
            theirs = json.loads(store.get(f"hello/{number}"))
        except RuntimeError as error:
            raise PipelineError(
                f"rank {number} did not appear within {patience:.0f} s. Look at what it printed."
            ) from error
        for what in (what for what in mine if mine[what] != theirs[what]):
            raise PipelineError(
                f"rank {number} has another {what} than rank {place.number}"
                f"{'' if what == 'plan' else f' ({theirs[what]}, not {mine[what]})'}: start all ranks from "
                "the same files."
            )
    if plan.fingerprint and plan.fingerprint != mine["model"]:
        raise PipelineError(
            f"the plan was made for a model of fingerprint {plan.fingerprint}, and this one has "
            f"{mine['model']}: names, shapes or dtypes of parameters differ. Make a new plan."
        )


def check_stages(plan: PipelinePlan, pieces: Sequence[Piece]) -> None:
    """Refuse stages that are not all of the model's pieces in their order.

    Raises:
        PipelineError: says which blocks come twice, or not at all.
    """
    end = 0
    for number, stage in enumerate(plan.stages):
        if stage.first != end or stage.end <= stage.first:
            raise PipelineError(
                f"stage {number} of the plan has blocks {stage.first} to {stage.end}, and the one before "
                f"ends with {end}: each block must be in one stage. Make a new plan."
            )
        end = stage.end
    if end != len(pieces):
        raise PipelineError(
            f"the plan's stages have {end} blocks, and the model has {len(pieces)}. Make a new plan."
        )


def shared(
    plan: PipelinePlan, pieces: Sequence[Piece], rank: int, schedule: Schedule
) -> tuple[list[nn.Parameter], list[tuple[nn.Parameter, list[int]]]]:
    """A rank's trained parameters, and those that stages of several ranks hold, with all of these ranks."""
    holders: dict[nn.Parameter, set[range]] = {}
    for number, stage in enumerate(plan.stages):
        for piece in pieces[stage.first : stage.end]:
            for parameter in piece.module.parameters():
                ranks = holders.setdefault(parameter, set())
                if parameter.requires_grad:
                    ranks.add(schedule.ranks_of(number))
    own = [parameter for parameter, ranks in holders.items() if any(rank in each for each in ranks)]
    tied = [
        (parameter, sorted(itertools.chain(*ranks))) for parameter, ranks in holders.items() if len(ranks) > 1
    ]
    return own, tied


class Line(NamedTuple):
    """Between two ranks of a pipeline at a boundary: for activations or, ``back``, for their gradients."""

    boundary: int
    before: int
    after: int
    back: bool

    def __str__(self) -> str:
        return line_name(*self)


@dataclass(frozen=True, kw_only=True, slots=True)
class Groups:
    """Process groups of a runner's own; None where there would be but one rank, or this one is not in it.

    ``lines`` have the two ranks at a boundary each, one for each direction: messages on a line are issued in
    one order at both ends, as communicators need it that run them in the order of issue (NCCL's).
    ``pipeline`` has those whose gradients have one norm. ``words`` joins a pipeline's ranks, and ``readers``
    those that read batches, both between CPUs.
    """

    lines: Mapping[Line, dist.ProcessGroup]
    pipeline: dist.ProcessGroup | None
    replicas: dist.ProcessGroup | None
    words: dist.ProcessGroup | None
    readers: dist.ProcessGroup | None
    ties: tuple[Tie, ...]

    def all(self) -> list[dist.ProcessGroup]:
        """Every one of them that this rank is in."""
        ties = [tie.group for tie in self.ties]
        own = (self.pipeline, self.replicas, self.words, self.readers)
        return [each for each in (*self.lines.values(), *own, *ties) if each]


def groups_of(
    place: Place,
    schedule: Schedule,
    tied: Sequence[tuple[nn.Parameter, Sequence[int]]],
    own: Sequence[nn.Parameter],
    patience: float,
    *,
    shard: bool = False,
) -> Groups:
    """Make all groups; every process must call it, as each group is made by all of them.

    Args:
        place: this process's.
        schedule: says which ranks hold a stage.
        tied: parameters that several ranks of a pipeline hold, and those ranks.
        own: this rank's parameters.
        patience: seconds for which this waits for a process.
        shard: replicas keep parts, so that a norm is of all processes'.
    """
    _group = functools.partial(_made, timeout=timedelta(seconds=patience))
    everybody = list(range(place.ranks * place.replicas))
    pipelines = [everybody[first : first + place.ranks] for first in everybody[:: place.ranks]]
    readers = _group(everybody[place.processes[0] :: place.ranks], "gloo")
    if schedule.replicas:
        replicas = [
            [place.processes[rank] for rank in schedule.ranks_of(stage)]
            for stage in range(schedule.num_stages)
        ]
    else:
        replicas = [everybody[process :: place.ranks] for process in range(place.ranks)]
    lines = {}
    for line, pipeline in itertools.product(_lines(schedule), pipelines):
        pair = [pipeline[place.processes[rank]] for rank in (line.before, line.after)]
        made_line = _group(pair, name=str(line))
        if made_line is not None and place.number in pair:
            lines[line] = made_line
    ties = []
    for parameter, ranks in tied:
        made = [_group([pipeline[place.processes[rank]] for rank in ranks]) for pipeline in pipelines]
        group = made[place.replica]
        if place.rank in ranks and group is not None:
            number = next(number for number, each in enumerate(own) if each is parameter)
            ties.append(Tie(place=number, group=group, counted=place.rank == min(ranks)))
    return Groups(
        lines=lines,
        pipeline=_group(everybody) if shard else [_group(each) for each in pipelines][place.replica],
        replicas=next(
            group for group, ranks in [(_group(each), each) for each in replicas] if place.number in ranks
        ),
        words=[_group(each, "gloo") for each in pipelines][place.replica],
        readers=readers if place.rank == 0 else None,
        ties=tuple(ties),
    )


def _lines(schedule: Schedule) -> list[Line]:
    """All there are between stages of two ranks, in an order that is the same on all."""
    found = []
    for boundary in range(schedule.num_stages - 1):
        turns = math.lcm(len(schedule.ranks_of(boundary)), len(schedule.ranks_of(boundary + 1)))
        pairs = {
            (schedule.rank_of(boundary, number), schedule.rank_of(boundary + 1, number))
            for number in range(turns)
        }
        found += [
            Line(boundary, before, after, back)
            for before, after in sorted(pairs)
            if before != after
            for back in (False, True)
        ]
    return found


def _made(
    ranks: list[int], backend: str | None = None, *, timeout: timedelta, name: str | None = None
) -> dist.ProcessGroup | None:
    """A group that waits for so long while it is made; later its users count the seconds themselves."""
    if len(ranks) < 2:
        return None
    group: dist.ProcessGroup = dist.new_group(ranks, backend=backend, timeout=timeout, group_desc=name)
    if dist.get_rank() in ranks:
        _set_pg_timeout(default_pg_timeout, group)
    return group


def example(plan: PipelinePlan, device: torch.device) -> tuple[Tensor, ...]:
    """One microbatch's inputs, all zero."""
    return tuple(
        torch.zeros((plan.microbatch, *form.shape), dtype=getattr(torch, form.dtype), device=device)
        for form in plan.inputs
    )


def keywords(plan: PipelinePlan) -> tuple[str, ...]:
    """By which the model takes its inputs."""
    return tuple(form.name for form in plan.inputs)


def device_of(model: nn.Module) -> torch.device:
    """Where a model's parameters are."""
    return next((parameter.device for parameter in model.parameters()), torch.device("cpu"))

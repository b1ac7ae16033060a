"""Plans for several ranks: what every block of a model costs, and which of them make a stage."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from squeezebox import pipeline, planner, profiling
from squeezebox.pipeline import Piece
from squeezebox.schedules import Costs, simulate
from squeezebox.schema import (
    Block,
    Holding,
    InputForm,
    Link,
    OptionError,
    PipelinePlan,
    PipelineProfile,
)
from squeezebox.session._attach import attach
from squeezebox.session._models import device_of
from squeezebox.session._samples import LossFunction, batch_of, check_sample, resize
from squeezebox.session._session import Session

_BEST = 12  # plans that are simulated, of those that are fastest by the closed forms
_SCHEDULES = ("gpipe", "one_f_one_b", "interleaved", "breadth_first")
_SETTLING = 24  # steps after which bounds have followed what they measured
DEFAULT_NOISE = 1e-3


def plan_pipeline(
    model: torch.nn.Module,
    *,
    sample: tuple[Any, Any],
    loss_fn: LossFunction,
    ranks: int,
    memory_bytes: int,
    optimizer: torch.optim.Optimizer | None = None,
    microbatches: Sequence[int] | None = None,
    schedules: Sequence[str] = _SCHEDULES,
    policies: Sequence[str] = ("keep", "recompute"),
    noise: float = DEFAULT_NOISE,
    depths: Sequence[int] | None = None,
    link: Link | None = None,
    on_progress: Callable[[int, int, str], None] | None = None,
) -> list[PipelinePlan]:
    """Measure a model's blocks here, and say how a batch would go through so many ranks the fastest.

    Runs a few microbatches of each size, in this process and with all of its threads.

    Args:
        model: any module that ``squeezebox.pipeline.cut`` can part.
        sample: (inputs, target) of a whole batch; inputs are a tensor or a tuple of them, batch first.
        loss_fn: called with output and target.
        ranks: of all replicas together.
        memory_bytes: what one rank may hold.
        optimizer: for the size of its state.
        microbatches: sizes to try (default: powers of two, up to a batch parted once for each rank).
        schedules: names of functions of squeezebox.schedules. "two_bw" and "pipedream" only if named, as they
            train with gradients of earlier weights; "zero_bubble" too, as what it holds between the two
            parts of backward is not foretold.
        policies: of "keep", "recompute" and "compress"; the last one only if named, as it loses accuracy.
        noise: what "compress" allows, as in ``attach``.
        depths: ranks of one pipeline to try (default: all divisors of ``ranks``).
        link: between ranks (default: measured between two processes here).
        on_progress: called with (done, total, note).

    Returns:
        All plans that fit, the fastest first.

    Raises:
        OptionError: an argument is out of range.
        BudgetError: nothing fits; names the least memory that something would.
        UnsupportedModelError: the model cannot be cut.
    """
    (inputs, target), loss_fn = check_sample(sample, loss_fn)
    inputs = inputs if isinstance(inputs, tuple) else (inputs,)
    batch = batch_of((inputs, target))
    sizes = _sizes(microbatches, batch, ranks)
    profiles, pieces = [], list[Piece]()
    for done, size in enumerate(sizes):
        if on_progress is not None:
            on_progress(done, len(sizes), f"microbatches of {size}")
        part = resize((inputs, target), batch, size)
        pieces = pipeline.cut(model, part[0])
        profiles.append(_profile(model, pieces, part, loss_fn, size, optimizer, policies, noise))
    link = link or pipeline.measure_link()
    plans = planner.plan_pipeline(
        profiles,
        batch=batch,
        ranks=ranks,
        memory_bytes=memory_bytes,
        link=link,
        schedules=schedules,
        policies=policies,
        depths=depths,
    )
    by_size = {profile.microbatch: profile for profile in profiles}
    best = [_simulated(plan, by_size[plan.microbatch], link) for plan in plans[:_BEST]]
    best.sort(key=lambda plan: plan.seconds)
    return [
        dataclasses.replace(
            plan,
            inputs=tuple(
                InputForm(shape=tuple(each.shape[1:]), dtype=str(each.dtype).removeprefix("torch."))
                for each in inputs
            ),
            noise=noise if "compress" in policies else 0.0,
            fingerprint=pipeline.fingerprint(pieces),
            blocks=tuple(piece.name for piece in pieces),
        )
        for plan in [*best, *plans[_BEST:]]
    ]


def attach_stages(runner: pipeline.Runner) -> list[Session]:
    """Attach to those of a rank's stages that the plan wants compressed, each with its share of the noise."""
    packed = [number for number, stage in enumerate(runner.plan.stages) if stage.policy == "compress"]
    return [
        attach(stage, noise=runner.plan.noise / len(packed))
        for number, stage in runner.stages.items()
        if number in packed
    ]


def peak_meter(stages: Iterable[torch.nn.Module]) -> profiling.PeakMeter:
    """A meter for the memory of a rank's stages."""
    return profiling.PeakMeter(device_of(next(iter(stages))))


def _sizes(microbatches: Sequence[int] | None, batch: int, ranks: int) -> list[int]:
    if batch < 1:
        raise OptionError("the sample's inputs have no rows; give a whole batch, batch first.")
    if microbatches is None:
        most = max(batch // max(ranks, 1), 1)
        microbatches = [
            size for size in (2**power for power in range(most.bit_length())) if batch % size == 0
        ]
    wrong = [size for size in microbatches if not 1 <= size <= batch]
    if wrong or not microbatches:
        raise OptionError(f"microbatches {list(microbatches)}: give sizes from 1 to the batch of {batch}.")
    return list(microbatches)


def _profile(
    model: torch.nn.Module,
    pieces: Sequence[Piece],
    sample: tuple[Any, Any],
    loss_fn: LossFunction,
    size: int,
    optimizer: torch.optim.Optimizer | None,
    policies: Sequence[str],
    noise: float,
) -> PipelineProfile:
    inputs, target = sample
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]

    def loss_of(outputs: tuple[Any, ...]) -> torch.Tensor:
        return loss_fn(outputs[0] if len(outputs) == 1 else outputs, target)

    costs = {}
    for policy in policies:
        parts = [_recomputed(piece) if policy == "recompute" else piece.module for piece in pieces]
        with _packed(pieces, parts, inputs, loss_of, noise) if policy == "compress" else _plainly() as around:
            costs[policy] = profiling.measure_parts(
                parts, inputs, loss_of, trained, device=device_of(model), around=around
            )
    share = _state_share(model, optimizer)
    blocks = []
    for number, piece in enumerate(pieces):
        own = [each for each in piece.module.parameters() if each.requires_grad]
        nbytes = sum(each.nbytes for each in own)
        frozen = sum(each.nbytes for each in piece.module.parameters()) - nbytes  # there once, in any case
        holdings = {policy: each[number] for policy, each in costs.items()}
        blocks.append(
            Block(
                name=piece.name,
                parameter_bytes=nbytes,
                state_bytes=int(share * nbytes) + frozen,
                output_bytes=next(iter(holdings.values())).output_bytes,
                holdings=tuple(
                    Holding(
                        policy=policy,
                        saved_bytes=each.saved_bytes,
                        working_bytes=each.working_bytes,
                        forward_seconds=each.forward_seconds,
                        backward_seconds=each.backward_seconds,
                    )
                    for policy, each in holdings.items()
                ),
            )
        )
    return PipelineProfile(microbatch=size, blocks=tuple(blocks))


def _recomputed(piece: Piece) -> Callable[..., tuple[Any, ...]]:
    def run(*inputs: Any) -> tuple[Any, ...]:
        outputs: tuple[Any, ...] = checkpoint(piece.module, *inputs, use_reentrant=False)
        return outputs

    return run


@contextlib.contextmanager
def _plainly() -> Iterator[Callable[[], AbstractContextManager[object]]]:
    yield contextlib.nullcontext


@contextlib.contextmanager
def _packed(
    pieces: Sequence[Piece],
    parts: Sequence[Any],
    inputs: tuple[Any, ...],
    loss_of: Callable[[tuple[Any, ...]], torch.Tensor],
    noise: float,
) -> Iterator[Callable[[], AbstractContextManager[object]]]:
    """A session over all pieces, after a few steps in which its bounds settle."""
    whole = torch.nn.ModuleList(piece.module for piece in pieces)
    session = attach(whole, noise=noise)
    try:
        for _ in range(_SETTLING):
            with session.step():
                values = inputs
                for part in parts:
                    values = part(*values)
                loss = loss_of(values)
            loss.backward()
        whole.zero_grad()
        yield session.step
    finally:
        session.detach()


def _state_share(model: torch.nn.Module, optimizer: torch.optim.Optimizer | None) -> float:
    """Bytes of optimizer state for each byte of trained parameters."""
    trained = sum(each.nbytes for each in model.parameters() if each.requires_grad)
    return profiling.state_bytes(model, optimizer) / trained if trained else 0.0


def _simulated(plan: PipelinePlan, profile: PipelineProfile, link: Link) -> PipelinePlan:
    """The plan with the seconds of its schedule run on paper, its uneven stages included.

    Schedules without a flush keep theirs, which are those of the slowest stage.
    """
    if plan.schedule in pipeline.FLOWING:
        return plan
    ends = [profile.blocks[stage.end - 1].output_bytes for stage in plan.stages[:-1]]
    costs = Costs(
        forward=tuple(stage.forward_seconds for stage in plan.stages),
        backward=tuple(stage.backward_seconds for stage in plan.stages),
        transfer=max((link.seconds(nbytes) for nbytes in ends), default=0.0),
    )
    seconds = simulate(pipeline.schedule_of(plan), costs).seconds
    parameters = (
        sum(block.parameter_bytes for block in profile.blocks[stage.first : stage.end])
        for stage in plan.stages
    )
    seconds += planner.all_reduce_seconds(max(parameters), plan.replicas, link)
    return dataclasses.replace(plan, seconds=seconds)

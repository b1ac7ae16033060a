"""What a model's blocks cost one by one, and what a plan's stages cost as wholes."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from squeezebox import profiling
from squeezebox.bounds import Planned
from squeezebox.pipeline import Initial, Passage, Piece, Stage
from squeezebox.planning._attach import attach
from squeezebox.planning._places import Equal, Unequal
from squeezebox.schedules import PUBLISHED
from squeezebox.schema import Block, Holding, PipelinePlan, PipelineProfile
from squeezebox.session import begin
from squeezebox.steps import TrainingStep, device_of

_SETTLING = 24  # steps after which bounds have followed what they measured
_CALIBRATIONS = 4


def measure_together(stages: Stages, policies: Sequence[str]) -> Stages:
    """The same with a profile of its pieces: all are run after one another, and back.

    Args:
        stages: their profile has no blocks yet.
        policies: "keep", "compress" and "recompute", or some of them.
    """
    pieces, microbatch = stages.pieces, stages.microbatch
    costs, whole = {}, together(pieces)
    for policy in policies:
        parts = [_recomputed(piece) if policy == "recompute" else piece.module for piece in pieces]
        plainly = contextlib.nullcontext(contextlib.nullcontext)
        with _packed(pieces, stages.bounds) if policy == "compress" else plainly as around:
            costs[policy] = profiling.measure_parts(
                parts,
                microbatch.sample[0],
                lambda outputs: microbatch.loss_of(*outputs),
                [each for each in whole.parameters() if each.requires_grad],
                device=device_of(whole),
                around=around,
            )
    holdings = [
        tuple(_block_holding(policy, each[number]) for policy, each in costs.items())
        for number in range(len(pieces))
    ]
    return _profiled(stages, [each.output_bytes for each in next(iter(costs.values()))], holdings)


def measure_alone(stages: Stages, policies: Sequence[str]) -> Stages:
    """The same with each piece run by itself, so that only one at a time needs its parameters' values."""
    returned = stages.inputs()[1:]
    outputs = [sum(each.nbytes for each in values if isinstance(each, Tensor)) for values in returned]
    holdings = [
        tuple(stages.measure(number, number + 1, policy, is_split=False) for policy in policies)
        for number in range(len(stages.pieces))
    ]
    return _profiled(stages, outputs, holdings)


def _profiled(stages: Stages, outputs: Sequence[int], holdings: Sequence[tuple[Holding, ...]]) -> Stages:
    blocks = tuple(
        map(
            functools.partial(block_of, stages.state_share),
            ([each] for each in stages.pieces),
            outputs,
            holdings,
        )
    )
    return dataclasses.replace(stages, profile=dataclasses.replace(stages.profile, blocks=blocks))


def block_of(
    state_share: float, pieces: Sequence[Piece], output_bytes: int, holdings: tuple[Holding, ...]
) -> Block:
    """Pieces as one block, which costs so much."""
    parameters = [*together(pieces).parameters()]
    nbytes = sum(each.nbytes for each in parameters if each.requires_grad)
    return Block(
        name=pieces[0].name,
        parameter_bytes=nbytes,
        state_bytes=int(state_share * nbytes),
        output_bytes=output_bytes,
        holdings=holdings,
        frozen_bytes=sum(each.nbytes for each in parameters) - nbytes,
    )


def state_share(model: torch.nn.Module, optimizer: torch.optim.Optimizer | None) -> float:
    """Bytes of optimizer state for each byte of trained parameters."""
    trained = sum(each.nbytes for each in model.parameters() if each.requires_grad)
    return profiling.state_bytes(model, optimizer) / trained if trained else 0.0


def bounds_of(pieces: Sequence[Piece], microbatch: TrainingStep, noise: float) -> Mapping[str, float]:
    """Bounds of what all pieces save, by tensor, that keep the microbatch's gradients within the noise.

    A session over all pieces weighs them against one another, whatever the stages will be.
    """
    whole = together(pieces)
    session = attach(whole, noise=noise)

    def step() -> None:
        with session.step():
            values = microbatch.sample[0]
            for piece in pieces:
                values = piece.module(*values)
            loss = microbatch.loss_of(*values)
        loss.backward()

    try:
        for _ in range(_SETTLING):
            step()
        for _ in range(_CALIBRATIONS):
            if session.calibrate(step) <= noise:
                break
        return dict(session.state_dict()["controller"]["bounds"])  # type: ignore[index]
    finally:
        session.detach()


def together(pieces: Sequence[Piece]) -> torch.nn.ModuleList:
    """Pieces as one module."""
    return torch.nn.ModuleList(piece.module for piece in pieces)


def _block_holding(policy: str, costs: profiling.PartCosts) -> Holding:
    return Holding(
        policy=policy,
        saved_bytes=costs.saved_bytes,
        working_bytes=costs.working_bytes,
        forward_seconds=costs.forward_seconds,
        backward_seconds=costs.backward_seconds,
    )


def _recomputed(piece: Piece) -> Callable[..., tuple[Any, ...]]:
    def run(*inputs: Any) -> tuple[Any, ...]:
        outputs: tuple[Any, ...] = checkpoint(piece.module, *inputs, use_reentrant=False)
        return outputs

    return run


@contextlib.contextmanager
def _packed(
    pieces: Sequence[Piece], bounds: Mapping[str, float]
) -> Iterator[Callable[[], AbstractContextManager[object]]]:
    """All pieces packed within these bounds."""
    engine = begin(together(pieces), None, Planned(bounds=bounds), overlapping=True)
    try:
        yield engine.framed
    finally:
        engine.detach()


_FORWARD, _BACKWARD, _WEIGHTS, _END = range(4)
_REPEATS = 3


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Stages:
    """Measures plans' stages with microbatches of one size, each only once.

    Bytes of blocks do not add up to a stage's where these hold less than they were given (what is packed, or
    recomputed), nor where backward is in two parts; so the best plans of the blocks are measured as stages.
    """

    profile: PipelineProfile
    pieces: Sequence[Piece]
    initial: Initial
    microbatch: TrainingStep
    bounds: Mapping[str, float]
    state_share: float
    _known: dict[Any, Holding] = field(default_factory=dict)
    _given: list[tuple[Any, ...]] = field(default_factory=list)

    def measured(self, plan: PipelinePlan, where: Equal | Unequal) -> PipelinePlan:
        """The plan with its stages' own seconds and bytes, and the bounds of those that compress."""
        is_split = PUBLISHED[plan.schedule].splits
        blocks = tuple(
            block_of(
                self.state_share,
                self.pieces[stage.first : stage.end],
                self.profile.blocks[stage.end - 1].output_bytes,
                (self.measure(stage.first, stage.end, stage.policy, is_split=is_split),),
            )
            for stage in plan.stages
        )
        found = where.again(plan, PipelineProfile(microbatch=plan.microbatch, blocks=blocks))
        stages = [
            dataclasses.replace(
                new,
                first=old.first,
                end=old.end,
                bounds=self._bounds(old.first, old.end) if old.policy == "compress" else {},
            )
            for new, old in zip(found.stages, plan.stages, strict=True)
        ]
        return dataclasses.replace(found, stages=tuple(stages))

    def with_pending(self) -> Stages:
        """The same, where blocks know what they hold between two parts of backward."""
        blocks = []
        for number, block in enumerate(self.profile.blocks):
            each = [self.measure(number, number + 1, own.policy, is_split=True) for own in block.holdings]
            holdings = tuple(
                dataclasses.replace(own, pending_bytes=found.pending_bytes)
                for own, found in zip(block.holdings, each, strict=True)
            )
            blocks.append(dataclasses.replace(block, holdings=holdings))
        return dataclasses.replace(self, profile=dataclasses.replace(self.profile, blocks=tuple(blocks)))

    def measure(self, first: int, end: int, policy: str, *, is_split: bool) -> Holding:
        """A stage of these pieces."""
        key = first, end, policy, is_split
        if key not in self._known:
            given = self.inputs()[first]
            with self.initial.filled(together(self.pieces[first:end])):
                self._known[key] = measure_stage(
                    self.pieces[first:end],
                    given,
                    policy=policy,
                    loss_of=self.microbatch.loss_of if end == len(self.pieces) else None,
                    bounds=self._bounds(first, end) if policy == "compress" else {},
                    is_split=is_split,
                )
        return self._known[key]

    def inputs(self) -> list[tuple[Any, ...]]:
        """Of every piece, without a graph, and at the end what the last one returns."""
        if not self._given:
            self._given.append(self.microbatch.sample[0])
            for piece in self.pieces:
                with self.initial.filled(piece.module):
                    self._given.append(tuple(map(_apart, piece.module(*self._given[-1]))))
        return self._given

    def _bounds(self, first: int, end: int) -> Mapping[str, float]:
        """Those of a stage's blocks, or of the loss, by their keys in a session of the stage alone."""
        own = {}
        for key, bound in self.bounds.items():
            block, rest = re.fullmatch(r"(\d*)(.*)", key, re.DOTALL).groups()  # type: ignore[union-attr]
            if not block:
                own[key] = bound
            elif first <= int(block) < end:
                own[f"pieces.{int(block) - first}{rest}"] = bound
        return own


def measure_stage(
    pieces: Sequence[Piece],
    inputs: tuple[Any, ...],
    *,
    policy: str,
    loss_of: Callable[..., Tensor] | None,
    bounds: Mapping[str, float],
    is_split: bool,
) -> Holding:
    """Take a microbatch through a stage and back, again and again.

    Args:
        pieces: of the stage.
        inputs: what the stage before hands on, without a graph; those that have gradients say so.
        policy: "keep", "compress" or "recompute".
        loss_of: makes the loss of what the model's last stage returns.
        bounds: of "compress", by tensor.
        is_split: whether backward is taken in two parts.

    Raises:
        CaptureError: another profiler is running.
    """
    stage = Stage(pieces, recompute=policy == "recompute")
    weights = [each for each in stage.parameters() if each.requires_grad]
    before = [each.grad for each in weights]
    received: list[Tensor] = []

    def run(mark: Callable[[int], None]) -> None:
        mark(_FORWARD)
        leaves = [*map(_apart, inputs)]
        outputs = [each for each in stage(*leaves, loss_of=loss_of) if each.requires_grad]
        mark(_BACKWARD)
        if not received:  # as a rank has them, in buffers that stay
            received.extend(map(torch.ones_like, outputs))
        passage = Passage(0, [], leaves, outputs, received if loss_of is None else None)
        del leaves, outputs
        if is_split:
            passage.backward_to_inputs(weights)
            mark(_WEIGHTS)
            passage.backward_to_weights(weights)
        else:
            passage.backward()
        del passage
        mark(_END)

    engine = begin(stage, None, Planned(bounds=bounds), overlapping=True) if policy == "compress" else None
    try:
        for weight in weights:
            weight.grad = torch.zeros_like(weight)
        marks = profiling.measure_marks(run, _END, device_of(stage), _REPEATS)
    finally:
        if engine is not None:
            engine.detach()
        for weight, gradient in zip(weights, before, strict=True):
            weight.grad = gradient
    return _holding(policy, marks, is_split)


def _holding(policy: str, marks: profiling.Marks, is_split: bool) -> Holding:
    start, held, pending, _ = marks.live
    pending = pending if is_split else held
    after = (held, max(held, pending), pending)  # forward, backward, and the second part of that
    most = max(highest - own for highest, own in zip(marks.highest, after, strict=False))
    return Holding(
        policy=policy,
        saved_bytes=held - start,
        working_bytes=max(most, 0),
        forward_seconds=marks.seconds[_FORWARD],
        backward_seconds=sum(marks.seconds[_BACKWARD:]),
        pending_bytes=pending - held,
    )


def _apart(value: Any) -> Any:
    """The same values without their graph."""
    return value.detach().requires_grad_(value.requires_grad) if isinstance(value, Tensor) else value

"""What every block of a model costs, held in each way that a pipeline's stage may hold it."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from squeezebox import profiling
from squeezebox.bounds import Planned
from squeezebox.pipeline import Piece
from squeezebox.planning._attach import attach
from squeezebox.schema import Block, Holding, PipelineProfile
from squeezebox.session import begin
from squeezebox.steps import TrainingStep, device_of

_SETTLING = 24  # steps after which bounds have followed what they measured
_CALIBRATIONS = 4


def measure_blocks(
    pieces: Sequence[Piece],
    microbatch: TrainingStep,
    *,
    size: int,
    state_share: float,
    policies: Sequence[str],
    bounds: Mapping[str, float],
) -> PipelineProfile:
    """Run all pieces after one another, in each way to hold what they save.

    Args:
        pieces: of the model.
        microbatch: of ``size`` samples.
        size: samples of it.
        state_share: bytes of optimizer state for each byte of trained parameters.
        policies: of "keep", "compress" and "recompute".
        bounds: of "compress", by tensor, from :func:`bounds_of`.
    """
    costs, whole = {}, together(pieces)
    for policy in policies:
        parts = [_recomputed(piece) if policy == "recompute" else piece.module for piece in pieces]
        plainly = contextlib.nullcontext(contextlib.nullcontext)
        with _packed(pieces, bounds) if policy == "compress" else plainly as around:
            costs[policy] = profiling.measure_parts(
                parts,
                microbatch.inputs,
                lambda outputs: microbatch.loss_of(*outputs),
                [each for each in whole.parameters() if each.requires_grad],
                device=device_of(whole),
                around=around,
            )
    holdings = [
        tuple(_holding(policy, each[number]) for policy, each in costs.items())
        for number in range(len(pieces))
    ]
    outputs = [each.output_bytes for each in next(iter(costs.values()))]
    blocks = map(functools.partial(block_of, state_share), ([piece] for piece in pieces), outputs, holdings)
    return PipelineProfile(microbatch=size, blocks=tuple(blocks))


def block_of(
    state_share: float, pieces: Sequence[Piece], output_bytes: int, holdings: tuple[Holding, ...]
) -> Block:
    """Pieces as one block, which costs so much."""
    parameters = [*together(pieces).parameters()]
    nbytes = sum(each.nbytes for each in parameters if each.requires_grad)
    frozen = sum(each.nbytes for each in parameters) - nbytes  # there once, in any case
    return Block(
        name=pieces[0].name,
        parameter_bytes=nbytes,
        state_bytes=int(state_share * nbytes) + frozen,
        output_bytes=output_bytes,
        holdings=holdings,
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
            values = microbatch.inputs
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


def _holding(policy: str, costs: profiling.PartCosts) -> Holding:
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

"""Plans for several ranks: what every block of a model costs, and which of them make a stage."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from squeezebox import pipeline, planner, profiling
from squeezebox.bounds import Planned
from squeezebox.pipeline import Construction, Initial, Piece
from squeezebox.planning._kinds import check_count, check_kinds
from squeezebox.planning._places import Equal, Unequal
from squeezebox.planning._plans import size_named
from squeezebox.planning._stages import Stages, bounds_of, measure_alone, measure_together, state_share
from squeezebox.schedules import PUBLISHED, SYNCHRONOUS
from squeezebox.schema import (
    BudgetError,
    Devices,
    InputForm,
    Link,
    OptionError,
    PipelinePlan,
    PipelineProfile,
)
from squeezebox.session import Session, begin
from squeezebox.steps import LossFunction, TrainingStep, batch_of, check_sample, device_of, resize

_BEST = 12  # plans whose stages are measured, of those that are fastest by their blocks
_SEARCHES = 4
DEFAULT_NOISE = 1e-3
_POLICIES = "keep", "compress", "recompute"


def plan_pipeline(
    model: torch.nn.Module,
    *,
    sample: tuple[Any, Any],
    loss_fn: LossFunction,
    ranks: int | None = None,
    memory_bytes: int | str | None = None,
    devices: Devices | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    microbatches: Sequence[int] | None = None,
    schedules: Sequence[str] = SYNCHRONOUS,
    policies: Sequence[str] = ("keep", "recompute"),
    noise: float = DEFAULT_NOISE,
    depths: Sequence[int] | None = None,
    link: Link | None = None,
    construction: Construction | None = None,
    on_progress: Callable[[int, int, str], None] | None = None,
) -> list[PipelinePlan]:
    """Measure a model's blocks here, and say how a batch would go through ``ranks`` ranks the fastest.

    A model on the meta device may be larger than memory here: its blocks are given their values and run one
    after the other, on the device of the sample.

    Runs a few microbatches of each size, in this process and with all of its threads.

    Args:
        model: any module that ``squeezebox.pipeline.cut`` can part.
        sample: (inputs, target) of a whole batch; inputs are a tensor, a tuple of them, or a dict by the
            model's keywords, batch first.
        loss_fn: called with output and target.
        ranks: of all replicas together.
        memory_bytes: what one rank may hold, in bytes or as "8GiB".
        devices: that are not alike, in place of ``ranks``, ``memory_bytes`` and ``link``: one pipeline over
            some of them is planned. This device's speed is measured, as theirs were.
        optimizer: for the size of its state.
        microbatches: sizes to try (default: powers of two, up to a batch parted once for each rank).
        schedules: names of squeezebox.schedules.FLOWS. "2bw" and "pipedream" only if named, as they
            train with gradients of earlier weights.
        policies: of "keep", "recompute" and "compress"; the last one only if named, as it loses accuracy.
        noise: what "compress" allows if all stages do, measured on the sample as in ``attach``.
        depths: ranks of one pipeline to try (default: all divisors of ``ranks``).
        link: between ranks (default: measured between two processes here).
        construction: in which a model on the meta device was constructed; see ``squeezebox.pipeline.Runner``.
        on_progress: called with (done, total, note).

    Returns:
        The best plans that fit, the fastest first. Those whose replicas keep a part of the weights each come
        before others where they are faster by a tenth.

    Raises:
        OptionError: an argument is out of range.
        BudgetError: nothing fits; names the least memory that something would.
        UnsupportedModelError: the model cannot be cut.
    """
    if (devices is None) == (ranks is None) or (devices is None) == (memory_bytes is None):
        raise OptionError(
            "devices= says how many ranks there may be and what each may hold; give it, or ranks= and "
            "memory_bytes=."
        )
    check_kinds(model, noise, optimizer)
    memory_bytes = _checked(ranks, memory_bytes, policies)
    (inputs, target), loss_fn = check_sample(sample, loss_fn)
    names, inputs = _parted(inputs)
    batch = batch_of((inputs, target))
    if devices is not None:
        devices.require_links()
    sizes = _sizes(microbatches, batch, ranks or len(devices.devices if devices else ()))
    splitting = {row.name for row in PUBLISHED.values() if row.splits}
    initial = _initial(model, inputs, construction)
    if initial.is_needed and "compress" in policies:
        raise OptionError(
            "'compress' weighs all blocks against one another, so all need memory at once, and the model is "
            "on the meta device. Take keep and recompute, or plan where the model fits."
        )
    stages, pieces, share = dict[int, Stages](), list[Piece](), state_share(model, optimizer)
    whole = TrainingStep(model=model, sample=(inputs, target), loss_fn=loss_fn)
    with contextlib.closing(initial), whole.restored():
        model.zero_grad(set_to_none=True)  # else what is put back is what was added to
        for done, size in enumerate(sizes):
            if on_progress is not None:
                on_progress(done, len(sizes) + 1, f"microbatches of {size}")
            part = resize((inputs, target), batch, size)
            pieces = pipeline.cut(model, part[0], names)
            microbatch = TrainingStep(model=model, sample=part, loss_fn=loss_fn)
            made = Stages(
                profile=PipelineProfile(microbatch=size, blocks=()),
                pieces=pieces,
                initial=initial,
                microbatch=microbatch,
                bounds=bounds_of(pieces, microbatch, noise) if "compress" in policies else {},
                state_share=share,
            )
            made = measure_alone(made, policies) if initial.is_needed else measure_together(made, policies)
            stages[size] = made.with_pending() if splitting.intersection(schedules) else made
        if on_progress is not None:
            on_progress(len(sizes), len(sizes) + 1, "the best plans' stages")
        where: Equal | Unequal
        if devices is not None:
            here = device_of(model) if not initial.is_needed else inputs[0].device
            where = Unequal(devices, profiling.measure_speed(here))
        else:
            assert ranks is not None and memory_bytes is not None
            where = Equal(ranks, memory_bytes, link or pipeline.measure_link())
        search = functools.partial(
            where.plans,
            [each.profile for each in stages.values()],
            batch=batch,
            schedules=schedules,
            policies=policies,
            depths=depths,
        )
        if devices is None:
            search = functools.partial(search, shards=_shards(pieces, optimizer))
        plans = _best(search, stages, where)
    about: dict[str, Any] = {
        "inputs": tuple(
            InputForm(shape=tuple(each.shape[1:]), dtype=str(each.dtype).removeprefix("torch."), name=name)
            for each, name in zip(inputs, names, strict=True)
        ),
        "noise": noise if "compress" in policies else 0.0,
        "fingerprint": pipeline.fingerprint(pieces),
        "blocks": tuple(piece.name for piece in pieces),
    }
    return [dataclasses.replace(plan, **about) for plan in plans]


def _checked(ranks: object, memory_bytes: int | str | None, policies: Sequence[str]) -> int | None:
    """The memory in bytes; OptionError where one of these is out of range."""
    if unknown := [each for each in policies if each not in _POLICIES]:
        raise OptionError(f"policies {unknown} are unknown; known are {', '.join(_POLICIES)}.")
    if ranks is not None:
        check_count("ranks", ranks)
    if memory_bytes is None:
        return None
    size, is_share = size_named(memory_bytes, "memory_bytes")
    if is_share:
        raise OptionError(f"memory_bytes {memory_bytes!r} is a share of nothing known; give bytes or '8GiB'.")
    return int(size)


def attach_stages(runner: pipeline.Runner) -> list[Session]:
    """Attach to those of a rank's stages that the plan wants compressed, with its bounds for them.

    These stay as they are, so that memory stays what was planned; ``squeezebox.attach`` on a stage, with
    ``noise=``, adapts them.
    """
    plans = runner.plan.stages
    return [
        Session(begin(stage, None, Planned(bounds=plans[number].bounds), overlapping=True))
        for number, stage in runner.stages.items()
        if plans[number].policy == "compress"
    ]


def peak_meter(stages: Iterable[torch.nn.Module]) -> profiling.PeakMeter:
    """A meter for the memory of a rank's stages."""
    return profiling.PeakMeter(device_of(next(iter(stages))))


def _parted(inputs: Any) -> tuple[tuple[str, ...], tuple[Any, ...]]:
    """Keywords, "" where there are none, and tensors."""
    if isinstance(inputs, Mapping):
        return tuple(inputs), tuple(inputs.values())
    inputs = inputs if isinstance(inputs, tuple) else (inputs,)
    return ("",) * len(inputs), inputs


def _initial(model: torch.nn.Module, inputs: tuple[Any, ...], construction: Construction | None) -> Initial:
    """The model's values, where the inputs are if it has none itself."""
    is_meta = any(parameter.is_meta for parameter in model.parameters())
    return Initial(model, device=inputs[0].device if is_meta else None, construction=construction)


def _shards(pieces: Sequence[Piece], optimizer: torch.optim.Optimizer | None) -> tuple[bool, ...]:
    """Whether replicas may keep a part each: not where pieces share weights, or elements are not alone."""
    held = [each for piece in pieces for each in piece.module.parameters() if each.requires_grad]
    is_tied = len({*map(id, held)}) < len(held)
    is_alone = optimizer is None or pipeline.steps_elements(optimizer)
    return (False, True) if is_alone and not is_tied else (False,)


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


def _best(
    search: Callable[..., list[PipelinePlan]], stages: Mapping[int, Stages], where: Equal | Unequal
) -> list[PipelinePlan]:
    """The fastest that fit when their stages are measured as wholes; if none does, among smaller ones.

    Raises:
        BudgetError: there are none.
    """
    share, least = 1.0, 0.0
    for _ in range(_SEARCHES):
        try:
            found = search(share=share)[:_BEST]
        except BudgetError:
            if not least:
                raise
            break
        plans = [stages[plan.microbatch].measured(plan, where) for plan in found]
        fitting = [plan for plan in plans if where.filled(plan) <= 1.0]
        if fitting:
            return sorted(fitting, key=planner.preference)
        least = min(map(where.filled, plans))
        share /= least
    raise BudgetError(
        f"no pipeline was found that fits {where.memory}: the smallest of those whose stages were measured "
        f"holds {least:.3g} times as much. Allow that much, or give more ranks, smaller microbatches, or "
        "policies that hold less."
    )

"""Plans a pipeline: how deep and how wide, which microbatches, schedule and split; or why none fits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from numbers import Integral

from squeezebox.planner._replicated import replicated
from squeezebox.planner._split import Found, Shape, fastest, smallest
from squeezebox.planner._stages import Runs, runs, stage_memory
from squeezebox.schedules import FLOWS, PUBLISHED, SYNCHRONOUS, Pipe
from squeezebox.schema import (
    BudgetError,
    Link,
    OptionError,
    PipelinePlan,
    PipelineProfile,
    StageMemory,
    human_bytes,
)


def too_little(
    tried: Sequence[tuple[Runs, Shape]],
    uneven: Sequence[tuple[Found, PipelineProfile]],
    memory_bytes: int,
    link: Link,
) -> BudgetError:
    """Names the least that would fit, and the stage that owns the most of it."""
    found = [(each, blocks.profile) for blocks, shape in tried if (each := smallest(blocks, shape, link))]
    found += uneven
    if not found:
        return BudgetError(
            "no plan can be made: each policy was measured for some blocks only, and a stage holds all of "
            "its blocks alike. Profile every block with one policy at least."
        )
    while found:  # where a rank has several stages, looking for the fastest may find smaller ones
        least, profile = min(found, key=lambda pair: pair[0].peak_bytes)
        limit = least.peak_bytes - 1
        found = [
            (each, blocks.profile) for blocks, shape in tried if (each := fastest(blocks, shape, limit, link))
        ]
    return BudgetError(
        f"no pipeline fits {_size(memory_bytes)} a rank; the least that one does is "
        f"{_size(least.peak_bytes)}: {_described(least)}. {_owner(least, profile)} Allow that much, "
        "or give more ranks, smaller microbatches, or policies that hold less."
    )


def _described(found: Found) -> str:
    plan = found.plan
    return (
        f"{plan.schedule} with {plan.microbatches} microbatches of {plan.microbatch} on {plan.replicas} x "
        f"{plan.ranks} ranks{', whose replicas keep a part each' if plan.shard else ''}"
    )


def _owner(found: Found, profile: PipelineProfile) -> str:
    stages = found.plan.stages
    number = max(range(len(stages)), key=lambda stage: stages[stage].peak_bytes)
    own = profile.blocks[stages[number].first : stages[number].end]
    parts = _parts(stage_memory(profile, found.plan, number))
    blocks = f"'{own[0].name}' to '{own[-1].name}', {stages[number].policy}"
    return f"Stage {number} ({blocks}) owns the most: {parts}."


def _parts(memory: StageMemory) -> str:
    parts = {
        "weights": memory.weights_bytes,
        "gradients": memory.gradient_bytes,
        "optimizer state": memory.state_bytes,
        "activations": memory.activation_bytes,
        "buffers": memory.buffer_bytes,
        "working space": memory.working_bytes,
        "weights and gradients gathered": memory.gathered_bytes,
    }
    return ", ".join(f"{name} {_size(nbytes)}" for name, nbytes in parts.items() if nbytes)


def _size(nbytes: int) -> str:
    """``1.50 GiB (1610612736 bytes)``."""
    return f"{nbytes} bytes" if nbytes < 2**10 else f"{human_bytes(nbytes)} ({nbytes} bytes)"


def plan_pipeline(
    profiles: Sequence[PipelineProfile],
    *,
    batch: int,
    ranks: int,
    memory_bytes: int,
    link: Link,
    schedules: Sequence[str] = SYNCHRONOUS,
    policies: Sequence[str] = ("keep", "compress", "recompute"),
    depths: Sequence[int] | None = None,
    loops: Sequence[int] = (2, 4),
    shards: Sequence[bool] = (False, True),
) -> list[PipelinePlan]:
    """Everything that fits, the fastest first: for each depth, microbatch, schedule, loops and shard one.

    The search of PipeDream-2BW (arXiv:2006.09503, algorithm 1) with the split of PipeDream: for each width w
    and depth d with w d = ranks and each microbatch size b there are m = batch / (w b) microbatches, and the
    blocks are cut into contiguous stages so that the slowest one, with the transfers it waits for, is as
    fast as memory allows; each stage holds what it saves by the fastest policy that fits its own number of
    microbatches in flight. A batch's seconds are the schedules' closed forms: exact for even stages, an
    estimate for others, which squeezebox.schedules.simulate makes exact. For 2bw and pipedream there is also
    PipeDream's own split, with replicas of slow stages, unless ``depths`` are given.

    Args:
        profiles: the same blocks, measured with microbatches of different sizes.
        batch: samples between two updates of the weights, of all replicas together.
        ranks: of all replicas together.
        memory_bytes: what one rank may hold.
        link: between ranks.
        schedules: names of squeezebox.schedules.FLOWS. "2bw" and "pipedream" train with gradients
            of earlier weights; the latter updates after each microbatch, so its batch is one a replica.
        policies: how stages may hold what they save.
        depths: ranks of one pipeline to try; None: all divisors of ``ranks`` that there are blocks for.
        loops: stages of a rank to try where a schedule has several.
        shards: whether replicas may keep a part of weights, gradients and optimizer state each, in schedules
            that flush. They then gather a stage's weights whenever they come to it, in breadth-first with
            pipelines of one rank too.

    Raises:
        OptionError: an argument is out of range, or no batch can be divided so.
        BudgetError: nothing fits; names the least memory that something would.
    """
    _require(profiles, schedules, policies, batch=batch, ranks=ranks, memory_bytes=memory_bytes)
    deep = _depths(ranks, len(profiles[0].blocks), depths)
    tried = [
        (runs(profile, policies, link), shape)
        for profile in profiles
        for shape in _shapes(profile, deep, ranks, batch, schedules, loops, shards)
    ]
    is_free = depths is None and "keep" in policies
    uneven = [*replicated(profiles, schedules, batch=batch, ranks=ranks, link=link)] if is_free else []
    if not tried and not uneven:
        raise _indivisible(profiles, deep, ranks, batch, schedules)
    found = [each for blocks, shape in tried if (each := fastest(blocks, shape, memory_bytes, link))]
    found += [each for each, _ in uneven if each.peak_bytes <= memory_bytes]
    if not found:
        raise too_little(tried, uneven, memory_bytes, link)
    return sorted((each.plan for each in found), key=preference)


def preference(plan: PipelinePlan) -> tuple[float, int]:
    """What to sort plans by: those whose replicas keep parts come first where they are faster by a tenth.

    Gathers wait for the slowest replica each time, and their room is taken again in each batch. Neither is in
    a plan's seconds.
    """
    return plan.seconds * (1.1 if plan.shard else 1.0), max(plan.rank_peak_bytes)


def _shapes(
    profile: PipelineProfile,
    depths: Sequence[int],
    ranks: int,
    batch: int,
    schedules: Sequence[str],
    loops: Sequence[int],
    shards: Sequence[bool],
) -> Iterator[Shape]:
    """All that divide the batch and have a block for each stage."""
    for depth, shard in product(depths, shards):
        replicas = ranks // depth
        microbatches, rest = divmod(batch, replicas * profile.microbatch)
        if not microbatches or rest or (shard and replicas == 1):
            continue
        several = {count for count in loops if count > 1 and count * depth <= len(profile.blocks)}
        for count in (1, *sorted(several)):
            pipe = Pipe(ranks=depth, loops=count, microbatches=microbatches)
            suited = [name for name in schedules if _suits(name, pipe, shard)]
            yield from (Shape(schedule=name, pipe=pipe, replicas=replicas, shard=shard) for name in suited)


def _suits(schedule: str, pipe: Pipe, shard: bool) -> bool:
    """Whether it goes so; several stages on a rank alone only save memory where replicas keep parts."""
    if pipe.ranks == 1 and pipe.loops > 1 and not (shard and schedule == "breadth-first"):
        return False
    return FLOWS[schedule].suits(pipe) and (PUBLISHED[schedule].flushes or not shard)


def _depths(ranks: int, blocks: int, depths: Sequence[int] | None) -> Sequence[int]:
    if depths is None:
        return [depth for depth in range(1, min(ranks, blocks) + 1) if ranks % depth == 0]
    for depth in depths:
        if not 1 <= depth <= blocks or ranks % depth:
            raise OptionError(
                f"a pipeline cannot be {depth} ranks deep: there are {ranks} ranks in all, which its depth "
                f"must divide, and {blocks} blocks, of which each rank takes one or more. Change the depth."
            )
    return depths


def _require(
    profiles: Sequence[PipelineProfile], schedules: Sequence[str], policies: Sequence[str], **counts: object
) -> None:
    for name, count in counts.items():
        if not isinstance(count, Integral) or count < 1:
            raise OptionError(f"{name} is {count!r}; give a whole number from 1 on.")
    lengths = {len(profile.blocks) for profile in profiles}
    if len(lengths) != 1 or 0 in lengths:
        raise OptionError(
            f"profiles have {sorted(lengths)} blocks; give one or more, of the same 1 or more blocks."
        )
    unknown = [name for name in schedules if name not in FLOWS]
    if unknown or not schedules:
        raise OptionError(f"schedules {[*schedules]} are none or unknown; known are {', '.join(FLOWS)}.")
    measured = {each.policy for profile in profiles for block in profile.blocks for each in block.holdings}
    if not measured & {*policies}:
        raise OptionError(
            f"policies {[*policies]} were not measured; profiles have {sorted(measured)}. Take one of these, "
            "or profile more."
        )


def _indivisible(
    profiles: Sequence[PipelineProfile],
    depths: Sequence[int],
    ranks: int,
    batch: int,
    schedules: Sequence[str],
) -> OptionError:
    sizes = ", ".join(str(profile.microbatch) for profile in profiles)
    deep = ", ".join(map(str, depths))
    return OptionError(
        f"a batch of {batch} cannot be divided over {ranks} ranks in pipelines {deep} deep with microbatches "
        f"of {sizes} for {', '.join(schedules)}: each replica must get a whole number of them; "
        "interleaved-1f1b needs multiples of its depth and a block for each of its stages, as does "
        "breadth-first, 2bw at least as many as its depth, pipedream exactly one. Change the batch, the "
        "microbatches or schedules."
    )

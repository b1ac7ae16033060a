"""PipeDream's partition is the best of all, and refuses what it cannot split."""

import random

import pytest

from squeezebox.planner import pipedream_split, plan_pipeline, stage_memory
from squeezebox.schema import Block, BudgetError, Holding, Link, OptionError, PipelinePlan, PipelineProfile


def block(name, seconds, parameter_bytes=0, output_bytes=0, policy="keep"):
    holding = Holding(
        policy=policy,
        saved_bytes=1,
        working_bytes=0,
        forward_seconds=seconds / 3,
        backward_seconds=2 * seconds / 3,
    )
    return Block(
        name=name,
        parameter_bytes=parameter_bytes,
        state_bytes=0,
        output_bytes=output_bytes,
        holdings=(holding,),
    )


def all_splits(blocks, workers):
    """Every (blocks, replicas) of stages in a row."""
    yield ((blocks, workers),)
    for count in range(1, blocks):
        for replicas in range(1, workers):
            for rest in all_splits(blocks - count, workers - replicas):
                yield ((count, replicas), *rest)


def slowest(blocks, split, link):
    """As the paper writes it, stage by stage."""
    first, worst = 0, 0.0
    for count, replicas in split:
        own = blocks[first : first + count]
        work = sum(each.holdings[0].forward_seconds + each.holdings[0].backward_seconds for each in own)
        shared = 2 * (replicas - 1) * sum(each.parameter_bytes for each in own) // replicas
        worst = max(worst, max(work, link.seconds(shared) if replicas > 1 else 0.0) / replicas)
        first += count
        if first < len(blocks):
            worst = max(worst, 2 * link.seconds(blocks[first - 1].output_bytes))
    return worst


@pytest.mark.parametrize("seed", range(60))
def test_no_split_is_faster(seed):
    draw = random.Random(seed)
    blocks = [
        block(str(number), draw.uniform(0.1, 2.0), draw.randint(0, 3000), draw.randint(0, 400))
        for number in range(draw.randint(1, 6))
    ]
    workers = draw.randint(1, 5)
    link = Link(bytes_per_second=1000.0, latency_seconds=draw.choice((0.0, 0.1)))
    found = pipedream_split(blocks, workers, link)
    best = min(slowest(blocks, split, link) for split in all_splits(len(blocks), workers))
    assert found.seconds == pytest.approx(best)
    split = [(stage.end - stage.first, stage.replicas) for stage in found.stages]
    assert slowest(blocks, split, link) == pytest.approx(found.seconds)
    assert sum(replicas for _, replicas in split) == workers
    assert found.stages[-1].end == len(blocks)


def test_convolutions_are_replicated_and_the_classifier_is_not():
    """VGG-16's shape in the paper: 7-1 on 8 workers; warm-up is ceil(8 / 7) microbatches."""
    blocks = [block("convolutions", 7.0, 100, 10), block("classifier", 1.0, 10_000, 1)]
    found = pipedream_split(blocks, 8, Link(bytes_per_second=1000.0))
    assert [stage.replicas for stage in found.stages] == [7, 1]
    assert found.seconds == pytest.approx(1.0)
    assert found.warmups == 2


def test_what_cannot_be_split_is_refused():
    link = Link(bytes_per_second=1.0)
    with pytest.raises(OptionError, match="1 blocks cannot be split over 0 workers"):
        pipedream_split([block("a", 1.0)], 0, link)
    with pytest.raises(OptionError, match="'a' was not measured with policy 'keep'"):
        pipedream_split([block("a", 1.0, policy="recompute")], 2, link)


@pytest.mark.parametrize(("schedule", "batch"), [("pipedream", 4), ("2bw", 8)])
def test_its_split_becomes_a_plan_that_fits(schedule, batch):
    link = Link(bytes_per_second=1000.0)
    blocks = block("convolutions", 4.0, 100, 10), block("classifier", 2.0, 10_000, 1)
    profile = PipelineProfile(microbatch=2, blocks=blocks)
    search = {"batch": batch, "ranks": 3, "link": link, "schedules": [schedule], "policies": ["keep"]}
    plans = plan_pipeline([profile], memory_bytes=10**9, **search)
    (found,) = [plan for plan in plans if plan.stage_replicas]
    split = pipedream_split(profile.blocks, 3, link)
    assert found.stage_replicas == tuple(stage.replicas for stage in split.stages) == (2, 1)
    assert (found.ranks, found.replicas, found.microbatches) == (3, 1, batch // 2)
    assert found.seconds == pytest.approx(split.seconds * found.microbatches)
    assert PipelinePlan.from_dict(found.to_dict()) == found
    for stage, planned in enumerate(found.stages):
        memory = stage_memory(profile, found, stage)
        assert memory.total_bytes == planned.peak_bytes
        assert {found.rank_peak_bytes[rank] for rank in found.ranks_of(stage)} == {planned.peak_bytes}
    with pytest.raises(BudgetError, match="Stage 1 .* owns the most: weights"):
        plan_pipeline([profile], memory_bytes=max(found.rank_peak_bytes) - 1, **search)

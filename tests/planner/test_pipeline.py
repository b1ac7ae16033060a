"""Every plan fits, is the best of all splits and policies of its kind, and what cannot be is refused."""

import random
import re
from dataclasses import replace
from itertools import combinations, pairwise, product

import pytest

from squeezebox.planner import plan_pipeline, stage_memory
from squeezebox.schedules import SYNCHRONOUS, Costs, make, simulate
from squeezebox.schema import Block, BudgetError, Holding, Link, OptionError, PipelineProfile

POLICIES = ("keep", "compress", "recompute")
ALL = (*SYNCHRONOUS, "2bw", "pipedream")
FAST = Link(bytes_per_second=1e9)


def block(draw, name, microbatch):
    seconds = draw.uniform(0.5, 2.0) * microbatch
    costs = ((100, 10, 1.0, 2.0), (30, 60, 1.1, 2.3), (10, 100, 1.0, 3.0))
    size = draw.uniform(0.5, 2.0) * microbatch
    holdings = tuple(
        Holding(
            policy=policy,
            saved_bytes=int(saved * size),
            working_bytes=int(working * size),
            forward_seconds=forward * seconds,
            backward_seconds=backward * seconds,
            pending_bytes=int(20 * size),
        )
        for policy, (saved, working, forward, backward) in zip(POLICIES, costs, strict=True)
    )
    parameters = draw.randint(1, 200)
    return Block(
        name=name,
        parameter_bytes=parameters,
        state_bytes=2 * parameters,
        output_bytes=10 * microbatch,
        holdings=holdings,
    )


def profile(seed, blocks, microbatch=1):
    draw = random.Random(seed)
    return PipelineProfile(
        microbatch=microbatch, blocks=tuple(block(draw, f"block {n}", microbatch) for n in range(blocks))
    )


def held(blocks, first, end, policy, in_flight, pending, versions, gradients):
    """A stage's bytes, written out."""
    own = blocks[first:end]
    holdings = [each.holding(policy) for each in own]
    received = blocks[first - 1].output_bytes if first else 0
    returned = blocks[end - 1].output_bytes if end < len(blocks) else 0
    working = max(
        each.working_bytes - sum(later.saved_bytes for later in holdings[number + 1 :])
        for number, each in enumerate(holdings)
    )
    return (
        sum((versions + gradients) * each.parameter_bytes + each.state_bytes for each in own)
        + in_flight * (received + sum(each.saved_bytes for each in holdings))
        + pending * sum(each.pending_bytes for each in holdings)
        + working
        + 2 * received
        + (max(pending, 1) + 1) * returned
    )


def places(schedule, ranks, microbatches):
    """In flight, pending, versions and sets of gradients of each stage, where a rank has one."""
    down = [(min(microbatches, ranks - stage), 0, 1, 1) for stage in range(ranks)]
    most = min(microbatches, ranks)
    return {
        "gpipe": [(microbatches, 0, 1, 1)] * ranks,
        "1f1b": down,
        "zb-h1": [(most, min(stage + 1, most), 1, 1) for stage in range(ranks)],
        "2bw": [(ranks - stage, 0, 2 - (stage == ranks - 1), 2) for stage in range(ranks)],
        "pipedream": [(ranks - stage, 0, ranks - stage, 1) for stage in range(ranks)],
    }[schedule]


def fastest(profile, schedule, ranks, microbatches, memory_bytes, link):
    """Slowest stage, and all together, of the best of all splits and policies; None if none fits."""
    blocks = profile.blocks
    slots = places(schedule, ranks, microbatches)
    crossing = [link.seconds(each.output_bytes) for each in blocks]
    found = []
    for cuts in combinations(range(1, len(blocks)), ranks - 1):
        stages = [*pairwise((0, *cuts, len(blocks)))]
        for policies in product(POLICIES, repeat=ranks):
            chosen = [*zip(stages, policies, slots, strict=True)]
            if any(held(blocks, *stage, policy, *slot) > memory_bytes for stage, policy, slot in chosen):
                continue
            seconds = [
                sum(
                    each.holding(policy).forward_seconds + each.holding(policy).backward_seconds
                    for each in blocks[first:end]
                )
                + (schedule != "gpipe")
                * ((crossing[first - 1] if first else 0) + (crossing[end - 1] if end < len(blocks) else 0))
                for (first, end), policy, _ in chosen
            ]
            found.append((max(seconds), sum(seconds)))
    return min(found, default=None)


@pytest.mark.parametrize("seed", range(40))
def test_no_split_and_policies_are_faster(seed):
    draw = random.Random(seed)
    known = profile(seed, draw.randint(2, 6))
    ranks, microbatches = draw.randint(1, min(3, len(known.blocks))), draw.choice((1, 2, 4))
    link = Link(bytes_per_second=draw.choice((20.0, 1e9)))
    memory_bytes = draw.randint(400, 2500)
    names = ("gpipe", "1f1b", "zb-h1", "2bw", "pipedream")
    limits = {"2bw": microbatches >= ranks, "pipedream": microbatches == 1}
    best = {
        name: fastest(known, name, ranks, microbatches, memory_bytes, link)
        for name in names
        if limits.get(name, True)
    }
    try:
        plans = plan_pipeline(
            [known],
            batch=microbatches,
            ranks=ranks,
            memory_bytes=memory_bytes,
            link=link,
            schedules=names,
            depths=[ranks],
        )
    except BudgetError:
        plans = []
    found = {plan.schedule: plan for plan in plans}
    assert {name for name, each in best.items() if each} == set(found)
    for name, plan in found.items():
        seconds = [
            stage.forward_seconds
            + stage.backward_seconds
            + (name != "gpipe")
            * 10
            / link.bytes_per_second
            * ((stage.first > 0) + (stage.end < len(known.blocks)))
            for stage in plan.stages
        ]
        assert (max(seconds), sum(seconds)) == pytest.approx(best[name])
        for number, (stage, slot) in enumerate(
            zip(plan.stages, places(name, ranks, microbatches), strict=True)
        ):
            assert stage.peak_bytes == held(known.blocks, stage.first, stage.end, stage.policy, *slot)
            assert stage.peak_bytes == stage_memory(known, plan, number).total_bytes <= memory_bytes


def rank_bytes(known, plan):
    """Of each rank, with what lives together as the schedule is run on paper."""
    loops = len(plan.stages) // plan.ranks
    schedule = make(plan.schedule, plan.ranks, plan.microbatches, loops=loops)
    saved = [
        sum(each.holding(stage.policy).saved_bytes for each in known.blocks[stage.first : stage.end])
        + (known.blocks[stage.first - 1].output_bytes if stage.first else 0)
        for stage in plan.stages
    ]
    costs = replace(Costs.even(len(saved)), activation_bytes=tuple(saved))
    timeline = simulate(schedule, costs)
    parts = [stage_memory(known, plan, number) for number in range(len(plan.stages))]
    for rank in range(plan.ranks):
        own = parts[rank :: plan.ranks]
        fixed = sum(part.total_bytes - part.activation_bytes - part.working_bytes for part in own)
        yield fixed + timeline.live_bytes[rank] + max(part.working_bytes for part in own)


@pytest.mark.parametrize("seed", range(20))
def test_a_ranks_stages_fit_together(seed):
    draw = random.Random(seed)
    known = profile(seed, draw.randint(6, 10))
    memory_bytes = draw.randint(1500, 6000)
    arguments = {"batch": 6, "ranks": 2, "link": FAST, "schedules": ("interleaved-1f1b", "breadth-first")}
    try:
        plans = plan_pipeline([known], memory_bytes=memory_bytes, depths=[2], loops=(2, 3), **arguments)
    except BudgetError:
        return
    for plan in plans:
        assert len(plan.stages) in (4, 6)
        assert max(rank_bytes(known, plan)) <= memory_bytes


@pytest.mark.every(4)
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("names", (SYNCHRONOUS, ("interleaved-1f1b", "breadth-first"), ("2bw",)))
def test_the_least_that_fits_does_and_a_byte_less_does_not(seed, names):
    known = [profile(seed, 8, microbatch) for microbatch in (1, 2)]
    arguments = {"batch": 16, "ranks": 4, "link": FAST, "schedules": names}
    with pytest.raises(BudgetError, match="owns the most: weights") as caught:
        plan_pipeline(known, memory_bytes=1, **arguments)
    assert " 0.0" not in str(caught.value)  # sizes in a unit that suits them
    least = int(re.search(r"does is (?:[\d.]+ \w+ \()?(\d+) bytes", str(caught.value))[1])
    assert plan_pipeline(known, memory_bytes=least, **arguments)
    with pytest.raises(BudgetError):
        plan_pipeline(known, memory_bytes=least - 1, **arguments)


def test_plans_are_sorted_and_cover_widths_depths_and_microbatches():
    known = [profile(3, 8, microbatch) for microbatch in (1, 2, 4)]
    plans = plan_pipeline(
        known, batch=16, ranks=4, memory_bytes=10**6, link=FAST, schedules=ALL, policies=("keep",)
    )
    for shard in (False, True):
        seconds = [plan.seconds for plan in plans if plan.shard == shard]
        assert seconds == sorted(seconds) != []
    assert {(plan.ranks, plan.replicas) for plan in plans} == {(1, 4), (2, 2), (4, 1)}
    assert {plan.microbatch for plan in plans} == {1, 2, 4}
    assert {plan.schedule for plan in plans} == {*ALL}
    for plan in plans:
        assert plan.replicas * plan.microbatches * plan.microbatch == 16
        assert {stage.policy for stage in plan.stages} == {"keep"}


def test_predictions_are_near_what_is_simulated():
    known = profile(1, 12)
    for plan in plan_pipeline([known], batch=12, ranks=3, memory_bytes=10**6, link=FAST, depths=[3]):
        loops = len(plan.stages) // plan.ranks
        schedule = make(plan.schedule, plan.ranks, plan.microbatches, loops=loops)
        costs = Costs(
            forward=tuple(stage.forward_seconds for stage in plan.stages),
            backward=tuple(stage.backward_seconds for stage in plan.stages),
        )
        assert plan.seconds == pytest.approx(simulate(schedule, costs).seconds, rel=0.15)


def test_the_all_reduce_is_hidden_without_a_flush():
    """Two replicas: 2 (w - 1) / w of the parameters' bytes over the link, after the batch or beside it."""
    known = profile(0, 2)
    nbytes = sum(each.parameter_bytes for each in known.blocks)
    arguments = {"batch": 8, "memory_bytes": 10**6, "policies": ("keep",), "depths": [1]}
    arguments |= {"schedules": ("1f1b", "2bw"), "shards": [False]}
    alone = plan_pipeline([known], ranks=1, link=FAST, **arguments)
    shared = plan_pipeline([known], ranks=2, link=Link(bytes_per_second=float(nbytes)), **arguments)
    assert alone[0].seconds == alone[1].seconds
    seconds = {plan.schedule: plan.seconds for plan in shared}
    assert seconds["2bw"] == pytest.approx(alone[0].seconds / 2)
    assert seconds["1f1b"] == pytest.approx(alone[0].seconds / 2 + 1.0)
    slow = plan_pipeline([known], ranks=2, link=Link(bytes_per_second=nbytes / 1e3), **arguments)
    assert slow[0].seconds == pytest.approx(1e3)


def test_replicas_keep_parts_where_whole_ones_do_not_fit():
    """Breadth-First of 2 x 2 ranks, two stages each: (W + G + S) / 2, and twice the largest stage's W."""
    known = profile(4, 8)
    arguments = {"batch": 8, "ranks": 4, "depths": [2], "loops": [2], "policies": ("recompute",)}
    arguments |= {"link": Link(bytes_per_second=100.0), "schedules": ("breadth-first",)}
    whole, sharing_ = plan_pipeline([known], memory_bytes=10**6, **arguments)
    assert (whole.shard, sharing_.shard) == (False, True)  # the fastest comes first
    assert max(sharing_.rank_peak_bytes) < max(whole.rank_peak_bytes)
    tight = max(whole.rank_peak_bytes) - 1
    while True:
        try:
            plans = plan_pipeline([known], memory_bytes=tight, **arguments)
        except BudgetError as error:
            assert "on 2 x 2 ranks, whose replicas keep a part each" in str(error)
            assert "weights and gradients gathered" in str(error)
            break
        last, tight = plans[0], max(plans[0].rank_peak_bytes) - 1
    assert last.shard
    for plan in (sharing_, last):
        for rank in range(2):
            own = [stage for stage in range(4) if rank in plan.ranks_of(stage)]
            parts = [stage_memory(known, plan, stage) for stage in own]
            sizes = [
                sum(each.parameter_bytes for each in known.blocks[plan.stages[n].first : plan.stages[n].end])
                for n in own
            ]
            kept = sum(part.weights_bytes + part.gradient_bytes + part.state_bytes for part in parts)
            assert kept == sum(2 * -(-size // 2) + size for size in sizes)
            assert [part.gathered_bytes for part in parts] == [2 * size for size in sizes]
            fixed = kept + sum(part.buffer_bytes + part.activation_bytes for part in parts)
            top = max(part.gathered_bytes for part in parts) + max(part.working_bytes for part in parts)
            assert plan.rank_peak_bytes[rank] == fixed + top


def test_gathers_take_time():
    """A rank alone with v stages: 2v - 1 gathers and v scatters of half of a stage's weights."""
    known = profile(0, 4)
    arguments = {"batch": 8, "memory_bytes": 10**6, "policies": ("keep",), "depths": [1], "loops": [2, 4]}
    alone = plan_pipeline(
        [known],
        ranks=1,
        link=FAST,
        schedules=["gpipe"],
        batch=4,
        **{name: value for name, value in arguments.items() if name != "batch"},
    )[0]
    plans = plan_pipeline(
        [known],
        ranks=2,
        link=Link(bytes_per_second=10.0, latency_seconds=1e-3),
        schedules=["breadth-first"],
        **arguments,
    )
    assert {len(plan.stages) for plan in plans} == {2, 4} and all(plan.shard for plan in plans)
    for plan in plans:
        halves = [
            -(-sum(each.parameter_bytes for each in known.blocks[stage.first : stage.end]) // 2)
            for stage in plan.stages
        ]
        # The last stage goes back at once; the others are gathered for each of both ways.
        moved = 3 * sum(halves) - halves[-1]
        calls = 3 * len(halves) - 1
        assert plan.seconds == pytest.approx(alone.seconds + moved / 10.0 + calls * 1e-3)


def test_less_memory_takes_more_time():
    known = profile(5, 6)
    arguments = {"batch": 4, "ranks": 2, "link": FAST, "schedules": ("1f1b",), "depths": [2]}
    found = []
    for memory_bytes in range(900, 4000, 50):
        try:
            found.append(plan_pipeline([known], memory_bytes=memory_bytes, **arguments)[0])
        except BudgetError:
            assert not found
    slowest = [max(stage.forward_seconds + stage.backward_seconds for stage in plan.stages) for plan in found]
    assert slowest == sorted(slowest, reverse=True)
    assert len(set(slowest)) > 1
    assert {stage.policy for plan in found for stage in plan.stages} > {"keep"}


@pytest.mark.parametrize(
    "changes, message",
    (
        ({"depths": [8]}, "cannot be 8 ranks deep: there are 4 ranks .* and 6 blocks"),
        ({"depths": [3]}, "cannot be 3 ranks deep"),
        ({"ranks": 0}, "ranks is 0"),
        ({"batch": -1}, "batch is -1"),
        ({"memory_bytes": 0}, "memory_bytes is 0"),
        ({"batch": 7, "depths": [2]}, "a batch of 7 cannot be divided over 4 ranks in pipelines 2 deep"),
        ({"batch": 2, "depths": [4], "schedules": ["2bw"]}, "2bw at least as many as its depth"),
        ({"schedules": ["pipe"]}, r"schedules \['pipe'\] are none or unknown; known are gpipe"),
        ({"schedules": []}, "none or unknown"),
        ({"policies": ["offload"]}, r"\['offload'\] were not measured; profiles have \['compress', 'keep'"),
        ({"profiles": []}, r"profiles have \[\] blocks"),
        ({"profiles": [profile(0, 6), profile(0, 5, 2)]}, r"profiles have \[5, 6\] blocks"),
    ),
)
def test_what_cannot_be_planned_is_refused(changes, message):
    arguments = {"profiles": [profile(0, 6)], "batch": 8, "ranks": 4, "memory_bytes": 10**6, "link": FAST}
    arguments |= changes
    with pytest.raises(OptionError, match=message):
        plan_pipeline(arguments.pop("profiles"), **arguments)


def test_a_policy_measured_for_some_blocks_only_is_used_where_it_can_be():
    known = profile(2, 4)
    some = [*known.blocks]
    some[0] = replace(some[0], holdings=some[0].holdings[2:])
    arguments = {"batch": 4, "ranks": 2, "memory_bytes": 10**6, "link": FAST, "depths": [2]}
    for plan in plan_pipeline([replace(known, blocks=tuple(some))], **arguments):
        assert plan.stages[0].policy == "recompute"
        assert plan.stages[-1].policy == "keep"
    some[1] = replace(some[1], holdings=some[1].holdings[:1])
    some[0] = replace(some[0], holdings=known.blocks[0].holdings[1:2])
    with pytest.raises(BudgetError, match="measured for some blocks only"):
        plan_pipeline(
            [replace(known, blocks=tuple(some))], **(arguments | {"depths": [1], "shards": [False]})
        )


def test_a_stage_that_is_not_there_has_no_memory():
    known = profile(2, 4)
    plan = plan_pipeline([known], batch=4, ranks=2, memory_bytes=10**6, link=FAST)[0]
    with pytest.raises(OptionError, match="there is no stage 9 of 4 blocks"):
        stage_memory(known, plan, 9)
    with pytest.raises(OptionError, match="of 5 blocks"):
        stage_memory(profile(2, 5), plan, 0)

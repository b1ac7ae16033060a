"""Over unequal devices no other order, choice or cuts is faster, and what does not fit is named."""

import random
import re
from dataclasses import replace
from itertools import combinations, pairwise, permutations, product

import pytest

from squeezebox.planner import plan_on_devices, stage_memory
from squeezebox.planner._device_search import Search
from squeezebox.planner._stages import runs
from squeezebox.schedules import Costs, Pipe, make, simulate
from squeezebox.schema import BudgetError, Device, DeviceLink, Devices, Link, OptionError
from tests.planner.test_pipeline import POLICIES, held, places, profile


def made(draw, count, *, slow_links=True, nbytes=(400, 2500)):
    """Devices up to 4 times as fast as others, and links up to 100 times."""
    names = [f"device {number}" for number in range(count)]
    return Devices(
        devices=tuple(
            Device(name=name, memory_bytes=draw.randint(*nbytes), speed=draw.choice((1.0, 2.0, 4.0)))
            for name in names
        ),
        links=tuple(
            DeviceLink(
                between=pair,
                bytes_per_second=draw.choice((10.0, 100.0, 1000.0)) if slow_links else 1e12,
                latency_seconds=draw.choice((0.0, 0.1)) if slow_links else 0.0,
            )
            for pair in combinations(names, 2)
        ),
    )


def costs(known, devices, order, cuts, policies, schedule, microbatches):
    """Seconds of each stage without and with what crosses; None where one does not fit."""
    blocks, slots = known.blocks, places(schedule, len(order), microbatches)
    crossing = [
        devices.link(one, other).seconds(blocks[cut - 1].output_bytes)
        for (one, other), cut in zip(pairwise(order), cuts, strict=True)
    ]
    own, crossed = [], []
    for stage, (first, end) in enumerate(pairwise((0, *cuts, len(blocks)))):
        device, policy = devices.devices[order[stage]], policies[stage]
        if held(blocks, first, end, policy, *slots[stage]) > device.memory_bytes:
            return None
        holdings = [each.holding(policy) for each in blocks[first:end]]
        own.append(sum(each.forward_seconds + each.backward_seconds for each in holdings) / device.speed)
        crossed.append(own[-1] + sum(crossing[max(stage - 1, 0) : stage + 1]))
    return own, crossed


def seconds(schedule, microbatches, own, crossed):
    """The measure that the search is exact by."""
    slowest = max(own if schedule == "gpipe" else crossed)
    return microbatches * slowest if schedule == "2bw" else sum(crossed) + (microbatches - 1) * slowest


def of_plan(known, devices, plan):
    used = [number for number, each in enumerate(devices.devices) if each.name in plan.devices]
    order = [used[process] for process in plan.processes]
    assert [devices.devices[number].name for number in order] == [*plan.devices]
    cuts = [stage.end for stage in plan.stages[:-1]]
    policies = [stage.policy for stage in plan.stages]
    found = costs(known, devices, order, cuts, policies, plan.schedule, plan.microbatches)
    return seconds(plan.schedule, plan.microbatches, *found)


def by_trying_all(known, devices, schedule, microbatches, depth):
    found = []
    for order in permutations(range(len(devices.devices)), depth):
        for cuts in combinations(range(1, len(known.blocks)), depth - 1):
            for policies in product(POLICIES, repeat=depth):
                each = costs(known, devices, order, cuts, policies, schedule, microbatches)
                if each:
                    found.append(seconds(schedule, microbatches, *each))
    return min(found, default=None)


@pytest.mark.every(5)
@pytest.mark.parametrize("seed", range(40))
def test_seven_blocks_on_three_devices_equal_trying_all(seed):
    """By the measure that the search is exact by; moves that follow go by the simulator."""
    draw = random.Random(seed)
    known, devices = profile(seed, 7), made(draw, 3, nbytes=draw.choice(((400, 2500), (1000, 4000))))
    schedule, microbatches, depth = (
        draw.choice(("gpipe", "1f1b", "2bw")),
        draw.choice((3, 4, 8)),
        3 - seed % 2,
    )
    found = by_trying_all(known, devices, schedule, microbatches, depth)
    pipe = Pipe(ranks=depth, loops=1, microbatches=microbatches)
    blocks = runs(known, POLICIES, Link(bytes_per_second=float("inf")))
    search = Search(blocks, devices, 1.0, schedule, pipe, in_order=False)
    split = search.bottleneck()
    assert (split is None) == (found is None)
    if split is not None:
        best = search.improved(split, float("inf"))
        assert best.seconds == pytest.approx(found)
        assert of_plan(known, devices, search.plan(best)) == pytest.approx(found)


def simulated(plan, crossing):
    costs = Costs(
        forward=tuple(stage.forward_seconds for stage in plan.stages),
        backward=tuple(stage.backward_seconds for stage in plan.stages),
        transfer=crossing,
    )
    return simulate(make(plan.schedule, plan.ranks, plan.microbatches), costs).seconds


def planned(known, devices, **changes):
    given = {"batch": 8, "devices": devices, "speed": 1.0, "schedules": ["1f1b"]}
    return plan_on_devices([known], **given | changes)


@pytest.mark.parametrize("count", [4, 10])
def test_plans_fit_and_say_what_the_simulator_says(count):
    """Of ten devices the search goes by moves."""
    known, devices = profile(3, 9), made(random.Random(count), count, nbytes=(3000, 8000))
    plans = planned(known, devices, schedules=["gpipe", "1f1b", "zb-h1"], depths=[2, 3])
    assert [plan.seconds for plan in plans] == sorted(plan.seconds for plan in plans)
    assert {(plan.schedule, plan.ranks) for plan in plans} == {
        (name, depth) for name in ("gpipe", "1f1b", "zb-h1") for depth in (2, 3)
    }
    by_name = {each.name: number for number, each in enumerate(devices.devices)}
    for plan in plans:
        order = [by_name[name] for name in plan.devices]
        assert sorted(plan.processes) == [*range(plan.ranks)]
        assert [sorted(order)[process] for process in plan.processes] == order
        for stage, number in enumerate(order):
            assert plan.rank_peak_bytes[stage] <= devices.devices[number].memory_bytes
            assert plan.rank_peak_bytes[stage] == stage_memory(known, plan, stage).total_bytes
        crossing = tuple(
            devices.link(one, other).seconds(known.blocks[stage.end - 1].output_bytes)
            for (one, other), stage in zip(pairwise(order), plan.stages, strict=False)
        )
        assert plan.seconds == pytest.approx(simulated(plan, crossing))


def test_speeds_of_1_2_4_take_a_quarter_less_than_an_equal_split():
    known = profile(0, 12)
    names = ("one", "two", "four")
    devices = Devices(
        devices=tuple(
            Device(name=name, memory_bytes=10**6, speed=speed)
            for name, speed in zip(names, (1.0, 2.0, 4.0), strict=True)
        ),
        links=tuple(
            DeviceLink(between=pair, bytes_per_second=1e9, latency_seconds=0.0)
            for pair in combinations(names, 2)
        ),
    )
    (plan,) = planned(known, devices, depths=[3])
    stages = [known.blocks[first : first + 4] for first in (0, 4, 8)]
    each = [
        [
            sum(getattr(block.holding("keep"), what) for block in stage) / speed
            for stage, speed in zip(stages, (1.0, 2.0, 4.0), strict=True)
        ]
        for what in ("forward_seconds", "backward_seconds")
    ]
    equal = simulate(make("1f1b", 3, 8), Costs(forward=tuple(each[0]), backward=tuple(each[1]))).seconds
    assert plan.seconds < 0.75 * equal


def test_alike_devices_are_not_tried_twice():
    devices = made(random.Random(0), 8, slow_links=False)
    alike = replace(
        devices, devices=tuple(replace(each, memory_bytes=4000, speed=1.0) for each in devices.devices)
    )
    plan = planned(profile(1, 12), alike, depths=[8])[0]
    assert plan.devices == tuple(each.name for each in alike.devices)


def test_the_device_that_is_short_is_named():
    known, devices = profile(5, 7), made(random.Random(5), 3, nbytes=(900, 4000))
    plan = planned(known, devices, depths=[3])[0]
    number = next(number for number, each in enumerate(devices.devices) if each.name == plan.devices[0])

    def limited(nbytes):
        changed = tuple(
            replace(each, memory_bytes=nbytes) if place == number else each
            for place, each in enumerate(devices.devices)
        )
        return replace(devices, devices=changed)

    with pytest.raises(BudgetError) as caught:
        planned(known, limited(1), depths=[3])
    message = str(caught.value)
    assert f"'{plan.devices[0]}' is short by" in message
    lacks, unit = re.search(r"short by ([\d.]+) (\w+)", message).groups()
    assert unit == "B"
    enough = 1 + int(lacks)
    assert planned(known, limited(enough), depths=[3])
    with pytest.raises(BudgetError, match=f"'{plan.devices[0]}' is short by 1 B"):
        planned(known, limited(enough - 1), depths=[3])


@pytest.mark.parametrize(
    "changes",
    [
        {"batch": 7, "depths": [2], "schedules": ["pipedream"]},
        {"depths": [4]},
        {"schedules": ["breadth-first"]},
    ],
)
def test_what_cannot_be_planned_is_refused(changes):
    with pytest.raises(OptionError, match="a batch of . cannot go through 3 devices"):
        planned(profile(1, 5), made(random.Random(1), 3), **changes)

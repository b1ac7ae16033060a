"""The order in which ranks issue messages has no deadlock where communicators run them in that order."""

import dataclasses
import math
from unittest import mock

import pytest
from torch import nn

from squeezebox import schedules
from squeezebox.pipeline import Runner, schedule_of
from squeezebox.schedules import Call, find_deadlock
from tests.pipeline import ranks
from tests.pipeline.issues import Recorder

BATCHES = 4


def _recorded(rank, plan, options, less):
    """As on a device: what ranks exchange is issued in order too."""
    recorder, model = Recorder(), (ranks.tied if plan.inputs[0].dtype == "int64" else ranks.chain)()
    data, loss_fn = (ranks.words, ranks.entropy) if plan.inputs[0].dtype == "int64" else (
        ranks.numbers, nn.functional.mse_loss
    )  # fmt: skip
    in_order = mock.patch("squeezebox.pipeline._runner.issues_in_order", lambda device: True)
    with recorder.recording(), in_order:
        optimizer = ranks.OPTIMIZERS["sgd"](model.parameters())
        runner = Runner(model, plan, optimizer=optimizer, loss_fn=loss_fn, engine="own", **options)
        for batch in range(BATCHES):
            inputs, target = data(batch, 2 * plan.microbatches)
            samples = len(inputs) - (3 if batch in less else 0)
            runner.step(inputs[:samples], target[:samples])
        runner.drain()
        trained = len(recorder.log)
        runner.evaluate(*data(9, 2 * plan.microbatches))
        runner.step(*data(BATCHES, 2 * plan.microbatches))
        runner.drain()
        runner.close()
    return recorder.log, trained


def _all_recorded(rank, cases):
    return [_recorded(rank, *case) for case in cases]


def _cases(world):
    tokens = ranks.InputForm(shape=(5,), dtype="int64")
    plans = [
        (ranks.plan(8, world, name, 1 if name == "pipedream" else 4, loops=row.loops + 1), {}, ())
        for name, row in schedules.PUBLISHED.items()
    ]
    plans += [(ranks.plan(8, world, name, 4), {"clip": 1.0}, ()) for name in ("1f1b", "2bw")]
    plans += [(ranks.plan(8, world, name, 4), {}, (1, 2)) for name in ("1f1b", "2bw", "gpipe")]
    plans += [(ranks.plan(5, world, "2bw", 4, inputs=(tokens,)), {"clip": 1.0}, (2,))]
    return plans


def _name(case):
    plan, options, less = case
    return f"{plan.schedule} on {plan.ranks} with {options} {less}"


@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.slow), 4])
def test_recorded_orders_have_no_deadlock_and_are_those_on_paper(world):
    cases = [case for case in _cases(world) if world != 3 or "interleaved" not in case[0].schedule]
    results = ranks.run(_all_recorded, world, cases)
    assert not [result for result in results if isinstance(result, str)], results
    for number, case in enumerate(cases):
        logs = [result[number][0] for result in results]
        assert all(len(log) > 20 for log in logs)
        assert find_deadlock(logs) == "", _name(case)
        plan, _, less = case
        if less or plan.inputs[0].dtype == "int64":
            continue
        for rank, result in enumerate(results):
            log, trained = result[number]
            found = [each for each in log[:trained] if each.line.startswith("boundary")]
            expected = schedules.issued(schedule_of(plan), rank, BATCHES)
            assert [dataclasses.replace(each, what="") for each in found] == expected, _name(case)


@pytest.mark.slow
def test_replicas_have_no_deadlock():
    cases = [(ranks.plan(8, 2, name, 4, replicas=2), {"clip": 1.0}, (1,)) for name in ("1f1b", "2bw")]
    looped = ranks.plan(8, 2, "breadth-first", 4, replicas=2, loops=2)
    cases += [(looped, {"shard": True, "clip": 1.0}, (1,))]
    _check_no_deadlock(cases, 4)


@pytest.mark.slow
@pytest.mark.parametrize("replicas", [(2, 1), (1, 2), (2, 1, 1), (1, 3)])
def test_replicas_of_stages_have_no_deadlock(replicas):
    plans = [
        ranks.plan(8, len(replicas), name, count, in_turn=replicas)
        for name, count in (
            ("pipedream", math.lcm(*replicas)),
            ("2bw", 2 * sum(replicas) * math.lcm(*replicas)),
        )
    ]
    _check_no_deadlock([(plan, {}, ()) for plan in plans], sum(replicas))
    for plan in plans:
        logs = [schedules.issued(schedule_of(plan), rank, 3) for rank in range(plan.ranks)]
        assert find_deadlock(logs) == ""


def _check_no_deadlock(cases, world):
    results = ranks.run(_all_recorded, world, cases)
    assert not [result for result in results if isinstance(result, str)], results
    for number, case in enumerate(cases):
        assert find_deadlock([result[number][0] for result in results]) == "", _name(case)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "counts", "microbatches"),
    [("2bw", (2, 1), 6), ("2bw", (1, 2, 1), 6), ("2bw", (2, 2), 4), ("pipedream", (2, 1), 2)],
)
def test_stages_with_replicas_have_no_deadlock(name, counts, microbatches):
    plan = ranks.plan(8, len(counts), name, microbatches)
    stages = [
        dataclasses.replace(stage, replicas=count) for stage, count in zip(plan.stages, counts, strict=True)
    ]
    plan = dataclasses.replace(plan, ranks=sum(counts), stages=tuple(stages))
    results = ranks.run(_recorded, plan.ranks, plan, {}, ())
    assert not [result for result in results if isinstance(result, str)], results
    assert find_deadlock([log for log, _ in results]) == ""
    for rank, (log, trained) in enumerate(results):
        found = [each for each in log[:trained] if each.line.startswith("boundary")]
        expected = schedules.issued(schedule_of(plan), rank, BATCHES)
        assert [dataclasses.replace(each, what="") for each in found] == expected


@pytest.mark.parametrize("name", schedules.PUBLISHED)
@pytest.mark.parametrize("world", [2, 3, 8])
def test_no_order_on_paper_has_a_deadlock(name, world):
    row = schedules.PUBLISHED[name]
    microbatches = 1 if name == "pipedream" else 2 * world
    plan = ranks.plan(2 * world, world, name, microbatches, loops=row.loops + 1)
    logs = [schedules.issued(schedule_of(plan), rank, 3) for rank in range(world)]
    assert find_deadlock(logs) == ""


def _swapped(log, one, other):
    changed = [*log]
    changed[one], changed[other] = changed[other], changed[one]
    return changed


def test_a_wait_before_what_it_needs_is_found_where_it_is():
    logs = [schedules.issued(schedules.make("1f1b", 2, 2), rank, 1) for rank in range(2)]
    wait = next(place for place, each in enumerate(logs[1]) if each.call is Call.WAIT)
    logs[1].insert(0, logs[1].pop(wait))
    found = find_deadlock(logs)
    line = "boundary 0, ranks 0 and 1, forward"
    assert f"rank 1 waits for {line}, as its call 0, behind nothing that was issued" in found


@pytest.mark.parametrize("name", ["1f1b", "interleaved-1f1b", "2bw", "zb-h1"])
def test_swapped_calls_are_found_if_they_change_what_meets(name):
    """Of all pairs of neighbouring messages of one line that are swapped at one end, each is found."""
    row = schedules.PUBLISHED[name]
    plan = ranks.plan(8, 2, name, 4, loops=row.loops + 1)
    logs = [
        [dataclasses.replace(each, what=f"message {each.number}") for each in log]
        for log in (schedules.issued(schedule_of(plan), rank, 2) for rank in range(2))
    ]
    assert find_deadlock(logs) == ""
    tried = 0
    for rank, line in {(rank, each.line) for rank, log in enumerate(logs) for each in log}:
        calls = [n for n, each in enumerate(logs[rank]) if each.line == line and each.call is not Call.WAIT]
        for pair in zip(calls, calls[1:], strict=False):
            mutated = [_swapped(log, *pair) if number == rank else log for number, log in enumerate(logs)]
            one, other = (logs[rank][place].what for place in pair)
            found = find_deadlock(mutated)
            assert line in found and (one in found or other in found), (rank, pair, found)
            tried += 1
    assert tried > 20


def test_two_receives_of_one_line_in_another_order_are_found():
    logs = [
        [dataclasses.replace(each, what=f"message {each.number}") for each in log]
        for log in (schedules.issued(schedules.make("gpipe", 2, 3), rank, 1) for rank in range(2))
    ]
    assert find_deadlock(logs) == ""
    receives = [place for place, each in enumerate(logs[1]) if each.call is Call.RECEIVE][:2]
    logs[1] = _swapped(logs[1], *receives)
    found = find_deadlock(logs)
    assert "rank 0 sends message 0 on boundary 0" in found and "rank 1 receives message 1" in found


def test_both_directions_on_one_communicator_are_found():
    """Receives are asked for ahead, so a rank's gradients wait behind activations that it is to get later."""
    assert "rank 0 receives all, and rank 1 receives all" in find_deadlock(
        [_on_one_line(schedules.issued(schedules.make("zb-h1", 4, 4), rank, 1)) for rank in range(4)]
    )


def _on_one_line(log):
    numbers = {}
    for each in log:
        if each.call is not Call.WAIT:
            numbers[each.line, each.number] = len(numbers)
    return [dataclasses.replace(each, line="all", number=numbers[each.line, each.number]) for each in log]


def test_collectives_in_another_order_or_from_a_thread_are_found():
    def call(number, what, thread=0):
        return schedules.Issue(
            call=Call.TOGETHER, line="all", number=number, ranks=(0, 1), what=what, thread=thread
        )

    one, other = call(0, "sum"), call(1, "norm")
    assert find_deadlock([[one, other], [one, other]]) == ""
    swapped = [dataclasses.replace(other, number=0), dataclasses.replace(one, number=1)]
    assert "rank 0 calls a collective sum on all, and rank 1 calls a collective norm on all" in find_deadlock(
        [[one, other], swapped]
    )
    assert "rank 1 calls a collective sum on all, as its call 0, from a second thread" in find_deadlock(
        [[one], [call(0, "sum", thread=1)]]
    )
    assert "nobody takes part" in find_deadlock([[one], []])

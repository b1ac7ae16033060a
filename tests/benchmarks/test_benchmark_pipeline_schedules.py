"""Blocks that sleep part their backward as real ones do, and times of a timeline lead back to it."""

import argparse
import statistics

import pytest
import torch

from benchmarks import pipeline_schedules as benchmark
from squeezebox.pipeline._stage import Passage
from squeezebox.schedules import Kind, simulate

ARGUMENTS = argparse.Namespace(schedules=[], ranks=[4], microbatches=[8], forward=0.03, batches=5)
CASES = benchmark.cases(ARGUMENTS)
BLOCKS = {0.03: [(0.03, 0.06)], 0.015: [(0.015, 0.03)]}


def sleeps(case):
    """A rank each: the sleeps of the simulator's timeline."""
    found = []
    for spans in simulate(case.order(), case.costs()).spans:
        own = []
        for action, start, end in spans:
            count = benchmark._sleeps(action)
            own += [(start, end)] * count
        found.append(own)
    return found


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_sleeps_as_simulated_are_as_simulated(case):
    row = benchmark.row(case, [sleeps(case)], BLOCKS)
    assert row["error"] == pytest.approx(0.0, abs=1e-9)
    assert row["error_alone"] == pytest.approx(0.0, abs=1e-9)
    assert row["batches"] == 3
    assert row["wait_own"] == pytest.approx(0.0, abs=1e-9)
    waits = [row["mean"].get(each, 0.0) for each in ("own", "message")]
    assert waits == pytest.approx([0.0, 0.0], abs=1e-9)


def test_batches_without_wait_take_all_work_of_a_rank():
    case = next(case for case in CASES if case.name == "2bw")
    began = benchmark.starts(simulate(case.order(), case.costs()).spans[0])
    assert statistics.median(benchmark.periods(case, began)) == pytest.approx(8 * 3 * 0.03)


@pytest.mark.parametrize("first", [True, False])
def test_the_weights_gradient_sleeps_on_its_own(first):
    spans = []
    block = benchmark.SleepingBlock(0.0, spans)
    leaf = torch.ones(2, 4).requires_grad_(not first)
    passage = Passage(0, [], [leaf], [block(leaf)], [torch.ones(2, 4)])
    counts = [len(spans)]
    weights = list(block.parameters())
    passage.backward_to_inputs(weights)
    counts.append(len(spans))
    passage.backward_to_weights(weights)
    counts.append(len(spans))
    assert counts == ([1, 1, 3] if first else [1, 2, 3])
    assert block.scale.grad == 8.0
    actions = [each for each in CASES[4].order().orders[0 if first else 1] if each.microbatch == 0]
    expected = {each.kind: benchmark._sleeps(each) for each in actions if each.kind is not Kind.UPDATE}
    assert list(expected.values()) == [1, counts[1] - 1, counts[2] - counts[1]]


def test_the_table_names_what_missed_the_goal():
    rows = [benchmark.row(case, [sleeps(case)], BLOCKS) for case in CASES]
    rows[0]["error"] = 0.06
    found = benchmark.goals(rows)
    assert found["missed"] == ["gpipe, p = 4, m = 8"]
    assert found["two_bw_over_bubble_free"] == {"p = 4, m = 8": pytest.approx(1.0)}
    assert found["two_bw_throughput_over_1f1b"] == {"p = 4, m = 8": pytest.approx(11 / 8)}
    assert f"{len(rows) - 1} of {len(rows)}; not gpipe, p = 4, m = 8." in benchmark.table(rows)

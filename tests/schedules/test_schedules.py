"""Every schedule is whole and can be carried out, and takes what the papers say on paper."""

import dataclasses
from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from squeezebox.schedules import (
    PUBLISHED,
    SYNCHRONOUS,
    Action,
    Costs,
    Kind,
    breadth_first,
    from_csv,
    gathers,
    gpipe,
    interleaved,
    make,
    one_f_one_b,
    pipedream,
    placement,
    repeated,
    simulate,
    two_bw,
    validate,
    zero_bubble,
    zero_bubble_v,
)
from squeezebox.schema import FormatError, OptionError, PlanError

counts = st.integers(1, 6)


def all_schedules(ranks, rounds, loops, batches):
    yield gpipe(ranks, rounds, batches=batches)
    yield one_f_one_b(ranks, rounds, batches=batches)
    yield breadth_first(ranks, rounds, loops=loops, batches=batches)
    yield interleaved(ranks, ranks * rounds, loops=loops, batches=batches)
    yield zero_bubble(ranks, rounds, batches=batches)
    yield zero_bubble(ranks, rounds, doubled=True, batches=batches)
    yield zero_bubble_v(ranks, rounds, batches=batches)
    yield pipedream(ranks, batches=rounds * batches)
    yield pipedream(ranks, batches=rounds * batches, vertical_sync=True)
    yield two_bw(ranks, ranks + rounds - 1, batches=batches)


@given(ranks=counts, rounds=counts, loops=counts, batches=st.integers(1, 4))
def test_every_schedule_is_valid_and_ends(ranks, rounds, loops, batches):
    for schedule in all_schedules(ranks, rounds, loops, batches):
        validate(schedule)
        timeline = simulate(schedule, Costs.even(schedule.num_stages, transfer=0.25))
        for spans in timeline.spans:
            assert all(one.end <= two.start for one, two in zip(spans, spans[1:], strict=False))
        work = 3.0 * schedule.num_stages * schedule.microbatches * schedule.batches
        assert sum(map(timeline.busy, range(ranks))) == pytest.approx(work)
        assert all(timeline.live)


@pytest.mark.parametrize("ranks, microbatches", ((1, 1), (2, 4), (4, 8), (4, 16), (8, 16)))
def test_seconds_are_the_closed_forms(ranks, microbatches):
    """F = 1 and B = 2 a rank; looped schedules have half of that a stage."""
    whole, half = Costs.even(ranks), Costs.even(2 * ranks, forward=0.5, backward=1.0)
    filled = 3.0 * (microbatches + ranks - 1)
    looped = 3.0 * microbatches + 3.0 * (ranks - 1) / 2
    assert simulate(gpipe(ranks, microbatches), whole).seconds == filled
    assert simulate(one_f_one_b(ranks, microbatches), whole).seconds == filled
    assert simulate(breadth_first(ranks, microbatches, loops=2), half).seconds == looped
    assert (
        simulate(
            interleaved(ranks, microbatches, loops=2) if ranks > 1 else gpipe(1, 1),
            half if ranks > 1 else whole,
        ).seconds
        == looped
    )
    flowing = simulate(two_bw(ranks, microbatches, batches=5), whole)
    assert flowing.seconds == 15.0 * microbatches + 3.0 * (ranks - 1)
    assert simulate(zero_bubble(ranks, microbatches), whole).seconds == 3.0 * microbatches + ranks - 1


def waits(timeline):
    """Of each rank, between its first action and its last."""
    spans = [own[-1].end - own[0].start for own in timeline.spans]
    return [span - timeline.busy(rank) for rank, span in enumerate(spans)]


def most_live(schedule, rank):
    """Most microbatches with activations, and most of these with only weights' gradients to come."""
    live = pending = 0
    found = []
    for action in schedule.orders[rank]:
        live += (action.kind is Kind.FORWARD) - (action.kind is Kind.WEIGHT)
        pending += (action.kind is Kind.INPUT) - (action.kind is Kind.WEIGHT)
        found.append((live, pending))
    return max(live for live, _ in found), max(pending for _, pending in found)


@pytest.mark.parametrize("ranks", (1, 2, 4, 8))
def test_zero_bubbles_have_the_papers_waits_and_activations(ranks):
    """arXiv:2401.10241, table 1 and section 6; a stage of ZB-V is half as large, and F = I = W there."""
    microbatches = 2 * ranks + 3
    for forward, part in ((1.0, 1.0), (1.25, 1.0)):
        costs = Costs.even(ranks, forward=forward, backward=2 * part)
        once = simulate(zero_bubble(ranks, microbatches), costs)
        assert max(waits(once)) == (ranks - 1) * (forward + part - part)
        doubled = simulate(zero_bubble(ranks, microbatches, doubled=True), costs)
        assert max(waits(doubled)) == (ranks - 1) * (forward + part - 2 * part)
    half = Costs.even(2 * ranks, forward=0.5, backward=1.0)
    assert waits(simulate(zero_bubble_v(ranks, microbatches), half)) == [0.0] * ranks
    for rank in range(ranks):
        assert most_live(zero_bubble(ranks, microbatches), rank) == (ranks, rank + 1)
        assert most_live(zero_bubble(ranks, microbatches, doubled=True), rank) == (
            2 * ranks - 1,
            2 * rank + 1,
        )
        assert most_live(zero_bubble_v(ranks, microbatches), rank)[0] == 2 * ranks


def test_stages_in_a_v():
    schedule = make("zb-v", 3, 6, loops=2)
    assert schedule.placement == placement("zb-v", 3, 6) == (0, 1, 2, 2, 1, 0)
    assert placement("breadth-first", 3, 6) == (0, 1, 2, 0, 1, 2)
    assert simulate(schedule, Costs.even(6)).transfers == (12, 24, 12)
    with pytest.raises(OptionError, match="loops is 1, and zb-v has 2 stages a rank"):
        make("zb-v", 3, 6)


def test_what_lives_is_what_the_papers_say():
    even = Costs.even(4)
    assert simulate(gpipe(4, 8), even).live == (8, 8, 8, 8)
    assert simulate(one_f_one_b(4, 8), even).live == (4, 3, 2, 1)
    assert simulate(zero_bubble(4, 8), even).live == (4, 4, 4, 4)
    assert simulate(breadth_first(4, 8, loops=2), Costs.even(8)).live == (16,) * 4
    assert simulate(interleaved(4, 8, loops=2), Costs.even(8)).live[0] == 11  # of halves: 4 (1 + 3/8)
    sizes = dataclasses.replace(even, activation_bytes=(10, 20, 30, 40))
    assert simulate(one_f_one_b(4, 8), sizes).live_bytes == (40, 60, 60, 40)


def test_versions_of_the_weights():
    assert simulate(pipedream(4, batches=12), Costs.even(4)).versions == (4, 3, 2, 1)
    assert simulate(pipedream(4, batches=12, vertical_sync=True), Costs.even(4)).versions == (4, 3, 2, 1)
    assert simulate(two_bw(4, 4, batches=6), Costs.even(4)).versions == (2, 2, 2, 1)
    assert simulate(one_f_one_b(4, 8, batches=3), Costs.even(4)).versions == (1, 1, 1, 1)
    read = {a.microbatch // 4: a.version for a in two_bw(4, 4, batches=5).orders[2] if a.kind is Kind.FORWARD}
    assert read == {0: 0, 1: 0, 2: 1, 3: 2, 4: 3}


def test_what_crosses_and_what_is_gathered():
    timeline = simulate(one_f_one_b(4, 8), Costs.even(4))
    assert timeline.transfers == (8, 16, 16, 8)
    assert [gathers(breadth_first(4, 16, loops=2), rank) for rank in range(4)] == [3] * 4
    assert gathers(breadth_first(4, 16, loops=8), 0) == 15
    assert gathers(interleaved(4, 16, loops=2), 1) > 3 * gathers(breadth_first(4, 16, loops=2), 1)


def test_transfers_delay_what_needs_them():
    late = simulate(gpipe(3, 1), Costs.even(3, transfer=0.5))
    assert late.seconds == 9.0 + 4 * 0.5
    assert simulate(breadth_first(1, 2, loops=3), Costs.even(3, transfer=0.5)).seconds == 18.0  # one rank


def changed(schedule, rank, order):
    orders = [*schedule.orders]
    orders[rank] = tuple(order)
    return dataclasses.replace(schedule, orders=tuple(orders))


def test_a_schedule_that_is_not_whole_is_refused():
    schedule = one_f_one_b(2, 2)
    own = schedule.orders[1]
    for order, message in (
        (own[1:], "microbatch 0 passes stage 1 with 0 forward, 1 backward"),
        (own[:-1], "stage 1 is not updated once after batch 0"),
        ((*own, own[0]), "microbatch 0 passes stage 1 with 2 forward"),
        ((own[-1], *own[:-1]), "1U0 comes before all of its gradients"),
        ((own[1], own[0], *own[2:]), "1B0 comes before its forward"),
        (
            (dataclasses.replace(own[0], version=1), *own[1:]),
            "1F0 reads weights after 1 updates; there were 0",
        ),
        ((*own, Action(kind=Kind.FORWARD, stage=0, microbatch=0)), "rank 1 has 0F0, of a stage that is not"),
        ((*own, Action(kind=Kind.WEIGHT, stage=1, microbatch=9)), "a weight of microbatch 9"),
    ):
        with pytest.raises(PlanError, match=message):
            validate(changed(schedule, 1, order))


def test_ranks_that_wait_for_each_other_are_named():
    schedule = one_f_one_b(2, 2)
    f0, f1, b0, b1, update = schedule.orders[0]
    with pytest.raises(PlanError, match="rank 0 at 0B1, rank 1 at 1F1 wait for what no rank will do"):
        simulate(changed(schedule, 0, (f0, b0, b1, f1, update)), Costs.even(2))


def test_what_makes_no_pipeline_is_refused():
    with pytest.raises(OptionError, match="6 is no multiple"):
        interleaved(4, 6, loops=2)
    with pytest.raises(OptionError, match="2BW with 4 ranks"):
        two_bw(4, 3, batches=2)
    with pytest.raises(OptionError, match="ranks is 0"):
        gpipe(0, 3)
    with pytest.raises(PlanError, match="2 stages, and there are costs for 3 forwards"):
        simulate(gpipe(2, 2), Costs.even(3))


def test_csv_is_what_torch_reads():
    from torch.distributed.pipelining.schedules import _Action

    for schedule in (one_f_one_b(3, 5), breadth_first(2, 4, loops=2), zero_bubble(3, 4), zero_bubble_v(3, 4)):
        lines = schedule.to_csv().splitlines()
        assert len(lines) == schedule.num_ranks
        for line, order in zip(lines, schedule.orders, strict=True):
            read = [_Action.from_str(cell) for cell in line.split(",")]
            passes = [a for a in order if a.kind is not Kind.UPDATE]
            assert [(r.stage_index, r.microbatch_index) for r in read] == [
                (a.stage, a.microbatch) for a in passes
            ]
    with pytest.raises(PlanError, match="'2bw' cannot be exported: 0F3 reads the weights after 0 updates"):
        two_bw(3, 3, batches=3).to_csv()


@pytest.mark.parametrize("name", SYNCHRONOUS)
def test_csv_is_read_as_it_was_written(name):
    schedule = make(name, 4, 8, loops=2 if PUBLISHED[name].loops else 1)
    read = from_csv(schedule.to_csv(), name)
    assert read.orders == schedule.orders and read.placement == schedule.placement
    assert list(islice(read.turns(1, 2), 60)) == list(islice(schedule.turns(1, 2), 60))


@pytest.mark.parametrize(
    ("text", "error", "message"),
    (
        ("0F0,0UNSHARD,0B0", FormatError, "line 1 has '0UNSHARD', which is no pass of a microbatch"),
        ("0F0,0B0\n2F0,2B0", PlanError, r"has the stages \[0, 2\]; there must be all"),
        ("", PlanError, r"has the stages \[\]"),
        ("0F0,0B0\n0F1,0B1", PlanError, "of a stage that is not its own"),
        ("0F0,0B0,0F1", PlanError, "microbatch 1 passes stage 0 with 1 forward, 0 backward"),
    ),
)
def test_csv_that_is_no_schedule_is_refused(text, error, message):
    with pytest.raises(error, match=message):
        from_csv(text)


@pytest.mark.parametrize(
    "schedule",
    [gpipe(3, 4), zero_bubble(3, 4, batches=2), breadth_first(2, 4, loops=2)],
    ids=lambda each: each.name,
)
def test_orders_that_end_can_be_repeated(schedule):
    again = repeated(dataclasses.replace(schedule, turns=None))
    for rank in range(schedule.num_ranks):
        for batch in (0, 3):
            own, published = (islice(each.turns(rank, batch), 60) for each in (again, schedule))
            assert list(own) == list(published)


def test_what_does_not_flush_is_not_repeated():
    with pytest.raises(
        PlanError, match="'2bw' cannot be repeated: .* reads the weights after 0 updates, in batch 1"
    ):
        repeated(two_bw(3, 3, batches=3))
    broken = gpipe(2, 2)
    with pytest.raises(PlanError, match="is not updated once after batch 0"):
        repeated(dataclasses.replace(broken, orders=(broken.orders[0][:-1], broken.orders[1])))


def test_ranks_that_take_microbatches_in_different_orders_are_refused():
    schedule = gpipe(2, 3)

    def swapped(order, first):
        return (*order[:first], order[first + 1], order[first], *order[first + 2 :])

    first, second = schedule.orders
    for place, what in ((0, "forwards"), (3, "backwards")):
        other = dataclasses.replace(schedule, orders=(first, swapped(second, place)))
        with pytest.raises(PlanError, match=f"rank 0 takes the {what} of stage 0 in another order"):
            repeated(other)
        repeated(dataclasses.replace(schedule, orders=(swapped(first, place), swapped(second, place))))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"forward": (1.0, -1.0)}, "forward=-1.0"),
        ({"backward": (1.0, float("nan"))}, "backward=nan"),
        ({"transfer": -1.0}, "transfer=-1.0"),
        ({"transfer": (float("inf"),)}, "transfer=inf"),
    ],
)
def test_costs_that_are_no_seconds_are_refused(changed, message):
    costs = dataclasses.replace(Costs.even(2), **changed)
    with pytest.raises(PlanError, match=f"^{message} among the costs: give seconds"):
        simulate(gpipe(2, 2), costs)

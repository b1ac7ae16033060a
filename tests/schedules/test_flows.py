"""Closed forms of schedules against the schedules themselves, run on paper."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from squeezebox.schedules import FLOWS, PUBLISHED, Costs, Passes, Pipe, make, simulate

counts = st.integers(1, 6)


def made(name, pipe, batches=1):
    """The schedule, by the same name; of several batches where they go on without a flush."""
    filled = 0 if PUBLISHED[name].flushes else 2 * pipe.ranks + 3
    return make(name, pipe.ranks, pipe.microbatches, loops=pipe.loops, batches=filled + batches)


def suited(ranks, microbatches, loops):
    for name, flow in FLOWS.items():
        for pipe in (
            Pipe(ranks=ranks, loops=1, microbatches=microbatches),
            Pipe(ranks=ranks, loops=1, microbatches=1),
            Pipe(ranks=ranks, loops=loops, microbatches=microbatches),
            Pipe(ranks=ranks, loops=loops, microbatches=microbatches * ranks),
        ):
            if flow.suits(pipe):
                yield name, flow, pipe


def seconds_of(name, flow, pipe, forward, backward, transfer):
    """By closed form and by simulation, of one batch; for an endless schedule from batch to batch."""
    costs = Costs(forward=tuple(forward), backward=tuple(backward), transfer=transfer)
    passes = Passes(forward=forward, backward=backward, transfers=[transfer] * (len(forward) - 1))
    simulated = simulate(made(name, pipe), costs).seconds
    if not PUBLISHED[name].flushes:
        later = 5 * pipe.ranks  # over which the unevenness of one batch averages out
        simulated = (simulate(made(name, pipe, 1 + later), costs).seconds - simulated) / later
    return flow.seconds(pipe, passes), simulated


@given(ranks=counts, microbatches=counts, loops=st.integers(2, 4), seed=st.integers(0, 999))
def test_what_is_in_flight_is_what_lives(ranks, microbatches, loops, seed):
    """Counts and bytes of every rank, with stages of any size."""
    draw = random.Random(seed)
    for name, flow, pipe in suited(ranks, microbatches, loops):
        stages = pipe.ranks * pipe.loops
        sizes = tuple(draw.randint(1, 99) for _ in range(stages))
        costs = Costs(forward=(1.0,) * stages, backward=(2.0,) * stages, activation_bytes=sizes)
        timeline = simulate(made(name, pipe), costs)
        for rank in range(ranks):
            moments = flow.in_flight(pipe, rank)
            assert moments.sum(1).max() == timeline.live[rank], (name, pipe)
            own = flow.stages(pipe, rank)
            assert (moments @ [sizes[stage] for stage in own]).max() == timeline.live_bytes[rank], (
                name,
                pipe,
            )
            assert {timeline.versions[stage] for stage in own} == {flow.versions(pipe, rank)}


@given(ranks=counts, microbatches=counts, loops=st.integers(2, 4))
def test_even_stages_take_the_closed_forms(ranks, microbatches, loops):
    for name, flow, pipe in suited(ranks, microbatches, loops):
        stages = pipe.ranks * pipe.loops
        closed, simulated = seconds_of(name, flow, pipe, [1.0] * stages, [2.0] * stages, 0.0)
        assert closed == pytest.approx(simulated), (name, pipe)


@pytest.mark.parametrize(
    "transfer, spread, tolerance", ((0.1, 0.0, 0.05), (0.0, 0.1, 0.08), (0.0, 0.4, 0.25), (0.3, 0.4, 0.25))
)
@pytest.mark.parametrize("name", FLOWS)
def test_others_are_estimated(name, transfer, spread, tolerance):
    """Transfers of a thirtieth of a stage's seconds or a tenth; stages uneven by as much as ``spread``."""
    exact = name in ("gpipe", "breadth-first", "zb-h2", "zb-v")
    for seed in range(30):
        draw = random.Random(seed)
        ranks, microbatches = draw.randint(2, 6), draw.randint(1, 12)
        for each, flow, pipe in suited(ranks, microbatches, draw.randint(2, 4)):
            if each != name:
                continue
            forward = [draw.uniform(1 - spread, 1 + spread) for _ in range(pipe.ranks * pipe.loops)]
            backward = [draw.uniform(2 - spread, 2 + spread) * seconds for seconds in forward]
            closed, simulated = seconds_of(name, flow, pipe, forward, backward, transfer)
            assert closed == pytest.approx(simulated, rel=1e-9 if exact else tolerance), pipe

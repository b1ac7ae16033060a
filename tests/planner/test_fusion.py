"""Cupcake's program: equal to trying all groups and ways, and quick."""

import itertools
import random
import time
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from squeezebox.planner import Gradient, Group, Line, Way, evaluate_fusion, plan_fusion

SECONDS = st.floats(0.0, 3.0)
LINES = st.builds(Line, fixed=SECONDS, each=SECONDS)
WAYS = st.builds(
    Way,
    name=st.just("x"),
    level=st.just(1.0),
    pack=LINES,
    exchange=LINES,
    unpack=LINES,
    busy=LINES,
    noise=st.sampled_from([0.01, 0.1, 0.5]),
)


@st.composite
def problems(draw):
    ready, gradients = 0.0, []
    for name in range(draw(st.integers(1, 5))):
        ready += draw(SECONDS)
        numel, squares = draw(st.integers(1, 5)), draw(st.sampled_from([0.0, 0.1, 1.0, 2.5]))
        gradients.append(Gradient(name=str(name), numel=numel, ready_seconds=ready, squares=squares))
    exact = draw(WAYS.map(lambda way: replace(way, noise=0.0)))
    return gradients, [exact, *draw(st.lists(WAYS, max_size=2))], draw(st.sampled_from([0.0, 0.05, 0.2]))


def _by_trying(gradients, ways, noise):
    count = len(gradients)
    for cuts in itertools.product([False, True], repeat=count - 1):
        ends = [place + 1 for place, is_cut in enumerate(cuts) if is_cut] + [count]
        for chosen in itertools.product(ways, repeat=len(ends)):
            firsts = [0, *ends[:-1]]
            groups = [Group(first=a, end=b, way=way) for a, b, way in zip(firsts, ends, chosen, strict=True)]
            found = evaluate_fusion(gradients, groups)
            if found.noise <= noise * (1 + 1e-9):
                yield found.seconds


@given(problems())
@settings(deadline=None, max_examples=50)
def test_it_is_the_best_of_all(problem):
    gradients, ways, noise = problem
    plan = plan_fusion(gradients, ways, noise)
    best = min(_by_trying(gradients, ways, noise))
    assert plan.seconds == pytest.approx(best, rel=1e-9)
    assert best * (1 - 1e-9) <= plan.least_seconds * (1 + 2e-9)
    assert plan.noise <= noise * (1 + 1e-9)
    assert [group.first for group in plan.groups] == [0, *(group.end for group in plan.groups[:-1])]
    assert plan.groups[-1].end == len(gradients)
    near = plan_fusion(gradients, ways, noise, tolerance=0.1)
    assert best * (1 - 1e-9) <= near.seconds <= best / (1 - 0.1) * (1 + 1e-9)


def network(count, seed=0, backward=0.1):
    """Sizes as networks have them: many small ones between a few large ones."""
    generator = random.Random(seed)
    sizes = [generator.choice([64, 256, 4096, 2 ** generator.randint(12, 21)]) for _ in range(count)]
    ready, found = 0.0, []
    for place, numel in enumerate(sizes):
        ready += backward * (0.3 / count + 0.7 * numel / sum(sizes))
        squares = numel * generator.random()
        found.append(Gradient(name=str(place), numel=numel, ready_seconds=ready, squares=squares))
    return found


def ways(bytes_per_second, latency=1e-3):
    def way(name, nbytes, seconds, noise, calls):
        return Way(
            name=name,
            level=1.0,
            pack=Line(fixed=1e-4, each=seconds),
            exchange=Line(fixed=calls * latency, each=nbytes / bytes_per_second),
            unpack=Line(fixed=1e-4, each=2 * seconds),
            noise=noise,
        )

    return [
        way("plain", 4.0, 0.0, 0.0, 1),
        way("fp16", 2.0, 0.3e-9, 1e-7, 1),
        way("planes", 0.8, 1e-9, 0.01, 2),
        way("entropy", 0.5, 4e-9, 0.01, 2),
        way("top-k", 0.08, 2e-9, 0.9, 2),
    ]


def test_the_link_decides_how_gradients_go():
    """Packed over a slow link, as they are over a fast one, and never slower than any uniform way."""
    gradients = network(150)
    for speed, expected in ((1.25e7, {"entropy"}), (1.25e10, {"plain"})):
        plan = plan_fusion(gradients, ways(speed), 0.01, tolerance=0.005)
        elements = dict.fromkeys((way.name for way in ways(speed)), 0)
        for group in plan.groups:
            elements[group.way.name] += sum(each.numel for each in gradients[group.first : group.end])
        assert max(elements, key=elements.get) in expected
        layerwise, whole = (
            evaluate_fusion(gradients, [Group(first=a, end=a + n, way=way) for a in range(0, 150, n)]).seconds
            for n in (1, 150)
            for way in ways(speed)[:1]
        )
        assert plan.seconds <= min(layerwise, whole)
        assert plan.seconds <= plan.least_seconds * 1.006


def test_hundreds_of_gradients_take_no_time():
    begun = time.process_time()
    plan = plan_fusion(network(300), ways(1.25e8), 0.01, tolerance=0.005)
    assert time.process_time() - begun < 3.0  # 0.4 on a core that is free
    assert plan.seconds >= plan.least_seconds > 0.0


@pytest.mark.parametrize(("gradients", "noise"), [([], 0.1), (network(3), -1.0)])
def test_what_cannot_be_planned_is_refused(gradients, noise):
    with pytest.raises(ValueError, match="give at least one|add one that loses nothing"):
        plan_fusion(gradients, ways(1e9), noise)

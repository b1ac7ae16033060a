"""Plans fit their budgets, and the greedy ones are close to the optimum."""

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from squeezebox.planner import _greedy, floor, optimum, peak, smallest, solve
from squeezebox.schema import Action, Budget, BudgetError, Option, OptionError, Profile, TensorProfile

KEEP = Option(action=Action.KEEP, held_bytes=100, serves=True)


def option(rng, size):
    held = rng.randrange(0, size)
    noisy = rng.random() < 0.5
    return Option(
        action=Action.COMPRESS if noisy else Action.RECOMPUTE,
        held_bytes=held,
        working_bytes=size - held,
        packing_bytes=rng.randrange(size + 1),
        lasting=rng.random() < 0.2,
        seconds=rng.uniform(0.1, 1.0),
        noise=rng.uniform(0.0, 0.5) if noisy else 0.0,
        serves=not noisy and rng.random() < 0.7,
        approximates=noisy and rng.random() < 0.7,
    )


def again(rng, earlier, nbytes, tolerates=False):
    """Made from one or two tensors saved before."""
    sources = {tensor.key for tensor in rng.choices(earlier, k=2)}
    return Option(
        action=Action.RECOMPUTE,
        held_bytes=0,
        working_bytes=nbytes,
        making_bytes=rng.randrange(nbytes + 1),
        seconds=rng.uniform(0.05, 0.6),
        sources=tuple(sorted(sources)),
        serves=not tolerates,
        tolerates=tolerates,
    )


def chain(rng, count, options=3, size=100):
    """Tensors saved in forward order and used in backward order, as a network's are."""
    tensors = []
    for number in range(count):
        nbytes = rng.randrange(1, size)
        keep = Option(action=Action.KEEP, held_bytes=nbytes, serves=True)
        use = 2 * count - 1 - number
        life = {"saved_at": number, "first_use": use, "last_use": min(2 * count - 1, use + rng.randrange(4))}
        if life["last_use"] >= use + 2 and rng.random() < 0.7:
            life["gaps"] = ((use + 1, life["last_use"] - 1),)
        others = [option(rng, nbytes) for _ in range(rng.randrange(options))]
        for tolerates in (False, True):
            if tensors and rng.random() < 0.6 - 0.3 * tolerates:
                others.insert(rng.randrange(len(others) + 1), again(rng, tensors, nbytes, tolerates))
        tensors.append(TensorProfile(key=f"t{number}", options=(keep, *others), **life))
    base = tuple(rng.randrange(size) for _ in range(2 * count))
    return Profile(base_bytes=base, tensors=tuple(tensors))


def usage(profile, choices):
    """Bytes at every position, counted one by one."""
    begins = {tensor.key: tensor.first_use for tensor in profile.tensors}
    wanted = {tensor.key: tensor.first_use for tensor in profile.tensors if choices[tensor.key].sources}
    for tensor in reversed(profile.tensors):
        for source in choices[tensor.key].sources:
            wanted[source] = min(wanted.get(source, len(profile.base_bytes)), begins[tensor.key])
            begins[source] = min(begins[source], begins[tensor.key])

    def unpacked(tensor, position):
        if position >= wanted.get(tensor.key, len(profile.base_bytes)):
            return position <= tensor.last_use
        gone = any(first <= position <= last for first, last in tensor.gaps)
        return tensor.first_use <= position <= tensor.last_use and not gone

    return [
        base
        + sum(
            choices[t.key].held_bytes
            for t in profile.tensors
            if t.saved_at <= position <= t.last_use or choices[t.key].lasting
        )
        + sum(choices[t.key].working_bytes for t in profile.tensors if unpacked(t, position))
        + sum(choices[t.key].packing_bytes for t in profile.tensors if t.saved_at == position)
        + sum(choices[t.key].making_bytes for t in profile.tensors if begins[t.key] == position)
        for position, base in enumerate(profile.base_bytes)
    ]


def fits(profile, budget, choices):
    noise = sum(choice.noise for choice in choices.values())
    for choice in choices.values():
        held = [choices[source] for source in choice.sources]
        if not all(source.approximates if choice.tolerates else source.serves for source in held):
            return False
    return max(usage(profile, choices)) <= budget.peak_bytes and noise <= budget.noise * (1 + 1e-6)


def fitting(profile, budget):
    """All combinations that fit."""
    keys = [tensor.key for tensor in profile.tensors]
    combinations = itertools.product(*(tensor.options for tensor in profile.tensors))
    choices = (dict(zip(keys, combination, strict=True)) for combination in combinations)
    return [c for c in choices if fits(profile, budget, c)]


def everything(profile, budget):
    """Least seconds of all combinations that fit; None if none does."""
    found = fitting(profile, budget)
    return min((sum(choice.seconds for choice in c.values()) for c in found), default=None)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**6), share=st.floats(0.2, 1.1), noise=st.sampled_from((0.0, 0.3, 1.0)))
def test_small_profiles_against_every_combination(seed, share, noise):
    profile = chain(random.Random(seed), 5)
    kept = {tensor.key: tensor.options[0] for tensor in profile.tensors}
    budget = Budget(peak_bytes=int(share * max(usage(profile, kept))), noise=noise)
    least = everything(profile, budget)
    if least is None:
        for planner in (solve, optimum):
            with pytest.raises(BudgetError, match="smallest"):
                planner(profile, budget)
        return
    best = optimum(profile, budget)
    assert fits(profile, budget, best.choices)
    assert best.predicted_seconds == pytest.approx(least, rel=1e-3, abs=1e-9)
    try:
        quick = solve(profile, budget)
    except BudgetError:  # it is no exact search; networks' profiles are tested below
        return
    assert fits(profile, budget, quick.choices)
    assert quick.predicted_peak_bytes == max(usage(profile, quick.choices))
    assert quick.predicted_seconds >= least - 1e-9


def network(seed, count=40):
    """Options in the proportions that codecs and recomputation have: small ones cost seconds and noise."""
    rng, tensors = random.Random(seed), []
    for number in range(count):
        size = rng.choice((200, 400, 800, 1600, 3200)) * 1000
        life = {"saved_at": number, "first_use": 2 * count - 1 - number, "last_use": 2 * count - 1 - number}
        cost = size * rng.uniform(0.8, 1.2) * 1e-9
        options = [Option(action=Action.KEEP, held_bytes=size, serves=True)]
        for ratio, noise in ((8, 1e-5), (14, 1e-4), (22, 1e-3)):
            amount = noise * rng.uniform(0.3, 3.0)
            options.append(
                Option(
                    action=Action.COMPRESS,
                    bound=noise,
                    held_bytes=size // ratio,
                    working_bytes=size,
                    seconds=cost * (1 - ratio / 100),
                    noise=amount,
                )
            )
        if number % 3:
            recompute = {"held_bytes": 0, "working_bytes": 2 * size, "seconds": cost * rng.uniform(0.3, 6.0)}
            sources = (f"t{number - 1}",)
            options.append(Option(action=Action.RECOMPUTE, sources=sources, serves=True, **recompute))
        tensors.append(TensorProfile(key=f"t{number}", options=tuple(options), **life))
    base = tuple(5_000_000 + rng.randrange(4_000_000) for _ in range(2 * count))
    return Profile(base_bytes=base, tensors=tuple(tensors))


@pytest.mark.every(3)
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))])
@pytest.mark.parametrize("share", (0.8, 0.5, 0.3))
def test_greedy_is_near_the_optimum_on_networks(seed, share):
    profile = network(seed)
    kept = {tensor.key: tensor.options[0] for tensor in profile.tensors}
    budget = Budget(peak_bytes=int(share * max(usage(profile, kept))), noise=1e-2)
    quick, best = solve(profile, budget), optimum(profile, budget, gap=2e-3)
    assert fits(profile, budget, quick.choices)
    assert quick.predicted_seconds <= 1.1 * best.predicted_seconds


CHOSEN = {  # the place of each tensor's option, as a letter
    ("network", 0.8): "aaaaaaaaaddaaaaadaaaaaaaaaaaaedadaaddaea",
    ("network", 0.5): "dadacdaadaaeadaadcccaacdacaaaedadadccaea",
    ("network", None): "cbdbcdccccccbccdccccccccccccccdcbddcccca",
    ("chain", 0.8): "aaaacdaaaaabaaabbaaaaaaaaaaaaa",
    ("chain", 0.5): "aabbcdbbababcaabbbaaaaaaabaaaa",
    ("chain", None): "aabbcdbbabaacaabcbbacaabbbbaaa",
}


@pytest.mark.parametrize(("name", "share"), CHOSEN)
def test_choices_are_those_of_a_slower_search(name, share):
    """A search that shares less between its moves, and makes the same ones, chose these."""
    profile = network(4) if name == "network" else chain(random.Random(7), 30)
    kept = max(usage(profile, {tensor.key: tensor.options[0] for tensor in profile.tensors}))
    if share is None:
        plan = smallest(profile, 1e-2)
    else:
        plan = solve(profile, Budget(peak_bytes=int(share * kept), noise=1e-2))
    places = [tensor.options.index(plan.choices[tensor.key]) for tensor in profile.tensors]
    assert "".join("abcdefgh"[place] for place in places) == CHOSEN[name, share]


def test_a_hopeless_search_ends(monkeypatch):
    """A hair above what no plan can go below, choices are repaired until their moves are used up."""
    profile, moves, made = network(4), _greedy._moves, []
    monkeypatch.setattr(_greedy, "_MOVES", 2)
    monkeypatch.setattr(
        _greedy, "_moves", lambda *given: [made.append(each) or each for each in moves(*given)]
    )
    with pytest.raises(BudgetError, match="no plan keeps"):
        solve(profile, Budget(peak_bytes=floor(profile, 1e-2) + 1, noise=1e-2))
    assert 2 * len(profile.tensors) <= len(made) < 4 * len(profile.tensors)


def test_nothing_to_choose_fits():
    assert solve(Profile(base_bytes=(10, 50, 20), tensors=()), Budget(peak_bytes=50)).choices == {}


def test_the_error_says_what_would_be_enough():
    profile = Profile(
        base_bytes=(10, 50, 20),
        tensors=(TensorProfile(key="a", saved_at=0, first_use=1, last_use=2, options=(KEEP,)),),
    )
    with pytest.raises(BudgetError, match="150 bytes, at position 1, of which 50"):
        solve(profile, Budget(peak_bytes=120))
    assert solve(profile, Budget(peak_bytes=150)).predicted_peak_bytes == 150


@pytest.mark.parametrize("life", [(0, 2, 1), (0, 0, 9), (-1, 0, 1)])
def test_lives_outside_the_step_are_refused(life):
    saved_at, first_use, last_use = life
    tensor = TensorProfile(
        key="a", saved_at=saved_at, first_use=first_use, last_use=last_use, options=(KEEP,)
    )
    with pytest.raises(OptionError, match="life"):
        solve(Profile(base_bytes=(0, 0), tensors=(tensor,)), Budget(peak_bytes=1000))


@settings(max_examples=15)
@given(st.integers(0, 10**9), st.integers(1, 8))
def test_the_least_peak_is_not_above_that_of_holding_least(seed, count):
    profile = chain(random.Random(seed), count)
    lean = {
        tensor.key: min(
            (option for option in tensor.options if not option.noise and not option.sources),
            key=lambda option: (option.held_bytes, option.working_bytes + option.packing_bytes),
        )
        for tensor in profile.tensors
    }
    assert smallest(profile, 0.0).predicted_peak_bytes <= 1.002 * peak(profile, lean) + 1


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**9), st.integers(1, 4), st.sampled_from((0.0, 0.3, 1.0)))
def test_no_combination_at_all_is_below_the_floor(seed, count, noise):
    profile = chain(random.Random(seed), count)
    peaks = [max(usage(profile, c)) for c in fitting(profile, Budget(peak_bytes=10**9, noise=noise))]
    assert all(floor(profile, noise) <= each for each in peaks)

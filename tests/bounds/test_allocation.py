"""allocate(): never above the noise, never above the caps, and the optimum where it is known."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from squeezebox.bounds import allocate, rate_slope
from squeezebox.schema import Role, TensorStatistics


def tensor(key, numel=1000, nonzero=1.0, rms=1.0):
    return TensorStatistics(key=key, role=Role.CONV_INPUT, numel=numel, nonzero=nonzero, rms=rms)


@st.composite
def instances(draw):
    count = draw(st.integers(1, 8))
    tensors = [
        tensor(
            str(number),
            draw(st.integers(1, 10**8)),
            draw(st.floats(1e-6, 1.0)),
            draw(st.one_of(st.just(0.0), st.floats(1e-6, 1e6))),
        )
        for number in range(count)
    ]
    costs = {str(number): draw(st.one_of(st.just(0.0), st.floats(1e-12, 1e12))) for number in range(count)}
    if draw(st.booleans()):
        costs.pop("0")
    return draw(st.floats(1e-9, 1.0)), tensors, costs, draw(st.floats(1e-3, 2.0))


@given(instances())
def test_noise_and_caps_are_kept(instance):
    noise, tensors, costs, share = instance
    bounds = allocate(noise, tensors, costs, highest_share=share)
    assert set(bounds) == {each.key for each in tensors if each.rms > 0.0}
    assert sum(costs.get(key, 0.0) * bound**2 for key, bound in bounds.items()) <= noise * (1 + 1e-9)
    for each in tensors:
        if each.rms > 0.0:
            assert 0.0 < bounds[each.key] <= share * each.rms * (1 + 1e-12)


@given(instances())
def test_no_noise_is_left_where_a_bound_could_still_grow(instance):
    noise, tensors, costs, share = instance
    bounds = allocate(noise, tensors, costs, highest_share=share)
    spent = sum(costs.get(key, 0.0) * bound**2 for key, bound in bounds.items())
    at_cap = all(
        costs.get(each.key, 0.0) == 0.0 or bounds[each.key] >= share * each.rms * (1 - 1e-9)
        for each in tensors
        if each.rms > 0.0
    )
    assert at_cap or spent >= noise * (1 - 1e-9)


def bits(tensors, bounds):
    """The log-rate model: one bit more for every halving of the bound."""
    return sum(-each.numel * each.nonzero * math.log2(bounds[each.key]) for each in tensors)


def brute_force(noise, tensors, costs, caps, steps=120):
    """The best split of the noise between two tensors on a fine grid, caps respected."""
    best = math.inf
    for step in range(1, steps * 10):
        share = step / (steps * 10)
        bounds = {
            each.key: min(math.sqrt(part * noise / costs[each.key]), caps[each.key])
            for each, part in zip(tensors, (share, 1 - share), strict=True)
        }
        best = min(best, bits(tensors, bounds))
    return best


@given(
    st.tuples(st.integers(1, 1000), st.integers(1, 1000)),
    st.tuples(st.floats(0.1, 1.0), st.floats(0.1, 1.0)),
    st.tuples(st.floats(1e-3, 1e3), st.floats(1e-3, 1e3)),
    st.floats(1e-8, 1e-5),
    st.tuples(st.floats(0.1, 10.0), st.floats(0.1, 10.0)),
)
def test_two_tensors_get_the_split_of_a_brute_force_search(numels, nonzeros, costs, noise, rms):
    """Bounds far below the rms, or at the cap: there the rate is logarithmic."""
    tensors = [tensor(k, *rest) for k, *rest in zip("ab", numels, nonzeros, rms, strict=True)]
    costs = dict(zip("ab", costs, strict=True))
    caps = {each.key: 0.02 * each.rms for each in tensors}
    bounds = allocate(noise, tensors, costs, highest_share=0.02)
    total = sum(each.numel * each.nonzero for each in tensors)
    assert bits(tensors, bounds) <= brute_force(noise, tensors, costs, caps) + 1e-3 * total


def test_shares_of_the_noise_go_by_nonzero_elements():
    tensors = [tensor("a", 3000), tensor("b", 4000, 0.25)]
    costs = {"a": 7.0, "b": 0.3}
    bounds = allocate(1e-9, tensors, costs, highest_share=0.5)
    assert costs["a"] * bounds["a"] ** 2 == pytest.approx(0.75e-9, rel=1e-6)
    assert costs["b"] * bounds["b"] ** 2 == pytest.approx(0.25e-9, rel=1e-6)


def test_a_flat_rate_gets_less():
    assert rate_slope(0.0) == 1.0
    assert rate_slope(0.1) > rate_slope(0.5) > rate_slope(2.0) > 0.0


def test_a_tensor_of_zeros_gets_no_noise():
    zeros, other = tensor("zeros", nonzero=0.0), tensor("other")
    assert allocate(0.5, [zeros], {"zeros": 1.0}, highest_share=1.0) == {"zeros": 0.0}
    assert allocate(1e3, [zeros, other], {"zeros": 1.0, "other": 1.0}, highest_share=1.0) == {
        "zeros": 0.0,
        "other": 1.0,
    }

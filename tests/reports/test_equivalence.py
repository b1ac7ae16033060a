import math

import pytest

from squeezebox.reports import _audit_statistics as tested


@pytest.mark.parametrize(
    ("probability", "freedom", "expected"),
    [(0.95, 1, 6.3138), (0.95, 4, 2.1318), (0.975, 4, 2.7764), (0.95, 9, 1.8331), (0.975, 200, 1.9719)],
)
def test_t_quantiles_are_those_of_the_tables(probability: float, freedom: int, expected: float) -> None:
    assert tested.t_quantile(probability, freedom) == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("t", [-3.0, -0.5, 0.0, 0.5, 3.0])
def test_one_degree_of_freedom_is_cauchy_and_two_has_a_root(t: float) -> None:
    assert tested.t_distribution(t, 1) == pytest.approx(0.5 + math.atan(t) / math.pi, abs=1e-9)
    assert tested.t_distribution(t, 2) == pytest.approx(0.5 + t / (2 * math.sqrt(2 + t * t)), abs=1e-9)


def test_p_is_never_below_zero() -> None:
    for count in range(3, 40):
        found = [tested.p_different([t - 1e-3, t + 1e-3, *[t] * (count - 2)]) for t in (0.01, 0.1, 1.0, 1e5)]
        assert min(found) >= 0.0


def test_a_worked_example() -> None:
    # mean 0.2, deviation sqrt(0.025), error sqrt(0.005), t(0.95, 4) = 2.13185
    found = tested.equivalence([0.0, 0.1, 0.2, 0.3, 0.4], margin=0.4)
    half = 2.131847 * math.sqrt(0.005)
    assert (found.low, found.high) == (pytest.approx(0.2 - half), pytest.approx(0.2 + half))
    assert found.equivalent
    assert found.p_value < tested.LEVEL
    assert found.least_margin == pytest.approx(0.2 + half)


def test_the_verdict_turns_where_p_crosses_the_level() -> None:
    differences = [-0.01, 0.02, 0.015, -0.005, 0.01, 0.003]
    edge = tested.equivalence(differences, margin=1.0).least_margin
    inside, outside = (tested.equivalence(differences, margin=edge * f) for f in (1.001, 0.999))
    assert inside.equivalent and inside.p_value < tested.LEVEL
    assert not outside.equivalent and outside.p_value > tested.LEVEL


def test_a_difference_beyond_the_margin_is_never_equivalent() -> None:
    found = tested.equivalence([-0.5, -0.5, -0.5], margin=0.1)
    assert not found.equivalent
    assert found.p_value == 1.0


def test_power_grows_with_seeds_and_equal_runs_always_pass() -> None:
    few, many = (tested.power(math.sqrt(2), 1.0, count) for count in (5, 40))
    assert few < 0.2
    assert many > 0.95
    assert tested.power(0.0, 1.0, 5) == 1.0


def test_one_difference_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 2"):
        tested.equivalence([0.1], margin=1.0)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_differences_that_are_no_numbers_are_refused(value: float) -> None:
    with pytest.raises(ValueError, match="not finite"):
        tested.equivalence([0.1, 0.2, value], margin=1.0)
    assert tested.equivalence([0.1, 0.2, 0.3], margin=math.nan).p_value == 1.0


def test_equal_differences_have_the_p_of_flipped_signs() -> None:
    assert tested.p_different([0.0] * 4) == 1.0
    assert tested.p_different([0.9 - 0.8, 0.8 - 0.7, 0.7 - 0.6]) == 0.25  # equal but for rounding
    assert tested.p_different([-0.02] * 6) == 2 / 2**6

"""The beam that looks for rewrites, and what it has found when its time is over."""

import pytest

from squeezebox.rewriting._search import best

SAVES = {"a": 10, "b": 30, "c": 5}


def costs(most):
    """Estimates of sets of rewrites, and TimeoutError after so many."""
    made = []

    def cost(members):
        if len(made) == most:
            raise TimeoutError
        made.append(members)
        return 100 - sum(SAVES[name] for name in members), 0

    return cost


@pytest.mark.parametrize(
    ("most", "members", "peaks"),
    [
        (99, ("b", "a", "c"), (100, 70, 60, 55)),
        (6, ("b", "a"), (100, 70, 60)),
        (5, ("b",), (100, 70)),  # one of the pairs is not estimated
        (4, ("b",), (100, 70)),
    ],
)
def test_the_best_so_far(most, members, peaks):
    found = best(SAVES, costs(most))
    assert found.members == members
    assert tuple(peak for peak, _ in found.costs) == peaks


@pytest.mark.parametrize("most", [0, 3])
def test_no_time_for_the_model_as_it_is(most):
    with pytest.raises(TimeoutError):
        best(SAVES, costs(most))

"""What the check of a rewritten model compares."""

import pytest
import torch

from squeezebox.rewriting._check import Outcome, error

INF, NAN = float("inf"), float("nan")


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        ([1.0, -INF, 4.0], [1.0, -INF, 4.0], 0.0),
        ([1.0, -INF, 4.0], [2.0, -INF, 4.0], 0.25),
        ([1.0, -INF, 4.0], [1.0, INF, 4.0], INF),
        ([1.0, -INF, 4.0], [1.0, 0.0, 4.0], INF),
        ([1.0, NAN, 4.0], [3.0, NAN, 4.0], 0.5),
        ([1.0, NAN, 4.0], [1.0, 0.0, 4.0], INF),
        ([1.0, 0.0, 4.0], [1.0, NAN, 4.0], INF),
        ([-INF], [-INF], 0.0),
        ([NAN, INF], [NAN, INF], 0.0),
    ],
)
def test_what_is_infinite_hides_no_difference(before, after, expected):
    one, other = (Outcome([torch.tensor(each), torch.ones(2)], [], []) for each in (before, after))
    assert error([one], [other]) == pytest.approx(expected)

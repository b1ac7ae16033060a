"""Heights that use the memory and never more, for peaks that bend and jump."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from squeezebox.schema import BudgetError
from squeezebox.streaming._plan import fitting_height

LINES = st.lists(st.tuples(st.integers(0, 10_000), st.integers(1, 500)), min_size=1, max_size=4)


@given(
    lines=LINES,
    jump=st.tuples(st.integers(2, 3000), st.integers(0, 20_000)),
    rows=st.integers(1, 5000),
    unit=st.integers(1, 200),
    memory=st.integers(1, 300_000),
    held=st.integers(0, 5000),
)
def test_what_is_taken_was_measured_and_fits(lines, jump, rows, unit, memory, held):
    measured = {}

    def peak(height):
        assert 1 <= height <= rows
        bent = max(fixed + slope * height for fixed, slope in lines)
        measured[height] = bent + (jump[1] if height >= jump[0] else 0)
        return measured[height]

    if peak(1) > memory - held:
        with pytest.raises(BudgetError):
            fitting_height(peak, rows, unit, memory, held)
        return
    height, nbytes = fitting_height(peak, rows, unit, memory, held)
    assert nbytes == measured[height] <= memory - held
    assert len(measured) < 40
    if jump[1] == 0:
        # What is aimed at, rounded down to the unit, spread evenly, and not improved by less than a tenth.
        most = max(each for each in range(1, rows + 1) if peak(each) <= 0.9 * (memory - held) or each == 1)
        assert height >= most // 2


@pytest.mark.parametrize("seed", range(8))
def test_peaks_that_are_measured_inexactly_lead_to_no_height_far_beyond_the_memory(seed):
    draw, tried = random.Random(seed), []

    def peak(height):
        tried.append(40 * height)
        return round(40 * height * draw.uniform(0.7, 1.1))

    for _ in range(100):
        fitting_height(peak, 2048, 4, 48_000, 0)
    assert max(tried) < 1.3 * 48_000

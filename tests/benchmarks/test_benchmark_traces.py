"""Recorded steps of the benchmarks' networks, and how low they can be laid out."""

import pytest

from benchmarks.traces import NAMES, laid_out, traces


@pytest.mark.slow
def test_a_recorded_step_is_laid_out_at_its_bound():
    found = laid_out("gpt", traces(["gpt"])["gpt"])
    assert found["storages"] > 500
    assert found["over_bound"] <= 0.005
    assert found["lower_bound_bytes"] >= found["peak_bytes"]
    assert len(NAMES) == 6

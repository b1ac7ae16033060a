"""What follows from formulas alone equals what was published, and the rest says why it does not."""

import pytest

from benchmarks import pipeline_paper as paper


def test_published_closed_forms_and_counts_are_met():
    rows = [*paper.cheap()]
    exact = [row for row in rows if not row.note]
    assert len(exact) > 25
    for row in exact:
        assert row.error == pytest.approx(0.0, abs=0.006), row
    assert all(row.note for row in rows if row.ours is None)


def test_a_row_tells_its_error_or_that_it_has_none():
    row = paper.Row(source="a", figure="b", published=2.0, ours=1.0)
    assert row.error == -0.5
    limit = paper.Row(source="a", figure="b", published=2.0, ours=1.0, limit=True)
    missing = paper.Row(source="a", figure="b", published=2.0, ours=None, note="c")
    assert limit.error is missing.error is None
    lines = paper.table([missing, row, limit]).splitlines()
    assert "-50.0 %" in lines[2]
    assert "within" in lines[3]
    assert "not reproduced" in lines[4]


def test_thirty_billion_parameters_fit_with_two_versions_of_weights():
    """28.2B on 64 ranks: 24 B a parameter and 64 MiB of stage inputs."""
    stage = paper.stage_block(layers=35, state=16)
    assert stage.parameter_bytes // 2 * 64 == pytest.approx(28.2e9, rel=0.001)
    held, whole = paper.held_gib(layers=35, state=16)
    assert held == pytest.approx((24 * 35 * 12 * 1024**2 + 64 * 2**20) / 2**30)
    assert held < whole < 16

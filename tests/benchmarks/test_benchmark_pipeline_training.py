"""What is counted and shown of curves, and the learning rate on its way."""

import pytest

from benchmarks import pipeline_training as benchmark

CURVE = [(25, 3.0), (50, 2.0), (75, 2.1)]


def test_batches_are_counted_to_the_first_validation_as_low():
    assert benchmark.batches_to(2.5, CURVE) == 50
    assert benchmark.batches_to(3.0, CURVE) == 25
    assert benchmark.batches_to(1.9, CURVE) is None


def test_the_rate_rises_to_its_highest_and_falls_to_a_tenth():
    setup = benchmark.Setup(batches=100, rising=10, rate=1.0)
    rates = [setup.rate_at(batch) for batch in range(101)]
    assert rates[0] == pytest.approx(0.1)
    assert rates[9] == rates[10] == pytest.approx(1.0)
    assert rates[:10] == sorted(rates[:10])
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert rates[-1] == pytest.approx(0.1)


def test_bars_go_from_the_lowest_loss_to_the_highest():
    assert benchmark.sparkline([2.0, 3.0, 2.5], 2.0, 3.0) == "▁█▅"
    assert benchmark.sparkline([2.0], 2.0, 2.0) == "▁"


def test_the_table_has_a_line_a_run_and_what_it_lost():
    runs = [
        {
            "arm": arm,
            "seed": 0,
            "rate": 1e-3,
            "validation": [(25, 3.0), (50, 2.0 + number / 10)],
            "batches_to_target": 50 if number < 2 else None,
        }
        for number, arm in enumerate(benchmark.ARMS)
    ]
    shown = benchmark.table(benchmark.Setup(), 2.15, runs[:1], runs[::-1])
    lines = shown.splitlines()[-4:]
    assert [line.split(" | ")[0][2:] for line in lines] == [*benchmark.ARMS]
    assert "| 2.100 | +0.100 | 50 |" in lines[1]
    assert "not reached" in lines[3]
    assert "0.001: 2.000" in shown

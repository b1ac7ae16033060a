"""Statistics of audits on numbers made for it: rates of errors, shares, intervals."""

import dataclasses
import json

import numpy as np
import pytest

from squeezebox.reports import EVERYTHING, AuditRecord, analyse
from squeezebox.reports import _audit_statistics as statistics
from squeezebox.reports import _audit_statistics as tested

TRIALS = 600


def trials(shift, *, count=10, drift=1.0):
    """(differences, plain's deviation): plain spreads by 1, and an arm drifts from it by ``drift``."""
    generator = np.random.default_rng(0)
    for _ in range(TRIALS):
        plain = generator.standard_normal(count)
        yield shift + drift * generator.standard_normal(count), float(plain.std(ddof=1))


def equivalent(shift, units, **options):
    """Share of trials found equivalent, with the margin's own uncertainty."""
    found = 0
    for differences, spread in trials(shift, **options):
        count = len(differences)
        uncertainty = units * tested.deviation_uncertainty(spread, count)
        test = tested.equivalence(list(differences), units * spread, margin_uncertainty=uncertainty)
        found += test.equivalent
    return found / TRIALS


def test_equal_arms_are_called_different_at_the_level():
    alarms = sum(tested.p_different(list(differences)) < 0.05 for differences, _ in trials(0.0))
    assert 0.03 < alarms / TRIALS < 0.07


@pytest.mark.parametrize("drift", [0.5, 1.0, 1.4])
def test_a_difference_as_large_as_the_margin_passes_no_more_often_than_the_level(drift):
    assert equivalent(1.0, 1.0, drift=drift) < 0.07


def test_power_is_what_the_test_says_of_itself_and_seeds_needed_reach_it():
    assert equivalent(0.0, 1.0, drift=0.5) > 0.8
    needed = tested.seeds_needed(1.4, 1.0, 1.0)
    assert 10 < needed < 40
    assert equivalent(0.0, 1.0, drift=1.4, count=needed) == pytest.approx(0.8, abs=0.08)
    assert tested.seeds_needed(100.0, 1.0, 1.0) is None
    assert 800 < tested.seeds_needed(10.0, 1.0, 1.0) <= 1000


def test_a_deviations_lower_limit_holds_as_often_as_it_says():
    generator = np.random.default_rng(0)
    held = 0
    for _ in range(4000):
        spread = float(generator.standard_normal(6).std(ddof=1))
        held += spread - tested.deviation_uncertainty(spread, 6) < 1.0
    assert held / 4000 == pytest.approx(0.95, abs=0.015)


def test_sums_of_squares_add_up_and_find_what_was_put_in():
    seeds = np.arange(6.0)
    shares = statistics.sums_of_squares(seeds, seeds + 3.0)
    total = 2 * 17.5 + 12 * 1.5**2
    assert shares == pytest.approx({"seeds": 35 / total, "compression": 27 / total, "interaction": 0.0})
    for equal in (np.zeros(3), np.full(7, 0.93), np.array([0.1 + 0.2, 0.3, 0.3])):
        assert statistics.sums_of_squares(equal, equal[::-1]) == dict.fromkeys(shares, 0.0)


def test_variance_shares_are_of_variances():
    assert statistics.variance_shares({"a": 1.0, "b": 2.0}) == {"a": 0.2, "b": 0.8}
    assert statistics.variance_shares({"a": 0.0}) == {"a": 0.0}


def test_holms_adjustment_of_a_worked_example():
    assert statistics.holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])


def test_intervals_hold_the_figure_and_shrink_to_it_where_nothing_varies():
    values = np.random.default_rng(0).standard_normal(20)
    found = statistics.mean(values)
    assert found.low < found.value < found.high
    same = statistics.spread(np.full(5, 0.1))
    assert same.low == same.value == same.high == 0.0


def test_means_of_pairs_leave_out_a_training_with_itself():
    matrix = np.array([[0.0, 1.0, 2.0], [1.0, 0.0, 3.0], [2.0, 3.0, 0.0]])
    found = statistics.mean_of_pairs(matrix)
    assert found.value == 2.0 and found.low >= 1.0 and found.high <= 3.0


def test_few_seeds_make_no_false_alarms_of_classes():
    generator, alarms = np.random.default_rng(0), 0
    targets = np.repeat(np.arange(20), 30)

    def drawn(arm):
        right = generator.random((3, len(targets))) < 0.9
        wrong = (np.flatnonzero(~each) for each in right)
        made = (record(arm, EVERYTHING, seed, chosen, targets) for seed, chosen in enumerate(wrong))
        return list(made)

    for _ in range(60):
        parts = statistics.part_changes(drawn("plain"), drawn("other"), targets)
        alarms += any(part.adjusted_p < 0.05 for part in parts)
    assert alarms <= 6


def record(arm, series, seed, wrong, targets=None):
    """A training that puts the samples ``wrong`` of 200 into the other class."""
    targets = np.arange(200) % 2 if targets is None else targets
    predictions = targets.copy()
    predictions[list(wrong)] ^= 1
    return AuditRecord(
        arm=arm,
        series=series,
        seed=seed,
        predictions=predictions,
        targets=targets,
        groups=np.array([], dtype=np.str_),
        weights=np.ones(1, dtype=np.float32),
        score=float((predictions == targets).mean()),
        finite=True,
        digest=str(sorted(wrong)),
        seconds=1.0,
    )


@pytest.mark.parametrize(("changed", "exceeds"), [(0, False), (4, None), (60, True)])
def test_an_arm_exceeds_the_tooling_where_their_churns_are_apart(changed, exceeds):
    plain = [record("plain", EVERYTHING, seed, range(seed)) for seed in range(5)]
    tooling = [
        record("plain", "implementation", seed, range(4 * seed - 4, 4 * seed)) for seed in (1, 2, 3, 4)
    ]
    other = [record("other", EVERYTHING, seed, range(seed + changed)) for seed in range(5)]
    found = analyse([*plain, *tooling, *other], 1.0, {}).comparisons[0]
    assert found.churn.value == changed / 200 and found.exceeds_tooling is exceeds
    without = analyse([*plain, *tooling[:1], *other], 1.0, {})
    assert without.comparisons[0].exceeds_tooling is None


def test_infinite_outputs_and_factors_without_effect_are_noted():
    plain = [record("plain", EVERYTHING, seed, range(seed)) for seed in range(3)]
    same = [record("plain", "order", seed, ()) for seed in (1, 2)]
    broken = [dataclasses.replace(each, arm="other", finite=False) for each in plain]
    notes = analyse([*plain, *same, *broken], 1.0, {}).notes
    assert (
        notes[0].startswith("NaN or infinite outputs or weights in 3 of 8")
        and "varying order changed" in notes[1]
    )


def test_a_diverged_arm_is_told_as_one_and_its_json_is_strict():
    plain = [record("plain", EVERYTHING, seed, range(seed)) for seed in range(3)]
    lost = np.full(1, np.nan, dtype=np.float32)
    broken = [
        dataclasses.replace(each, arm="other", finite=False, weights=lost, digest="same") for each in plain
    ]
    found = analyse([*plain, *broken], 1.0, {})
    assert found.comparisons[0].verdict == "diverged in 3 of 3"
    assert len(found.notes) == 1 and "other everything 0" in found.notes[0]
    values = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert values["comparisons"][0]["distance"] == dict.fromkeys(("value", "low", "high"))
    assert "other against plain: diverged" in str(found) and "nan" not in str(found)


def test_an_arm_that_compression_changed_nothing_in_is_noted():
    plain = [record("plain", EVERYTHING, seed, range(seed)) for seed in range(3)]
    same, other = ([dataclasses.replace(each, arm=arm) for each in plain] for arm in ("same", "other"))
    other[1] = dataclasses.replace(other[1], digest="another")
    notes = analyse([*plain, *same, *other], 1.0, {}).notes
    assert len(notes) == 1 and notes[0].startswith("same equals plain to the bit in every training")


def test_seeds_that_most_trainings_ignore_are_named():
    plain = [record("plain", EVERYTHING, seed, range(seed)) for seed in range(3)]
    plain[2] = dataclasses.replace(plain[2], digest=plain[0].digest)
    assert "of 3 trainings of plain with seeds of their own only 2 differ" in str(analyse(plain, 1.0, {}))


def test_a_score_that_does_not_vary_is_said_to():
    plain, other = ([record(arm, EVERYTHING, seed, ()) for seed in range(3)] for arm in ("plain", "other"))
    text = str(analyse([*plain, *other], 1.0, {}))
    assert "the score of plain does not vary between seeds" in text and "1000" not in text
    assert "varying everything changed nothing in plain, to the bit" in text

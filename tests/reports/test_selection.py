"""Which setting is best under noise: stated chances are right, and pairing and ties count."""

import numpy as np
import pytest

from squeezebox import OptionError
from squeezebox.reports import ExchangeArm, MeasuredExchange, select


def world(generator, heavy):
    """(true means, measurements): seeds spread by 2, and a setting's measurements by 1 about them."""
    settings, trials = generator.choice([2, 3, 5]), generator.choice([4, 8])
    true = generator.normal(0, 10 ** generator.uniform(-1, 0.7), settings)
    shape = (settings, trials)
    own = generator.standard_t(3, shape) / 3**0.5 if heavy else generator.normal(0, 1, shape)
    return true, true[:, None] + generator.normal(0, 2, trials) + own


def found_in(table, **options):
    return select({str(number): list(row) for number, row in enumerate(table)}, **options)


@pytest.mark.parametrize("heavy", [False, True])
def test_stated_chances_and_regrets_are_right(heavy):
    generator, stated, right, regret, lost = np.random.default_rng(0), [], [], [], []
    for _ in range(250):
        true, table = world(generator, heavy)
        found = found_in(table)
        stated.append(found.chance), right.append(found.best == str(true.argmax()))
        regret.append(found.regret), lost.append(true.max() - true[int(found.best)])
    assert np.mean(stated) == pytest.approx(np.mean(right), abs=0.07)
    sure = np.array(stated) > 0.9
    assert np.mean(np.array(right)[sure]) > 0.9 and np.mean(stated) < 0.9
    assert np.mean(regret) == pytest.approx(np.mean(lost), rel=0.5)


def test_what_pairs_have_in_common_does_not_count():
    seeds, own = np.array([9.0, -4.0, 2.0, 30.0]), np.array([0.1, -0.1, 0.2, 0.0])
    found = select({"one": list(seeds + 1 + own), "other": list(seeds - own)})
    assert found.best == "one" and found.clear and found.trials_needed <= 4


def test_seconds_are_best_small_and_trials_that_decide_are_given():
    generator = np.random.default_rng(1)
    seconds = 1.0 + generator.normal(0, 0.05, (2, 5)) + np.array([[0.0], [0.03]])
    found = found_in(seconds, smaller_is_better=True)
    assert found.best == str(seconds.mean(1).argmin()) and not found.clear and found.trials_needed > 5
    assert f"; {found.trials_needed} trials of each would say it with 90%" in str(found)


def test_equal_settings_share_the_chance_and_no_number_of_trials_decides():
    found = select({"one": [1.0, 1.0], "other": [1.0, 1.0], "worse": [0.0, 0.0]})
    assert found.chance == 0.5 and found.regret == 0.0 and found.trials_needed is None
    assert "more than 1000 trials" in str(found)


def exchange(**seconds):
    arms = [
        ExchangeArm(
            name=name, step_seconds=each, exchange_seconds=each, planned_seconds=None, sent_bytes=1, noise=0.0
        )
        for name, each in seconds.items()
    ]
    return MeasuredExchange(
        ranks=2,
        elements=1,
        link_bytes_per_second=1.0,
        alone_seconds=1.0,
        groups=(),
        arms=tuple(arms),
        ways=(),
    )


def test_exchanges_that_differ_by_less_than_their_rounds_show_are_named_so():
    slow = (1.0, 1.2, 1.1, 1.3)
    clear = exchange(plain=slow, packed=tuple(each / 2 for each in slow))
    assert str(clear).endswith("packed is the fastest with a chance of 100%.")
    near = exchange(plain=slow, packed=(1.1, 1.1, 1.2, 1.15))
    found = near.fastest()
    assert f"{found.best} is the fastest with a chance of {found.chance:.0%}: the best ones" in str(near)
    assert f"About {found.trials_needed} rounds would say it with 90%." in str(near)
    assert exchange(plain=(1.0,), packed=(2.0,)).fastest() is None


@pytest.mark.parametrize(
    ("trials", "options", "words"),
    [
        ({"one": [1.0, 2.0]}, {}, "1 settings"),
        ({"one": [1.0, 2.0], "other": [1.0]}, {}, r"\[1, 2\] trials"),
        ({"one": [1.0], "other": [1.0]}, {}, r"trials \[1\] have no spread"),
        ({"one": [1.0, 2.0], "other": [1.0, float("nan")]}, {}, "NaN"),
        ({"one": [1.0, 2.0], "other": [1.0, 3.0]}, {"wanted": 1.0}, "wanted 1.0"),
    ],
)
def test_what_cannot_be_compared_is_refused(trials, options, words):
    with pytest.raises(OptionError, match=words):
        select(trials, **options)

"""What is said of a budget that nothing fits is true of the profile, number by number."""

from dataclasses import replace

import pytest

from squeezebox.planner import shortage, smallest, solve
from squeezebox.reports import explain
from squeezebox.schema import Action, Budget, BudgetError, MemoryParts, Moment, Option, Profile, TensorProfile

KEEP = Option(action=Action.KEEP, held_bytes=1000)
NOISY = Option(action=Action.COMPRESS, bound=1.0, held_bytes=100, working_bytes=50, seconds=2.0, noise=0.05)


def profile(phases=("forward", "loss", "backward"), options=(KEEP, NOISY), base=(400, 450, 500)):
    """One tensor, saved first and used last; 40 parameters, 10 of sample, 60 of state, 5 of gradients."""
    tensor = TensorProfile(key="body:Relu.result", saved_at=0, first_use=2, last_use=2, options=options)
    moments = tuple(
        Moment(phase=phase, event="used", key="body:Relu.result", gradient_bytes=gradient)
        for phase, gradient in zip(phases, (0, 0, 5), strict=True)
    )
    return Profile(
        base_bytes=(*base, 130),
        tensors=(tensor,),
        moments=(*moments, Moment(phase="optimizer", gradient_bytes=20)),
        parameter_bytes=40,
        input_bytes=10,
        state_bytes=60,
    )


def found(seen, budget, batch=16):
    with pytest.raises(BudgetError):
        solve(seen, budget)
    return shortage(seen, budget, smallest(seen, budget.noise), batch)


def test_the_peak_is_taken_apart_and_named():
    lack = found(profile(), Budget(peak_bytes=700, noise=1e-2))
    assert (lack.parts.total_bytes, lack.moment.phase) == (1500, "backward")
    assert lack.parts == MemoryParts(
        parameter_bytes=40,
        input_bytes=10,
        gradient_bytes=5,
        state_bytes=60,
        saved_bytes=1000,
        temporary_bytes=1500 - 1000 - 40 - 10 - 5 - 60,
    )
    text = explain(lack)
    assert "takes 1.46 KiB" in text and "'body:Relu.result'" in text and "in backward" in text
    assert text.endswith("; a budget of 1500 bytes.") and text.count("1500 bytes") == 1
    assert "a plain step" not in text
    assert "700 B is too small: a plain step takes 2.00 KiB, and the smallest plan" in explain(lack, 2048)
    assert "the plain step" not in explain(lack, 701) and "without states=True" in explain(lack, 700)


def test_more_noise_is_offered_only_where_it_fits():
    lack = found(profile(), Budget(peak_bytes=700, noise=1e-2))
    assert lack.more_noise == pytest.approx(0.1)
    assert solve(profile(), Budget(peak_bytes=700, noise=lack.more_noise)).predicted_peak_bytes == 650
    assert "allow noise 0.1" in explain(lack)
    assert found(profile(), Budget(peak_bytes=600, noise=1e-2)).more_noise is None


def test_a_smaller_batch_scales_all_but_what_the_parameters_take():
    lack = found(profile(), Budget(peak_bytes=700, noise=1e-2))
    assert lack.smaller_batch == 16 * (700 - 105) // (1500 - 105)  # of the last position of backward
    assert "a batch of about 6" in explain(lack)
    assert found(profile(), Budget(peak_bytes=110, noise=1e-2)).smaller_batch is None


@pytest.mark.parametrize(("budget", "expected"), [(1440, 1440), (1439, None)])
def test_the_optimizer_is_offered_where_its_state_is_what_is_over(budget, expected):
    assert found(profile(), Budget(peak_bytes=budget, noise=1e-2)).stateless_peak_bytes == expected


def test_the_loss_is_named_where_the_peak_is_in_it():
    small = (replace(KEEP, held_bytes=100),)
    high = profile(options=small, base=(400, 900, 500))
    lack = found(high, Budget(peak_bytes=700))
    assert (lack.moment.phase, lack.parts.total_bytes, lack.peak_bytes_but_loss) == ("loss", 1000, 600)
    assert "the loss in slices" in explain(lack)
    assert "the loss in slices" not in explain(found(high, Budget(peak_bytes=599)))


def test_the_smallest_is_within_a_percent_and_within_its_seconds():
    tensors = tuple(
        TensorProfile(
            key=f"t{number}",
            saved_at=number,
            first_use=19 - number,
            last_use=19 - number,
            options=(KEEP, replace(NOISY, noise=0.0, seconds=1.0)),
        )
        for number in range(10)
    )
    seen = Profile(base_bytes=(10,) * 20, tensors=tensors)
    assert smallest(seen, 0.0).predicted_peak_bytes <= 1.01 * (10 + 10 * 100 + 50)
    half = smallest(seen, 0.0, seconds=5.0)
    assert half.predicted_seconds <= 5.0
    assert 10 + 5 * 1000 + 5 * 100 <= half.predicted_peak_bytes <= 1.01 * (10 + 5 * 1000 + 5 * 100 + 50)
    assert smallest(seen, 0.0, seconds=0.0).predicted_peak_bytes == 10_010

"""Profiles at other batches lie on the line through two known ones, or in proportion to one."""

import pytest

from squeezebox.planner import at_batch, largest_batch
from squeezebox.schema import Action, Moment, Option, Profile, StepProfile, TensorProfile


def step(batch, codec="file"):
    """300 bytes fixed and 7 a sample in the base, 50 a sample saved, and 5 packed with a table of 11."""
    keep = Option(action=Action.KEEP, codec="keep", held_bytes=50 * batch)
    packed = Option(
        action=Action.COMPRESS, codec=codec, held_bytes=11 + 5 * batch, working_bytes=50 * batch, seconds=0.5
    )
    tensor = TensorProfile(key="a", saved_at=0, first_use=1, last_use=1, options=(keep, packed))
    profile = Profile(
        base_bytes=(300 + 7 * batch, 320 + 7 * batch, 400 + 2 * batch),
        tensors=(tensor,),
        moments=(
            Moment(phase="forward"),
            Moment(phase="backward", gradient_bytes=20),
            Moment(phase="optimizer"),
        ),
        parameter_bytes=100,
        input_bytes=2 * batch,
        state_bytes=200,
    )
    return StepProfile(
        profile=profile,
        saved_bytes={"a": 50 * batch},
        plain_seconds=0.1,
        late_values={},
        output_bytes=3 * batch,
        file_seconds=0.25 * batch,
        clock_seconds=0.125 * batch,
    )


def test_two_batches_give_the_line():
    assert at_batch({8: step(8), 16: step(16)}, 100) == step(100)
    assert at_batch({8: step(8), 16: step(16)}, 8) == step(8)


def test_one_batch_is_in_proportion_but_for_what_parameters_take():
    seen = at_batch({8: step(8)}, 16)
    assert seen.profile.base_bytes == step(16).profile.base_bytes
    assert [o.held_bytes for o in seen.profile.tensors[0].options] == [800, 102]
    assert (seen.output_bytes, seen.file_seconds, seen.clock_seconds) == (48, 4.0, 2.0)


def test_other_orders_and_options_fall_back_on_the_proportion():
    other = at_batch({8: step(8), 16: step(16, codec="mask")}, 24)
    assert [o.held_bytes for o in other.profile.tensors[0].options] == [1200, 137]  # 91 * 24 / 16
    assert other.profile.base_bytes == step(24).profile.base_bytes


@pytest.mark.parametrize("start", (1, 5, 37, 1000))
@pytest.mark.parametrize("answer", (0, 1, 2, 36, 37, 38, 999))
def test_the_largest_is_found_from_anywhere(start, answer):
    assert largest_batch(lambda size: size <= answer, start) == answer


@pytest.mark.parametrize(("start", "answer"), ((1, 1 << 20), (3_000_000, 3_000_000)))
def test_where_every_batch_fits_the_search_ends_with_one_that_was_tried(start, answer):
    assert largest_batch(lambda size: True, start) == answer

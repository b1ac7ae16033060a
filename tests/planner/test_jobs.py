"""Jobs on one device: what runs when, and XRBench's score, equal to its formula on logs worked by hand."""

import math

import pytest

from squeezebox.planner import jobs_peak, roofline_seconds, run_jobs, score_jobs
from squeezebox.schema import Device, Frame, Job, Work


def job(name, every, seconds, frames, *, deadline=None, peak=100, resident=40):
    return Job(
        name=name,
        every_seconds=every,
        deadline_seconds=deadline or every,
        frames=frames,
        seconds=seconds,
        peak_bytes=peak,
        resident_bytes=resident,
    )


def log(name, due, done, nbytes=250):
    return Frame(job=name, came_at=0.0, due_at=due, done_at=done, nbytes=nbytes)


def test_scores_equal_the_formula_on_logs_worked_by_hand():
    frames = [
        log("serve", 0.010, 0.010),  # on the dot: a half
        log("serve", 0.020, 0.0201, 500),  # 0.1 ms late, half of the memory
        log("serve", 0.030, None),
        log("serve", 0.040, 0.030, 0),  # 10 ms early, no memory
        log("train", 1.0, 5.0),  # 4 s late
        log("idle", 1.0, None),
    ]
    found = score_jobs(frames, 1000)
    late = 1.0 / (1.0 + math.exp(15 * 0.1))
    assert found["serve"] == pytest.approx(3 / 4 * (0.5 * 0.75 + late * 0.5 + 1.0) / 3, rel=1e-9)
    assert (found["train"], found["idle"]) == (0.0, 0.0)


def test_more_bytes_than_there_are_score_nothing():
    assert score_jobs([log("one", 1.0, 0.5, 2000)], 1000) == {"one": 0.0}


def test_the_frame_that_is_due_first_begins_and_one_is_dropped_when_the_next_comes():
    # At 0 serve's frame (due 0.1) goes before train's (due 1), which then runs until 0.45. Serve's frames of
    # 0.1 and 0.2 are dropped then, as the next ones are there; that of 0.3 is, too, and the last one is not.
    frames = run_jobs([job("train", 1.0, 0.4, 1), job("serve", 0.1, 0.05, 5)])
    done = {(frame.job, round(frame.came_at, 3)): frame.done_at for frame in frames}
    assert done == {
        ("train", 0.0): pytest.approx(0.45),
        ("serve", 0.0): pytest.approx(0.05),
        ("serve", 0.1): None,
        ("serve", 0.2): None,
        ("serve", 0.3): None,
        ("serve", 0.4): pytest.approx(0.5),
    }
    assert [frame.came_at for frame in frames] == sorted(frame.came_at for frame in frames)


def test_jobs_hold_what_stays_of_all_and_what_one_runs_with():
    one, other = (
        job("one", 1.0, 0.1, 1, peak=100, resident=40),
        job("other", 1.0, 0.1, 1, peak=300, resident=10),
    )
    assert jobs_peak([one, other]) == 40 + 10 + 290
    assert [frame.nbytes for frame in run_jobs([one, other])] == [10 + 100, 40 + 300]
    assert jobs_peak([]) == 0


def test_a_roofline_takes_the_longer_of_both_and_a_call():
    device = Device(
        name="x", memory_bytes=1, speed=1.0, flops_per_second=100.0, bytes_per_second=10.0, call_seconds=0.5
    )
    work = [Work(flops=1000, moved_bytes=10, times=2), Work(flops=0, moved_bytes=30, times=1)]
    assert roofline_seconds(work, device) == pytest.approx(2 * (10.0 + 0.5) + 3.0 + 0.5)

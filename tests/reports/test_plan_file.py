"""A plan's file comes back whole or is refused by the name of the field; differences are told."""

import json
from dataclasses import replace

import pytest

from squeezebox.reports import PlannedTensor, StepPlan, load_plan
from squeezebox.schema import (
    Action,
    FormatError,
    MemoryParts,
    OffloadRecord,
    OptimizerPlan,
    Option,
    PlannedPeak,
    WeightsPlan,
)

KEEP = Option(action=Action.KEEP, codec="keep", held_bytes=4096)
PACKED = Option(
    action=Action.COMPRESS,
    codec="entropy",
    bound=0.25,
    held_bytes=1024,
    working_bytes=4096,
    seconds=0.1,
    noise=1e-3,
)
FILE = Option(action=Action.OFFLOAD, codec="file", held_bytes=0, working_bytes=2048, seconds=-1e-6)


def plan(*options, **changes):
    keys = ("0:Convolution.input", "1:Relu.result", "2:Addmm.mat1")
    values = {
        "model": "Sequential",
        "budget_bytes": 1 << 20,
        "noise": 1e-2,
        "plain_peak_bytes": 2 << 20,
        "plain_seconds": 0.5,
        "predicted_peak_bytes": 1 << 19,
        "predicted_seconds": 0.75,
        "predicted_noise": 1e-3,
        "late_values": {"1:Relu.result": "conv input"},
    }
    tensors = [
        PlannedTensor(key=key, saved_bytes=4096, option=option)
        for key, option in zip(keys, options, strict=False)
    ]
    return StepPlan(**{**values, **changes}, tensors=tuple(tensors))


PEAK = PlannedPeak(
    phase="backward",
    event="used",
    key="0:Convolution.input",
    parts=MemoryParts(
        parameter_bytes=100,
        input_bytes=50,
        gradient_bytes=25,
        state_bytes=12,
        saved_bytes=6,
        temporary_bytes=3,
    ),
)


def test_a_file_without_the_peaks_parts_is_read(tmp_path):
    values = plan(KEEP).to_dict()
    del values["peak"]
    (tmp_path / "plan.json").write_text(json.dumps(values))
    assert load_plan(tmp_path / "plan.json") == plan(KEEP)


def test_the_text_says_where_the_peak_is():
    text = str(plan(peak=PEAK))
    assert "in backward, in the operator that reads '0:Convolution.input', with" in text
    assert "temporaries" in text


def changed(values, place, value):
    """The same nested values with one replaced, or left out where ``value`` is Ellipsis."""
    first, *rest = place
    copy = list(values) if isinstance(values, list) else dict(values)
    if rest:
        copy[first] = changed(copy[first], rest, value)
    elif value is ...:
        del copy[first]
    else:
        copy[first] = value
    return copy


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        (("model",), 3, "model is 3, not text"),
        (("model",), ..., "model is missing"),
        (("extra",), 1, "extra is unknown"),
        (("budget_bytes",), -1, "budget_bytes is -1, not a whole number from 0"),
        (("budget_bytes",), 1.5, "budget_bytes is 1.5"),
        (("budget_bytes",), True, "budget_bytes is True"),
        (("predicted_peak_bytes",), None, "predicted_peak_bytes is None"),
        (("noise",), float("nan"), "noise is nan, not a finite number from 0"),
        (("noise",), -0.5, "noise is -0.5"),
        (("predicted_seconds",), float("inf"), "predicted_seconds is inf"),
        (("plain_seconds",), "fast", "plain_seconds is 'fast'"),
        (("late_values",), [], "late_values is [], not an object"),
        (("late_values", "a"), "poet", "late_values['a'] is 'poet'"),
        (("late_values", "a"), {}, "late_values.a is {}"),
        (("tensors",), {}, "tensors is {}, not a list"),
        (("tensors", 1), 7, "tensors[1] is 7, not an object"),
        (("tensors", 1, "action"), "shrink", "tensors[1].action is 'shrink', not one of keep"),
        (("tensors", 1, "action"), [], "tensors[1].action is []"),
        (("tensors", 1, "key"), ..., "tensors[1].key is missing"),
        (("tensors", 1, "key"), 5, "tensors[1].key is 5, not text"),
        (("tensors", 1, "key"), "0:Convolution.input", "tensors[1].key is '0:Convolution.input', as that of"),
        (("tensors", 0, "saved_bytes"), -4, "tensors[0].saved_bytes is -4"),
        (("tensors", 0, "saved_bytes"), "4096", "tensors[0].saved_bytes is '4096'"),
        (("tensors", 2, "held_bytes"), ..., "tensors[2].held_bytes is missing"),
        (("tensors", 2, "working_bytes"), -1, "tensors[2].working_bytes is -1"),
        (("tensors", 2, "bound"), float("nan"), "tensors[2].bound is nan"),
        (("tensors", 2, "seconds"), float("nan"), "tensors[2].seconds is nan"),
        (("tensors", 2, "colour"), "red", "tensors[2].colour is unknown"),
        (("version",), 1, "version is 1"),
        (("version",), ..., "it has no version"),
    ],
)
def test_the_field_that_is_wrong_is_named(place, value, message, tmp_path):
    values = changed(plan(KEEP, PACKED, FILE).to_dict(), place, value)
    (tmp_path / "plan.json").write_text(json.dumps(values))
    with pytest.raises(FormatError) as caught:
        load_plan(tmp_path / "plan.json")
    assert message in str(caught.value) and "plan.json" in str(caught.value)


@pytest.mark.parametrize("text", ["", "[]", "null", '{"version": 2', '{"version": 2, "version": 2}', "\xff"])
def test_files_that_hold_no_plan(text, tmp_path):
    (tmp_path / "plan.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(FormatError, match="plan.json"):
        load_plan(tmp_path / "plan.json")


def test_differences_are_told_tensor_by_tensor():
    old, new = plan(KEEP, PACKED, FILE), plan(KEEP, KEEP, predicted_peak_bytes=1 << 20)
    assert old.diff(new).splitlines() == [
        "1:Relu.result  compress entropy 2.5e-01 1.00 KiB -> keep 4.00 KiB",
        "2:Addmm.mat1   offload file 0 B -> not there",
        "2 of 3 tensors differ",
        "peak   512.00 KiB -> 1.00 MiB",
        "time   0.750 s -> 0.750 s",
        "noise  1.0e-03 -> 1.0e-03",
    ]
    assert new.diff(old).splitlines()[1] == "2:Addmm.mat1   not there -> offload file 0 B"
    assert "0 of 3 tensors differ" in old.diff(replace(old, tensors=old.tensors[::-1]))


def test_what_was_only_measured_otherwise_is_no_difference():
    again = Option(action=Action.RECOMPUTE, held_bytes=0, sources=("0:Convolution.input",))
    old = plan(KEEP, PACKED, again)
    new = plan(
        KEEP, replace(PACKED, seconds=0.2, noise=2e-3, working_bytes=1), replace(again, sources=("x",))
    )
    assert old.diff(new).splitlines()[:2] == [
        "2:Addmm.mat1  recompute from 0:Convolution.input 0 B -> recompute from x 0 B",
        "1 of 3 tensors differ",
    ]


def test_buffers_are_said_with_the_files_that_have_them():
    record = OffloadRecord(folder="/d", filesystem="ext4", file_bytes=9, buffer_bytes=48 << 20, cache_bytes=0)
    optimizer = OptimizerPlan(
        name="SGD",
        in_backward=True,
        states=("0.weight",),
        gradients=(),
        state_bytes=3,
        gradient_bytes=3,
        moved_bytes=3,
        seconds=0.0,
    )
    weights = WeightsPlan(moved=("1.weight",), weight_bytes=3, moved_bytes=3, seconds=0.0)
    text = str(plan(KEEP, FILE, offload=record, optimizer=optimizer, weights=weights))
    assert "saved tensors, optimizer state and frozen weights offloaded to /d (ext4): 9 B" in text
    assert "at most 48.00 MiB of buffers and 0 B of page cache (3 files, each with its own)" in text
    late = replace(optimizer, in_backward=False, gradients=("0.weight",))
    text = str(plan(KEEP, offload=replace(record, buffer_bytes=16 << 20), optimizer=late))
    assert "gradients with optimizer state offloaded to /d (ext4): 9 B" in text
    assert "16.00 MiB of buffers" in text and "files" not in text

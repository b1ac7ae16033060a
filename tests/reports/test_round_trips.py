"""Every result comes back from its file as it was saved, to the last field."""

import collections.abc
import contextlib
import dataclasses
import enum
import itertools
import json
import os
import typing
from types import NoneType

import numpy as np
import pytest

from squeezebox import reports
from squeezebox.reports import Audit, AuditRecord, StepPlan, Timeline
from squeezebox.schema import Forecast, FormatError, PipelinePlan, TimelineCell

TO_FILE = [kind for kind in vars(reports).values() if isinstance(kind, type) and hasattr(kind, "to_dict")]
RESULTS = [kind for kind in TO_FILE if kind is not reports.PlannedTensor] + [PipelinePlan]
NUMBERS = itertools.count(1)
FIXED = {  # what a file's reader looks at more closely
    TimelineCell: {"phase": "forward"},
    Forecast: {"unit": "bytes"},
    StepPlan: {"late_values": {"1:Relu.result": "conv input"}},
    Audit: {"facts": {"margin": 0.5, "arms": ["plain", "squeezed"]}},
}


def example(kind, absent=False):
    """A value of the type, no two numbers or texts in it equal; None where it may be ``absent``."""
    inner, origin = typing.get_args(kind), typing.get_origin(kind)
    number = next(NUMBERS)
    if NoneType in inner:
        return None if absent else example(next(each for each in inner if each is not NoneType))
    if origin is tuple:
        kinds = inner[:1] * 2 if inner[-1] is ... else inner
        return tuple(example(each, absent) for each in kinds)
    if origin in (dict, collections.abc.Mapping):
        return {example(inner[0], absent): example(inner[1], absent)}
    if dataclasses.is_dataclass(kind):
        types, fixed = typing.get_type_hints(kind), FIXED.get(kind, {})
        names = [item.name for item in dataclasses.fields(kind) if item.name not in fixed]
        return kind(**{name: example(types[name], absent) for name in names}, **fixed)
    if issubclass(kind, enum.Enum):
        return list(kind)[number % len(kind)]
    return {int: number, float: number / 7, bool: True, str: f"text {number}"}[kind]


@pytest.mark.parametrize("absent", [False, True], ids=["all", "optional ones absent"])
@pytest.mark.parametrize("kind", RESULTS, ids=lambda kind: kind.__name__)
def test_saved_and_loaded(kind, absent, tmp_path):
    made = example(kind, absent)
    made.save(tmp_path / "result.json")
    found = kind.load(tmp_path / "result.json")
    assert found == made
    assert json.loads((tmp_path / "result.json").read_text()) == json.loads(json.dumps(made.to_dict()))
    assert os.listdir(tmp_path) == ["result.json"]


@pytest.mark.parametrize("kind", RESULTS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("text", ["", "[]", "7", '{"version": 99}', '{"a": 1, "a": 1}'])
def test_other_files_are_refused(kind, text, tmp_path):
    (tmp_path / "result.json").write_text(text)
    with pytest.raises(FormatError, match=r"result.json' is no .* Write it again with .*save\(path\)\."):
        kind.load(tmp_path / "result.json")
    missing = r"^No such file: '.*missing.json'\. Make the [a-z ]+ with .*save\(path\)\.$"
    with pytest.raises(FormatError, match=missing):
        kind.load(tmp_path / "missing.json")


@pytest.mark.parametrize("wrong", [None, 5, []], ids=str)
@pytest.mark.parametrize("kind", RESULTS, ids=lambda kind: kind.__name__)
def test_a_file_with_something_else_in_one_place_is_read_or_refused(kind, wrong):
    text = json.dumps(example(kind).to_dict())
    for *path, last in places(json.loads(text)):
        values = inner = json.loads(text)
        for each in path:
            inner = inner[each]
        inner[last] = wrong
        with contextlib.suppress(FormatError):
            kind.from_dict(values)


def places(values, path=()):
    """Where each value of nested objects and lists is."""
    pairs = values.items() if isinstance(values, dict) else enumerate(values)
    for key, each in pairs:
        yield (*path, key)
        if isinstance(each, (dict, list)):
            yield from places(each, (*path, key))


def test_a_file_that_is_nested_too_deeply_is_refused(tmp_path):
    (tmp_path / "result.json").write_text("[" * 100_000)
    with pytest.raises(FormatError, match="no plan"):
        StepPlan.load(tmp_path / "result.json")


def test_what_an_audit_cannot_write_comes_back_as_nan(tmp_path):
    made = example(Audit)
    lost = dataclasses.replace(made.series[0], score=float("inf"))
    dataclasses.replace(made, series=(lost,)).save(tmp_path / "audit.json")
    (found,) = Audit.load(tmp_path / "audit.json").series
    assert np.isnan(found.score) and found.churn == lost.churn


def test_a_training_of_an_audit(tmp_path):
    arrays = {
        "predictions": np.array([1, 2]),
        "targets": np.array([1, 0]),
        "groups": np.array(["a", "b"]),
        "weights": np.array([0.6, 0.8], np.float32),
    }
    values = {"arm": "plain", "series": "control", "seed": 3, "score": 0.5, "finite": True}
    made = AuditRecord(**arrays, **values, digest="f00", seconds=1.5)
    made.save(tmp_path / "record.npz")
    found = AuditRecord.load(tmp_path / "record.npz")
    for name in AuditRecord.__slots__:
        assert np.array_equal(getattr(found, name), getattr(made, name)), name
    with pytest.raises(FormatError, match="no finished training"):
        AuditRecord.load(tmp_path / "missing.npz")


def test_a_timeline_of_other_kinds_is_refused(tmp_path):
    values = example(Timeline).to_dict()
    values["peak"]["nbytes"].append(1)
    (tmp_path / "run.json").write_text(json.dumps(values))
    with pytest.raises(FormatError, match="3 numbers of bytes for 2 kinds"):
        Timeline.load(tmp_path / "run.json")

"""Plans of pipelines as files: what is written is read, and nothing else."""

import json

import pytest

from squeezebox import FormatError
from squeezebox.reports import (
    load_pipeline_plan,
    pipeline_plan_line,
    pipeline_plan_text,
)
from squeezebox.schema import InputForm, PipelinePlan, StagePlan


def plan():
    stages = tuple(
        StagePlan(
            first=first,
            end=first + 2,
            policy="keep",
            forward_seconds=0.25,
            backward_seconds=0.5,
            peak_bytes=3 * 2**20,
        )
        for first in (0, 2)
    )
    return PipelinePlan(
        schedule="2bw",
        ranks=2,
        replicas=1,
        microbatch=4,
        microbatches=8,
        stages=stages,
        seconds=6.0,
        inputs=(InputForm(shape=(3, 8, 8), dtype="float32"),),
        rank_peak_bytes=(3 * 2**20, 3 * 2**20),
        fingerprint="0123",
        blocks=("a", "b", "c", "d"),
        model="my.models:net",
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda values: values.pop("ranks"), "ranks is missing"),
        (lambda values: values.update(version=2), "its version is 2, and this Squeezebox reads 5"),
        (lambda values: values.update(microbatch=-1), "microbatch is -1, not a whole number from 0"),
        (lambda values: values["stages"][1].pop("policy"), r"stages\[1\].policy is missing"),
        (lambda values: values["stages"][0].update(colour=1), r"stages\[0\].colour is unknown"),
        (
            lambda values: values["inputs"][0].update(shape=["x"]),
            r"inputs\[0\].shape\[0\] is 'x', not a whole number",
        ),
    ],
)
def test_damaged_files_are_refused(change, message, tmp_path):
    path = tmp_path / "plan.json"
    plan().save(path)
    values = json.loads(path.read_text())
    change(values)
    path.write_text(json.dumps(values))
    with pytest.raises(FormatError, match=message):
        load_pipeline_plan(path)


def test_missing_and_half_written_files(tmp_path):
    with pytest.raises(FormatError, match="squeezebox pipeline plan"):
        load_pipeline_plan(tmp_path / "none.json")
    (tmp_path / "half.json").write_text('{"version": 2, "sched')
    with pytest.raises(FormatError, match="half.json' is no pipeline plan"):
        load_pipeline_plan(tmp_path / "half.json")


def test_text():
    text = pipeline_plan_text(plan())
    assert "2bw, 2 ranks, 8 microbatches of 4 samples: 6 s a batch" in text
    assert "c .. d (2)" in text
    assert "3.00 MiB" in pipeline_plan_line(plan())

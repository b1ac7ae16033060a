"""Reports add up, survive JSON, and are written whole or not at all."""

import dataclasses
import json
import os

import pytest

from squeezebox.reports import Estimate, Report, human_bytes, require_writable, write_whole
from squeezebox.schema import Call, Check, Kind, OutputError, Peak, Role, SavedTensor, StepRecord


def saved(key, saved_bytes, packed_bytes):
    return SavedTensor(
        key=key,
        role=Role.CONV_INPUT,
        roles=(Role.CONV_INPUT, Role.RELU_OUTPUT),
        module=key,
        shape=(2, 3),
        dtype="float32",
        saved_bytes=saved_bytes,
        packed_bytes=packed_bytes,
        codec="entropy-sign",
        bound=0.01,
        noise_share=1e-4,
    )


def record(**changes):
    tensors = tuple(saved(f"layer{number}", 1000 * (number + 1), 100) for number in range(30))
    values = {
        "step": 7,
        "tensors": tensors,
        "saved_bytes": sum(tensor.saved_bytes for tensor in tensors),
        "packed_bytes": sum(tensor.packed_bytes for tensor in tensors),
        "borrowed_bytes": 12,
        "peak_bytes": 1 << 20,
        "activation_peak_bytes": 1 << 19,
        "split_bytes": 5 << 19,
        "refresh_peak_bytes": 3 << 20,
        "noise": 1.5e-3,
        "predicted_noise": 1e-3,
        "checks": (Check(key="layer1", step=3, layer=True, measured=2e-4, predicted=1e-4),),
        "notes": ("something to know",),
    }
    return StepRecord(**{**values, **changes})


ESTIMATE = Estimate(
    input_shape=(3, 8, 8),
    batch=2,
    optimizer="adam",
    parameter_bytes=100,
    gradient_bytes=100,
    buffer_bytes=8,
    optimizer_bytes=208,
    input_bytes=1536,
    saved_bytes=3000,
    saved={"conv input": 2000, "relu output": 1000},
    peak_bytes=5000,
    peak_phase="backward",
    peak=Peak(
        nbytes=5000,
        by_kind={Kind.PARAMETER: 100, Kind.SAVED: 3000, Kind.TEMPORARY: 1900},
        time=7,
        call=Call(operator="mm", phase="backward", module="0.body", began_at=6),
    ),
)


def test_totals_are_those_of_the_record():
    report = Report(record())
    assert report.saved_bytes == sum(tensor.saved_bytes for tensor in report.tensors)
    assert report.packed_bytes == sum(tensor.packed_bytes for tensor in report.tensors)
    assert (report.peak_bytes, report.noise, report.predicted_noise) == (1 << 20, 1.5e-3, 1e-3)


def test_text_names_totals_largest_tensors_and_how_many_are_hidden():
    text = str(Report(record()))
    for part in (
        "1.00 MiB",
        "2.50 MiB",
        "3.00 MiB",
        "1.50e-03",
        "layer29",
        "6 smaller tensors",
        "something to know",
    ):
        assert part in text
    assert "layer0 " not in text


def test_text_of_what_was_not_measured():
    peaks = {"peak_bytes": None, "activation_peak_bytes": None, "refresh_peak_bytes": None}
    text = str(Report(record(**peaks, noise=None)))
    assert "measured -" in text
    assert "peak" not in text
    assert "split" in text
    assert "split" not in str(Report(record(split_bytes=None)))


def test_json_holds_the_whole_record(tmp_path):
    report = Report(record())
    report.save(tmp_path / "report.json")
    read = json.loads((tmp_path / "report.json").read_text())
    assert read == report.to_dict()
    assert set(read) == {item.name for item in dataclasses.fields(StepRecord)}
    assert read["tensors"][3]["roles"] == ["conv input", "relu output"]
    assert len(read["tensors"]) == 30


def test_an_estimate_as_text_and_json(tmp_path):
    ESTIMATE.save(tmp_path / "estimate.json")
    assert json.loads((tmp_path / "estimate.json").read_text()) == ESTIMATE.to_dict()
    assert "optimizer state (adam)" in str(ESTIMATE)
    assert "2x3x8x8" in str(ESTIMATE)
    assert "The peak is in backward of '0.body' (mm)." in str(ESTIMATE)
    assert ESTIMATE.to_dict()["peak"]["by_kind"]["temporaries"] == 1900


@pytest.mark.parametrize("write", [Report(record()).save, ESTIMATE.save])
def test_a_missing_folder_is_an_output_error(tmp_path, write):
    with pytest.raises(OutputError, match="No such file or directory.*Nothing was written"):
        write(tmp_path / "missing" / "report.json")
    assert not list(tmp_path.iterdir())


def test_a_failed_write_leaves_the_old_report_and_nothing_else(tmp_path, monkeypatch):
    target = tmp_path / "report.json"
    write_whole(target, "old")

    def full(source, destination):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OutputError, match="No space left on device"):
        write_whole(target, "new")
    assert [path.name for path in tmp_path.iterdir()] == ["report.json"]
    assert target.read_text() == "old"


@pytest.mark.parametrize("content", ["\ud800", None])
def test_what_cannot_be_written_leaves_nothing(tmp_path, content):
    with pytest.raises((UnicodeEncodeError, TypeError)):
        write_whole(tmp_path / "report.json", content)
    assert not list(tmp_path.iterdir())


def test_a_file_has_the_usual_rights_or_those_of_the_one_before(tmp_path):
    target, other = tmp_path / "report.json", tmp_path / "other"
    write_whole(target, "new")
    other.write_text("as anybody writes a file")
    assert target.stat().st_mode == other.stat().st_mode
    target.chmod(0o640)
    write_whole(target, "again")
    assert (target.read_text(), target.stat().st_mode & 0o777) == ("again", 0o640)


def test_a_link_stays_and_leads_to_what_was_written(tmp_path):
    folder, link = tmp_path / "elsewhere", tmp_path / "report.json"
    folder.mkdir()
    link.symlink_to(folder / "real.json")
    for content in ("first", "second"):
        write_whole(link, content)
        assert link.is_symlink()
        assert (folder / "real.json").read_text() == content
    assert [path.name for path in folder.iterdir()] == ["real.json"]


def test_a_pipe_is_written_to_as_it_is(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reading = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        require_writable(pipe)
        write_whole(pipe, "new")
        assert os.read(reading, 100) == b"new"
    finally:
        os.close(reading)
    assert [path.name for path in tmp_path.iterdir()] == ["pipe"]
    assert pipe.is_fifo()


def test_what_is_writable_is_known_before_and_nothing_is_left(tmp_path):
    require_writable(tmp_path / "report.json")
    assert not list(tmp_path.iterdir())
    with pytest.raises(OutputError, match="directory"):
        require_writable(tmp_path)
    with pytest.raises(OutputError, match="No such file"):
        require_writable(tmp_path / "missing" / "report.json")


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.00 KiB"), (3 << 19, "1.50 MiB"), (5 << 40, "5120.00 GiB")],
)
def test_human_bytes(nbytes, text):
    assert human_bytes(nbytes) == text


def test_a_floor_of_a_step_that_held_more_is_not_shown():
    assert "512.00 KiB (floor 256.00 KiB: what one operator works on)" in str(
        Report(record(floor_bytes=1 << 18))
    )
    assert "floor" not in str(Report(record(floor_bytes=1 << 20)))

import json
import os
from pathlib import Path

import pytest

from benchmarks import _report


def test_a_report_has_its_header_results_and_table(tmp_path: Path) -> None:
    path_json, path_md = _report.write("codecs", {"ratio": 2.5}, "| a |\n|---|\n", tmp_path / "new")
    written = json.loads(path_json.read_text())
    assert written["results"] == {"ratio": 2.5}
    expected = {"date", "command", "cpu", "cores", "memory_bytes", "python", "torch"}
    assert expected | {"torch_threads", "commit", "dirty"} <= written["header"].keys()
    assert path_json.name == f"codecs-{written['header']['date']}.json"
    assert path_md.read_text().startswith("# codecs\n\n- date: ")
    assert path_md.read_text().endswith("| a |\n|---|\n")


@pytest.mark.parametrize("value", [float("nan"), object()])
def test_a_payload_that_is_not_json_leaves_nothing(tmp_path: Path, value: object) -> None:
    with pytest.raises((TypeError, ValueError)):
        _report.write("codecs", {"ratio": value}, "", tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_failed_write_keeps_the_earlier_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = {path: path.read_text() for path in _report.write("codecs", {}, "old", tmp_path)}

    def fail(*_: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="no space"):
        _report.write("codecs", {}, "new", tmp_path)
    assert {path: path.read_text() for path in tmp_path.iterdir()} == before


def test_todays_report_can_be_gone_on_with_at_the_same_commit_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert _report.today("budget", tmp_path) == {}
    _report.write("budget", {"gpt": 2.5}, "", tmp_path)
    assert _report.today("budget", tmp_path) == {"gpt": 2.5}
    monkeypatch.setattr(_report.sys, "orig_argv", ["python", "another", "command"])
    assert _report.today("budget", tmp_path) == {"gpt": 2.5}
    monkeypatch.setattr(_report, "_git", lambda *_: "another commit")
    assert _report.today("budget", tmp_path) == {}


def test_arms_alternate_and_take_turns_at_going_first() -> None:
    calls: list[str] = []
    comparison = _report.interleaved(
        {"plain": lambda: calls.append("p"), "squeezed": lambda: calls.append("s")}, 4, warmup=0
    )
    assert "".join(calls) == "psspps" + "sp"
    assert set(comparison.seconds) == {"plain", "squeezed"}
    assert set(comparison.ratios) == {"plain/squeezed", "squeezed/plain"}
    assert comparison.seconds["plain"].count == 4


def test_ratios_are_taken_within_each_round(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = iter([1.0, 2.0, 30.0, 10.0, 100.0, 500.0])
    monkeypatch.setattr(_report, "_seconds", lambda _: next(seconds))
    ratio = _report.interleaved({"a": int, "b": int}, 3, warmup=0).ratios["b/a"]
    # the second round runs b first
    assert (ratio.minimum, ratio.median, ratio.maximum) == (2.0, 3.0, 5.0)


def test_timed_skips_the_warmup() -> None:
    calls: list[int] = []
    spread = _report.timed(lambda: calls.append(1), repeats=3, warmup=2)
    assert (len(calls), spread.count) == (5, 3)
    assert 0 < spread.minimum <= spread.median <= spread.maximum


def test_nothing_to_time_is_refused() -> None:
    with pytest.raises(ValueError, match="0 arms and 3 repeats"):
        _report.interleaved({}, 3)

"""Quoted reports are not older than marked changes of what they measure; the check finds those that are."""

from datetime import date
from pathlib import Path

import pytest

from benchmarks import _figures, _fresh, _reach

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
CHANGELOG = (ROOT / "CHANGELOG.md").read_text()


def script(name):
    return ROOT / "benchmarks" / f"{name}.py"


def test_nothing_that_is_quoted_is_stale():
    assert _fresh.stale(PAGES, CHANGELOG) == []


def test_a_change_makes_the_reports_of_its_room_stale_and_no_others(tmp_path):
    page, newest = tmp_path / "page.md", _figures.newest()
    link = f"[codecs](../benchmarks/reports/{newest['codecs'].path.name})"
    page.write_text(link + "\n\n```{bars} pipeline_schedules\n```\n")
    day = date.fromisoformat(newest["codecs"].header["date"])
    after = day.replace(year=day.year + 1)
    for room, names in (
        ("codecs", ["codecs", "pipeline_schedules"]),
        ("schedules", ["pipeline_schedules"]),
        ("streaming", []),
    ):
        found = _fresh.stale([page], f"- A line. <!-- measure again: {after} {room} -->")
        assert [each.report.name for each in found] == names
        assert all(each.rooms == {room: after} for each in found)
    same_day = _fresh.stale([page], f"<!-- measure again: {day} codecs -->")
    assert "codecs" not in [each.report.name for each in same_day]


def test_every_quoted_report_measures_something():
    quoted = _fresh.quoted(PAGES)
    assert len(quoted) > 50 and all(_reach.rooms_of(each.script) for each in quoted)


@pytest.mark.parametrize(
    ("name", "rooms"),
    [
        ("pipeline_paper", {"planner", "schedules", "schema"}),  # by names behind doors
        ("static_allocation", {"memory", "schema"}),
        ("streaming_models", {"memory", "schema", "streaming"}),
    ],
)
def test_rooms_are_those_whose_files_are_reached(name, rooms):
    assert _reach.rooms_of(script(name)) == rooms


@pytest.mark.parametrize(
    ("name", "some", "none"),
    [
        ("whole_step", {"planning", "optim", "capture"}, {"pipeline", "streaming", "doctor"}),  # lazy names
        ("first_use", {"planning", "codecs"}, {"pipeline"}),  # programs as text
        ("compiled", {"compiling"}, {"doctor", "pipeline"}),
    ],
)
def test_rooms_behind_lazy_doors_and_in_programs_are_found(name, some, none):
    found = _reach.rooms_of(script(name))
    assert some <= found and not none & found


@pytest.mark.parametrize("mark", ["soon codecs", "2026-11-26", "2026-11-26 codec", "2026-11-99 codecs"])
def test_a_mark_without_a_day_and_rooms_is_refused(mark):
    with pytest.raises(ValueError, match=r"not a day and rooms|day is out of range|day 99 must be in range"):
        _fresh.changed(f"<!-- measure again: {mark} -->")


def test_the_last_change_of_a_room_counts():
    text = "<!-- measure again: 2026-01-02 codecs memory -->\n<!-- measure again: 2026-03-04 codecs -->"
    assert _fresh.changed(text) == {"codecs": date(2026, 3, 4), "memory": date(2026, 1, 2)}


def test_it_says_what_to_run(capsys, monkeypatch, tmp_path):
    for name in ("docs", "benchmarks"):
        (tmp_path / name).mkdir()
    report = _figures.newest()["codecs"].path.name
    (tmp_path / "README.md").write_text(f"[codecs](benchmarks/reports/{report})")
    (tmp_path / "CHANGELOG.md").write_text("<!-- measure again: 2099-01-01 codecs -->")
    monkeypatch.setattr(_fresh, "ROOT", tmp_path)
    assert _fresh.main() == 1
    said = capsys.readouterr().out
    assert f"{report} is older than a change of codecs (2099-01-01)" in said
    assert 'make bench BENCHMARKS="codecs"' in said
    (tmp_path / "CHANGELOG.md").write_text("")
    assert _fresh.main() == 0 and not capsys.readouterr().out

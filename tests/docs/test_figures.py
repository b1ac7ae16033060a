"""Drawings and lists of reports say what the reports say, and leave nothing out silently."""

import json
import re

import pytest

from benchmarks import _figures

REPORT = """# speed

- date: 2026-02-01

## Seconds

| network | plain | squeezed / plain |
|---|---|---|
| a | 1.0 | 1.42 (1.31 to 1.55) |
| b | 2.0 | |

Batches:

| network | batch |
|---|---|
| a | 8 |
"""


@pytest.fixture
def speed(tmp_path):
    for day, commit in (("01-09", "old"), ("02-01", "new")):
        header = {"command": "python -m benchmarks.codecs --name speed", "commit": commit}
        (tmp_path / f"speed-2026-{day}.json").write_text(json.dumps({"header": header, "results": {}}))
        (tmp_path / f"speed-2026-{day}.md").write_text(REPORT)
    return _figures.newest(tmp_path)["speed"]


def test_the_newest_report_of_a_name_is_taken_with_its_scripts_first_line(speed):
    assert (speed.path.name, speed.header["commit"]) == ("speed-2026-02-01.md", "new")
    assert speed.measures.startswith("Codecs against memcpy")


def test_a_table_is_found_by_the_line_above_it(speed):
    assert _figures.table(speed)[1] == {"network": "b", "plain": "2.0", "squeezed / plain": ""}
    assert _figures.table(speed, "Batches") == [{"network": "a", "batch": "8"}]
    with pytest.raises(_figures.FigureError, match=r"speed-2026-02-01.md has no table under 'Bytes'"):
        _figures.table(speed, "Bytes")


def test_a_column_that_is_not_there_is_an_error(speed):
    with pytest.raises(_figures.FigureError, match="no column.*'seconds'.*it has.*'plain'"):
        _figures.rows_of(_figures.table(speed), ["network"], ["seconds"])
    with pytest.raises(_figures.FigureError, match="no column"):
        _figures.rows_of([], ["network"], ["plain"])


@pytest.mark.parametrize(
    ("text", "figures"),
    [
        ("34.8x", (34.8, 34.8, 34.8)),
        ("1.42 (1.31 to 1.55)", (1.42, 1.31, 1.55)),
        ("-0.5 (-1e-1..2e+0)", (-0.5, -0.1, 2.0)),
        ("6.7e-03 (4.2e-03..1.3e-02)", (6.7e-3, 4.2e-3, 1.3e-2)),
        ("+12.3 %", (12.3, 12.3, 12.3)),
        ("none", None),
        ("", None),
    ],
)
def test_a_cells_number_and_its_spread(text, figures):
    found = _figures.figure(text)
    assert (None if found is None else (found.value, found.low, found.high)) == figures


def test_bars_are_as_long_as_the_figures(speed):
    columns = ["plain", "squeezed / plain"]
    drawn = _figures.bars(
        "Seconds <of all>", _figures.rows_of(_figures.table(speed), ["network"], columns), columns
    )
    widths = [float(width) for width in re.findall(r'width="([\d.]+)" height="11"', drawn)]
    assert len(widths) == 3 and "&lt;of all&gt;" in drawn
    assert widths[0] / widths[2] == pytest.approx(1.0 / 2.0, rel=1e-2)
    assert widths[1] / widths[2] == pytest.approx(1.42 / 2.0, rel=1e-2)
    assert re.findall(r"<title>(.): ([\d.]+)</title>", drawn) == [("a", "1"), ("a", "1.42"), ("b", "2")]


def test_what_pages_say_of_a_report_is_quoted_by_sentences(speed, tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "Other words. It took [half\nthe time](reports/speed-2026-02-01.md), and more. The end.\n\nAnother."
    )
    assert list(_figures.quotations(speed, [page])) == [(page, "It took half the time, and more.")]

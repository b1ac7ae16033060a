from pathlib import Path

from benchmarks import accuracy


def test_a_line_cut_off_by_a_kill_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / "partial.jsonl"
    accuracy.append_row(path, {"seed": 0})
    with path.open("a", encoding="utf-8") as file:
        file.write('{"seed": 1, "accu')
    assert accuracy.read_rows(path) == [{"seed": 0}]
    accuracy.append_row(path, {"seed": 2})
    assert accuracy.read_rows(path) == [{"seed": 0}, {"seed": 2}]

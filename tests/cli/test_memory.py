"""``squeezebox memory`` from outside: figures, files, and exit statuses."""

import csv
import itertools
import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

import squeezebox
from squeezebox.cli import main

ROWS = [("b1", 0, 3, 4), ("b2", 3, 9, 4), ("b3", 0, 9, 4), ("b4", 9, 21, 4), ("b5", 0, 21, 4)]


@pytest.fixture
def file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "in.csv"
    path.write_text("\n".join(["id,lower,upper,size", *(",".join(map(str, row)) for row in ROWS)]) + "\n")
    return str(path)


def run(capfd, *arguments):
    """(exit status, standard output, standard error)."""
    with pytest.raises(SystemExit) as ended:
        main(("memory", "pack", *arguments))
    captured = capfd.readouterr()
    return ended.value.code, captured.out, captured.err


@pytest.mark.parametrize("packer", ["search", "somas"])
def test_offsets_are_written_and_do_not_clash(tmp_path, capfd, file, packer):
    code, out, err = run(capfd, file, "--capacity", "12", "--packer", packer, "--out", "out.csv")
    assert (code, err) == (0, "")
    assert "height       12 bytes" in out and "ratio        1.0000" in out and "which suffices" in out
    rows = list(csv.DictReader((tmp_path / "out.csv").read_text().splitlines()))
    assert [(r["id"], int(r["lower"]), int(r["upper"]), int(r["size"])) for r in rows] == ROWS
    for a, b in itertools.combinations(rows, 2):
        together = int(a["lower"]) < int(b["upper"]) and int(b["lower"]) < int(a["upper"])
        assert not together or abs(int(a["offset"]) - int(b["offset"])) >= 4


def test_a_capacity_that_does_not_suffice_is_an_error_with_the_shortage(tmp_path, capfd, file):
    code, out, err = run(capfd, file, "--capacity", "10", "--out", "out.csv")
    assert code == 1 and "10 bytes, which does not suffice" in out
    assert "falls 2 bytes short of the 12 bytes found" in err and "at least 2 bytes are missing" in err
    assert not (tmp_path / "out.csv").exists()


def test_figures_come_as_json_too(capfd, file):
    code, out, _ = run(capfd, file, "--capacity", "0.5KiB", "--alignment", "64", "--json")
    figures = json.loads(out)
    assert code == 0 and figures["capacity_bytes"] == 512
    assert figures["height_bytes"] == figures["lower_bound_bytes"] == 192 and figures["ratio"] == 1.0


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (("--capacity", "much"), 2, "--capacity much is no size"),
        (("--packer", "tetris"), 2, "give search or somas"),
        (("--seconds", "-1"), 2, "--seconds -1"),
        (("--alignment", "0"), 2, "alignment 0"),
        (("--out", "nowhere/out.csv"), 1, "nowhere"),
    ],
)
def test_errors_have_no_traceback(capfd, file, arguments, status, words):
    code, _, err = run(capfd, file, *arguments)
    assert code == status and words in err and "Traceback" not in err


@pytest.mark.slow  # compiles twice
def test_the_first_run_on_a_machine_finds_what_the_second_does(tmp_path):
    """Compiling is not on the search's clock."""
    turn, rows = random.Random(6), []
    for at in range(80):  # the heuristics leave these 1.09 times as high as the search
        start = turn.randrange(80)
        rows.append((at, start, start + turn.randrange(1, 40), turn.randrange(1, 60)))
    text = "\n".join(["id,lower,upper,size", *(",".join(map(str, row)) for row in rows)]) + "\n"
    (tmp_path / "in.csv").write_text(text)
    environment = {
        **os.environ,
        "NUMBA_CACHE_DIR": str(tmp_path / "compiled"),
        "PYTHONPATH": str(Path(squeezebox.__file__).parents[1]),
    }
    command = [sys.executable, "-m", "squeezebox.cli", "memory", "pack", "in.csv", "--json", "--seconds", "3"]
    found = [
        json.loads(
            subprocess.run(command, capture_output=True, cwd=tmp_path, env=environment, check=True).stdout
        )
        for _ in range(2)
    ]
    assert found[0] == found[1] and found[0]["ratio"] == 1.0

"""All reports are made again by one command, which goes on from where it ended."""

import importlib
import json
import subprocess

import pytest

from benchmarks import _again, _figures, _report


def test_it_knows_how_to_make_every_report():
    assert _again.COMMANDS.keys() >= _figures.newest().keys()
    assert _again.COMMANDS.keys() >= set(_again.ONE_THREAD)
    for name, command in _again.COMMANDS.items():
        module, *options = command.split()
        assert (_figures.ROOT / "benchmarks" / f"{module}.py").is_file()
        assert "--name" not in options or options[options.index("--name") + 1] == name


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted({command.split()[0] for command in _again.COMMANDS.values()}))
def test_every_benchmark_finds_its_own_parts(name):
    try:
        importlib.import_module(f"benchmarks.{name}")
    except ModuleNotFoundError as error:  # of another project that is not installed
        package = str(error.name).split(".")[0]
        assert package not in ("squeezebox", "benchmarks", "tests")
        assert not (_figures.ROOT / "benchmarks" / f"{package}.py").exists()


@pytest.fixture
def code(tmp_path, monkeypatch):
    """A repository with a benchmark that ends well if there is a file, and where it is."""

    def git(*arguments):
        own = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
        return subprocess.run(
            ["git", *own, *arguments], cwd=tmp_path, check=True, capture_output=True, text=True
        )

    for name in ("src/one.py", "benchmarks/two.py", "demo/three.py"):
        path = tmp_path / name
        path.parent.mkdir()
        path.write_text("")
    (tmp_path / "benchmarks" / "two.py").write_text(
        "import pathlib, sys\nsys.exit(not pathlib.Path('well').exists())"
    )
    git("init", "-q")
    git("add", ".")
    git("commit", "-qm", "one")
    monkeypatch.setattr(_figures, "ROOT", tmp_path)
    monkeypatch.setattr(_figures, "PARTIAL", tmp_path / "benchmarks" / "reports" / ".partial")
    monkeypatch.setattr(_report, "ROOT", tmp_path)
    monkeypatch.setattr(_report, "_command", lambda: "python -m benchmarks.two")
    monkeypatch.setattr(_report, "REPORTS", tmp_path / "benchmarks" / "reports")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(_figures, "newest", lambda: reports)
    monkeypatch.setattr(_again, "COMMANDS", {"two": "two", "other": "two --name other"})
    reports = {}

    def write(name, **header):
        commit = git("rev-parse", "HEAD").stdout.strip()
        reports[name] = _figures.Report(
            name=name, path=tmp_path, header={"command": "benchmarks.two", "commit": commit} | header
        )

    return tmp_path, git, write


def test_what_is_of_this_code_is_not_made_again(code, capfd):
    folder, git, write = code
    write("two")
    write("other", dirty=True)
    assert _again.main([]) == 1
    said = capfd.readouterr()
    assert "1 of 2 reports" in said.out and "1 of 1: other" in said.out
    assert "make bench BENCHMARKS=other" in said.err
    write("other")
    assert _again.main(["other"]) == 1  # a report of this code, of a benchmark that ended amid it
    (folder / "well").write_text("")
    assert _again.main(["other"]) == 0
    assert "1 of 1 reports" in (_again.main(["other"]), capfd.readouterr().out)[1]
    (folder / "benchmarks" / "reports" / "two.json").write_text(json.dumps({}))
    git("add", "benchmarks/reports")
    git("commit", "-qm", "a report changes no code")
    assert "2 of 2 reports" in (_again.main([]), capfd.readouterr().out)[1]
    (folder / "src" / "one.py").write_text("changed = 'and not imported'")
    assert "2 of 2 reports" in (_again.main([]), capfd.readouterr().out)[1]
    (folder / "benchmarks" / "two.py").write_text("changed = True")
    assert "0 of 2 reports" in (_again.main([]), capfd.readouterr().out)[1]


def test_a_commit_may_say_that_it_alters_no_figure(code, capfd):
    folder, git, write = code
    write("two")

    def made_again(text, message):
        (folder / "benchmarks" / "two.py").write_text(text)
        git("commit", "-qam", message)
        _again.main(["two"])
        return "1 of 1 reports" not in capfd.readouterr().out

    assert not made_again("first = 1", "Names\n\nFigures: unchanged")
    (folder / "benchmarks" / "two.py").write_text("second = 2")
    _again.main(["two"])
    assert "0 of 1 reports" in capfd.readouterr().out  # no commit says so yet
    assert not made_again("third = 3", "More names\n\nFigures: unchanged")
    assert made_again("fourth = 4", "Faster\n\nBefore, Figures: unchanged was said of others.")
    write("two")
    assert not made_again("fifth = 5", "Others' plans\n\nFigures: one twofold")
    assert made_again("sixth = 6", "Other plans\n\nFigures: one two")
    write("other", commit="0" * 40)
    assert "0 of 1 reports" in (_again.main(["other"]), capfd.readouterr().out)[1]


def test_a_benchmark_goes_on_from_what_is_of_this_code(code):
    folder, git, _ = code
    git("commit", "--allow-empty", "-qm", "the same code")
    first, second = git("log", "--format=%H").stdout.split()
    rows = [{"commit": first, "seed": 0}, {"commit": second, "seed": 1}]
    _report.write("two", {"rows": rows}, "", _report.REPORTS)
    (_report.partial("two") / "made").touch()
    assert _report.newest_rows("two") == rows
    assert (_report.partial("two") / "made").exists()
    (folder / "benchmarks" / "two.py").write_text("changed = True")
    assert _report.newest_rows("two") == []
    assert not (_report.partial("two") / "made").exists()
    (_report.partial("two") / "made").touch()
    git("commit", "-qam", "what was changed")
    assert not (_report.partial("two") / "made").exists()  # it was made of code of no commit


def test_a_report_of_an_allocator_that_is_not_here_is_left_out(monkeypatch, capsys):
    monkeypatch.setattr(_again, "find_library", lambda name: None)
    assert _again.main(["ways_whole"]) == 0
    assert "ways_whole is left out: jemalloc" in capsys.readouterr().out


def test_a_name_of_no_report_is_refused(capsys):
    assert _again.main(["codec"]) == 2
    assert "no report codec; there are accuracy," in capsys.readouterr().err

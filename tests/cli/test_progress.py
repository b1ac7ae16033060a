"""Progress of what takes long: a bar on a pseudo-terminal, lines in a pipe, nothing of what is quick."""

import contextlib
import io
import json
import os
import pty
import re
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from squeezebox.cli import main
from squeezebox.cli._show import progress

HARD = (
    Path(__file__).parents[2] / "benchmarks" / "minimalloc" / "A.csv"
)  # the search takes all of its seconds


@pytest.fixture
def watched(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setattr("squeezebox.cli._show._SILENT", 0.0)
    monkeypatch.setattr("squeezebox.cli._show._LOOK", 0.05)


@contextlib.contextmanager
def terminal():
    """Standard error is a pseudo-terminal; what this gives has all that it showed, afterwards."""
    outside, inside = pty.openpty()
    shown = []

    def read():
        with contextlib.suppress(OSError):  # the other end is closed
            while chunk := os.read(outside, 1 << 16):
                shown.append(chunk.decode())

    reader = threading.Thread(target=read)
    reader.start()
    try:
        with os.fdopen(inside, "w") as stream, contextlib.redirect_stderr(stream):
            yield shown
    finally:
        reader.join()
        os.close(outside)


@contextlib.contextmanager
def pipe():
    """The same with what is no terminal."""
    shown, stream = [], io.StringIO()
    with contextlib.redirect_stderr(stream):
        yield shown
    shown.append(stream.getvalue())


def pack():
    """One call that never says how far it is."""
    with pytest.raises(SystemExit) as ended:
        main(["memory", "pack", str(HARD), "--seconds", "0.5", "--json"])
    return ended.value.code


def count():
    with progress("counting") as show:
        for number in range(3):
            show(number + 1, 3, f"number {number}")


def test_a_terminal_gets_a_bar_that_goes_away(watched, capfd):
    with terminal() as shown:
        assert pack() == 0
    text = "".join(shown)
    assert "packing" in text and "0:00:0" in text and "\x1b[?25h" in text  # the cursor is back
    assert json.loads(capfd.readouterr().out)["buffers"] > 0


def test_a_terminal_shows_what_is_done_and_of_how_many(watched):
    with terminal() as shown, progress("counting") as show:
        show(2, 3, "the second")
        while "the second" not in "".join(shown):
            time.sleep(0.01)
    assert re.search(r"counting.*2/3.*the second", "".join(shown))


def test_a_note_is_shown_as_it_is(watched):
    until = time.monotonic() + 10.0
    with terminal() as shown, progress("[b]counting") as show:
        show(2, 3, "plan=run[a].json")
        while "run[a].json" not in "".join(shown) and time.monotonic() < until:
            time.sleep(0.01)
    assert re.search(r"\[b\]counting.*2/3.*plan=run\[a\].json", "".join(shown))


def test_what_is_printed_meanwhile_is_shown_on_the_terminal_and_standard_output_comes_back(watched, capsys):
    before = sys.stdout
    with terminal() as shown:
        with progress("counting") as show:
            show(1, 3, "the first")
            while "the first" not in "".join(shown):
                time.sleep(0.01)
            print("by the model")
        assert sys.stdout is before
    assert "by the model" in "".join(shown) and capsys.readouterr().out == ""


def test_a_pipe_gets_lines(watched):
    with pipe() as shown:
        assert pack() == 0
        count()
    lines = shown[0].splitlines()
    assert any(re.fullmatch(r"packing: \d+ s", line) for line in lines)
    assert re.fullmatch(r"counting: 3/3, \d+ s, number 2", lines[-1])
    assert "\x1b" not in shown[0]


def test_lines_become_rare(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("squeezebox.cli._show._SILENT", 2.0)
    monkeypatch.setattr("squeezebox.cli._show.time", SimpleNamespace(monotonic=lambda: now[0]))
    with pipe() as shown, progress("training") as show:
        for number in range(600):
            now[0] += 1.0
            show(number, 1000, "a step")
    seconds = [int(line.split(", ")[1].removesuffix(" s")) for line in shown[0].splitlines()]
    assert seconds == [2, 4, 8, 16, 32, 64, *range(124, 600, 60)]


@pytest.mark.parametrize("kind", (terminal, pipe))
def test_what_is_quick_or_fails_leaves_nothing(kind):
    threads = threading.active_count()
    with kind() as shown:
        count()
        with pytest.raises(KeyError), progress("failing"):
            raise KeyError
    assert threading.active_count() == threads
    assert "".join(shown) == ""

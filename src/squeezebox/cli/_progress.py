"""Progress on standard error of what takes longer than two seconds: a bar on a terminal, lines elsewhere."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Protocol

Show = Callable[[int, int, str], None]

_SILENT = 2.0  # seconds before anything is shown,
_LOOK = 0.5  # between two looks at what is done,
_PAUSE = 60.0  # and between two lines, at most


@contextlib.contextmanager
def progress(title: str) -> Iterator[Show]:
    """What this gives may be called with (done, total, note); time is shown also of what never calls it.

    What is printed meanwhile goes to standard error too: standard output is for results alone.
    """
    with contextlib.redirect_stdout(sys.stderr):  # the outermost: a bar restores what it has found
        view: _View = _Bar(title) if sys.stderr.isatty() else _Lines(title)
        ended = threading.Event()
        watch = threading.Thread(target=_watch, args=(view, ended), daemon=True)
        watch.start()
        try:
            yield view.show
        finally:
            ended.set()
            watch.join()
            view.close()


class _View(Protocol):
    """Shows the latest progress it was given."""

    def show(self, done: int, total: int, note: str) -> None:
        """So much is done."""

    def look(self) -> None:
        """Time has passed."""

    def close(self) -> None:
        """All is done, or it failed."""


def _watch(view: _View, ended: threading.Event) -> None:
    while not ended.wait(_LOOK):
        view.look()


class _Bar:
    """For terminals; gone when all is done."""

    def __init__(self, title: str) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[note]}"),
        )
        self._bar = Progress(*columns, console=Console(stderr=True), transient=True)
        self._task = self._bar.add_task(title, total=None, note="")
        self._began = time.monotonic()

    def show(self, done: int, total: int, note: str) -> None:
        self._bar.update(self._task, completed=done, total=total, note=note)

    def look(self) -> None:
        if time.monotonic() - self._began >= _SILENT:
            self._bar.start()

    def close(self) -> None:
        if self._bar.live.is_started:
            self._bar.stop()


class _Lines:
    """For files and pipes: a line whenever the time has doubled, but one a minute, and at the end."""

    def __init__(self, title: str) -> None:
        self._title, self._began, self._due = title, time.monotonic(), _SILENT
        self._last: tuple[Any, ...] = ()
        self._lock = threading.Lock()

    def show(self, done: int, total: int, note: str) -> None:
        self._last = (done, total, note)
        self.look(final=done == total)

    def look(self, final: bool = False) -> None:
        with self._lock:
            seconds = time.monotonic() - self._began
            if seconds >= self._due or (final and seconds >= _SILENT):
                self._due = seconds + min(seconds, _PAUSE)
                print(f"{self._title}: {self._text(seconds)}", file=sys.stderr, flush=True)

    def close(self) -> None:
        """Nothing is left."""

    def _text(self, seconds: float) -> str:
        if not self._last:
            return f"{seconds:.0f} s"
        done, total, note = self._last
        return f"{done}/{total}, {seconds:.0f} s, {note}"

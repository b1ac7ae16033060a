"""Progress on standard error: a bar on a terminal, a few lines elsewhere."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator

Advance = Callable[[str], None]
Count = Callable[[int, int, str], None]

_PATIENCE = 4.0  # seconds


@contextlib.contextmanager
def progress(title: str, total: int) -> Iterator[Advance]:
    """Call what this gives once a unit of work, with a short note to show beside the count."""
    with _bar(title, total) if sys.stderr.isatty() else _lines(title, total) as advance:
        yield advance


@contextlib.contextmanager
def counted(title: str) -> Iterator[Count | None]:
    """What this gives is called with (done, total, note); None where nobody watches a terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[note]}"),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(title, total=None, note="")
        yield lambda done, total, note: bar.update(task, completed=done, total=total, note=note)


@contextlib.contextmanager
def timed(title: str) -> Iterator[Callable[[int, int, float], None]]:
    """What this gives is called with (done, total, seconds left): a bar on a terminal, else a few lines."""
    with counted(title) as count:

        def show(done: int, total: int, left: float) -> None:
            note = f"{left:.0f} s left"
            if count is not None:
                count(done, total, note)
            elif done == total or done * 8 // total > (done - 1) * 8 // total:
                print(f"{title}: {done}/{total}, {note}", file=sys.stderr, flush=True)

        yield show


@contextlib.contextmanager
def patient(title: str) -> Iterator[Count]:
    """What this gives is called with (done, total, note): a bar on a terminal, else now and then a line."""
    with counted(title) as count:
        last = time.monotonic()

        def show(done: int, total: int, note: str) -> None:
            nonlocal last
            if count is not None:
                count(done, total, note)
            elif time.monotonic() - last > _PATIENCE:
                last = time.monotonic()
                print(f"{title}: {done}/{total}, {note}", file=sys.stderr, flush=True)

        yield show


@contextlib.contextmanager
def _bar(title: str, total: int) -> Iterator[Advance]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
    )
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(title, total=total, note="")
        yield lambda note: bar.update(task, advance=1, note=note)


@contextlib.contextmanager
def _lines(title: str, total: int) -> Iterator[Advance]:
    start, done = time.monotonic(), 0

    def advance(note: str) -> None:
        nonlocal done
        done += 1
        if done == total or done * 8 // total > (done - 1) * 8 // total:
            seconds = time.monotonic() - start
            print(f"{title}: {done}/{total}, {seconds:.0f} s, {note}", file=sys.stderr, flush=True)

    yield advance

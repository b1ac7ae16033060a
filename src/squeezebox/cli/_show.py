"""Results as tables on standard output, and progress on standard error."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from squeezebox.schema import human_bytes

_WIDTH = 100  # where standard output is no terminal


def show_demo(result: Mapping[str, Any], out: Path) -> None:
    """The table of both arms, the lead story, and where the figures went."""
    plain, squeezed, story = result["plain"], result["squeezed"], result["story"]
    settings = result["settings"]
    table = Table("", "plain", "squeezed", "ratio", box=SIMPLE, title_justify="left")
    table.title = (
        f"Fashion-MNIST ({settings['data']}), {settings['steps']} steps of {settings['batch']} images"
    )
    for column in table.columns[1:]:
        column.justify = "right"
    for row in _rows(plain, squeezed):
        table.add_row(*row)
    console = _console()
    console.print(table)
    console.print(
        "One seed of a short training says little about accuracy: --seed takes others, squeezebox.audit many."
    )
    console.print(
        f"At the {human_bytes(story['limit_bytes'])} where plain training holds batch "
        f"{story['plain_batch']}, squeezed training holds batch {story['squeezed_batch']} "
        f"({human_bytes(story['peak_bytes'])} measured, BatchNorm over the whole batch)."
    )
    if story["refresh_peak_bytes"] is not None:
        console.print(
            "Steps that refresh the bounds (the first 16, then every 4th to 32nd) need more: "
            f"{human_bytes(squeezed['refresh_peak_bytes'])} at batch {story['plain_batch']}, "
            f"{human_bytes(story['refresh_peak_bytes'])} at batch {story['squeezed_batch']}."
        )
    console.print(f"{result['seconds']:.0f} s in all; the same figures are in {out}.")


def show_gigapixel(result: Mapping[str, Any], out: Path) -> None:
    """The image, the strips, and what a step took."""
    image, stages, console = result["image"], result["plan"]["stages"], _console()
    console.print(
        f"{image['height']} x {image['width']} pixels ({human_bytes(image['bytes'])}, memory-mapped), "
        f"{result['parameters']:,} parameters"
    )
    for stage in stages:
        way = "forward and back" if stage["derives"] else "forward"
        console.print(
            f"{stage['strips']} strips of {stage['height']} columns or rows, halo {stage['halo']}: {way}"
        )
    peak = result["peak_bytes"]
    console.print(f"peak beyond the image: {'not known here' if peak is None else human_bytes(peak)}")
    console.print(f"step: {result['step_seconds']:.1f} s; loss {result['losses'][-1]:.4f}")
    console.print(f"{result['seconds']:.0f} s in all; the same figures are in {out}.")


def _rows(plain: Mapping[str, Any], squeezed: Mapping[str, Any]) -> list[tuple[str, ...]]:
    def sizes(label: str, key: str) -> tuple[str, ...]:
        ratio = plain[key] / max(squeezed[key], 1)
        return label, human_bytes(plain[key]), human_bytes(squeezed[key]), f"{ratio:.1f}x smaller"

    gain = squeezed["test_accuracy"] - plain["test_accuracy"]
    return [
        sizes("saved for backward", "saved_bytes"),
        sizes("peak of the step", "peak_bytes"),
        sizes("  beyond parameters, gradients, optimizer, inputs", "activation_peak_bytes"),
        (
            "step time (medians, refreshing steps apart)",
            f"{plain['step_seconds'] * 1e3:.0f} ms",
            f"{squeezed['step_seconds'] * 1e3:.0f} ms",
            f"{squeezed['step_seconds_ratio']:.2f}x",
        ),
        (
            "test accuracy",
            f"{plain['test_accuracy']:.2%}",
            f"{squeezed['test_accuracy']:.2%}",
            f"{100 * gain:+.2f} points",
        ),
        ("gradient noise, measured", "0", _noise(squeezed["noise"]), ""),
        ("gradient noise, predicted", "0", _noise(squeezed["predicted_noise"]), ""),
    ]


def _noise(value: float | None) -> str:
    return "-" if value is None else f"{value:.1e}"


def show_codecs(rows: Sequence[Mapping[str, Any]]) -> None:
    """One line a codec."""
    table = Table("codec", "exact", "keeps signs", "fixed size", box=SIMPLE)
    for row in rows:
        flags = ("yes" if row[key] else "no" for key in ("exact", "preserves_sign", "fixed_size"))
        table.add_row(row["name"], *flags)
    _console().print(table)


def _console() -> Console:
    return Console(highlight=False, markup=False, emoji=False, width=None if sys.stdout.isatty() else _WIDTH)


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
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[note]}", markup=False),
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

"""Results as tables on standard output."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from squeezebox.reports import human_bytes

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
    return Console(highlight=False, width=None if sys.stdout.isatty() else _WIDTH)

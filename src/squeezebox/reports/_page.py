"""A profiled step as one HTML file: drawings, tables, and no request to anywhere."""

from __future__ import annotations

import html
import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields
from importlib.resources import files
from typing import Any

from squeezebox.schema import (
    BoundRecord,
    Forecast,
    LiveSample,
    SavedTensor,
    StepTimeline,
    TimelineCell,
    human_bytes,
)

# Beyond these numbers rows are added up in one, and the rest left out: a file stays under 500 kB.
_MOST_LAYERS, _MOST_CELLS, _MOST_TENSORS = 250, 400, 300
_MOST_BOUNDS, _MOST_REFRESHES = 40, 48
_LONGEST = 60  # letters of a name
PHASES = ("before", "forward", "loss", "backward", "optimizer")
UNITS = ("bytes", "seconds", "")  # of what was predicted
_ACTIONS = ("kept", "compressed", "recomputed", "offloaded", "shape only")

Row = Sequence[str | int | float | None]


def timeline_html(timeline: StepTimeline) -> str:
    """The timeline as a page of its own: styles, script and figures are in it.

    Where the model has hundreds of modules, the smallest are added up in one row, so that sums stay.
    """
    page = files("squeezebox.reports").joinpath("page")
    record = timeline.record
    parts = {
        "title": _escaped(f"{timeline.model}: one step under Squeezebox"),
        "subtitle": f"After step {record.step}. Everything here was measured in one profiled step.",
        "totals": _totals(timeline),
        "owner": _escaped(f"Highest: {owner(timeline.peak)}."),
        "peak": _peak(timeline),
        "tensors": _tensors(timeline),
        "seconds": f"{timeline.seconds:.3f} s",
        "unprofiled": f"{timeline.unprofiled_seconds:.3f} s",
        "cells": _cells(timeline.cells),
        "history": _history(_refreshes(timeline)),
        "forecasts": _forecasts(timeline.forecasts),
        "style": page.joinpath("timeline.css").read_text("utf-8"),
        "script": page.joinpath("timeline.js").read_text("utf-8"),
        "figures": json.dumps(_figures(timeline), separators=(",", ":"), allow_nan=False).replace(
            "<", "\\u003c"
        ),
    }
    pieces = page.joinpath("timeline.html").read_text("utf-8").split("@")
    return "".join(parts.get(piece, piece) for piece in pieces)


def owner(sample: LiveSample) -> str:
    """A moment's bytes, and who was running."""
    who = f"{sample.phase} of {sample.module}" if sample.module else sample.phase
    return f"{human_bytes(sum(sample.nbytes))} in {who}, {sample.operator}"


def action(tensor: SavedTensor) -> str:
    """What was done with a tensor, in one word or two."""
    done = tensor.codec.split("+")
    for codec, name in (("keep", "kept"), ("offload", "offloaded"), ("recompute", "recomputed")):
        if codec in done:
            return name
    return "shape only" if tensor.codec == "none" else "compressed"


def bits(tensors: Sequence[SavedTensor]) -> float:
    """Bits held for each element of what was saved, of which a tensor's shape may be a part only."""
    elements = sum(8 * tensor.saved_bytes / _width(tensor.dtype) for tensor in tensors)
    return 8.0 * sum(tensor.packed_bytes for tensor in tensors) / elements if elements else 0.0


def _width(dtype: str) -> int:
    """Bits of an element, as its dtype's name says; a bool has 8."""
    found = re.search(r"\d+", dtype)
    return int(found[0]) if found else 8


def _figures(timeline: StepTimeline) -> dict[str, Any]:
    """What the script draws."""
    names: dict[str, int] = {}

    def number(name: str) -> int:
        return names.setdefault(_shortened(name), len(names))

    samples = [
        {
            "seconds": round(sample.seconds, 7),
            "phase": number(sample.phase),
            "module": number(sample.module),
            "operator": number(sample.operator),
            "nbytes": sample.nbytes,
        }
        for sample in timeline.samples
    ]
    refreshes = _refreshes(timeline)
    return {
        "seconds": timeline.seconds,
        "budget_bytes": timeline.record.budget_bytes,
        "owner": owner(timeline.peak),
        "kinds": [kind.value for kind in timeline.kinds],
        "samples": samples,
        "names": list(names),
        "layers": _layers(timeline),
        "actions": _ACTIONS,
        "history": {
            "steps": [f"step {refresh.step}" for refresh in refreshes[:-1]] + ["profiled"],
            "tensors": [
                {"key": _shortened(key), "bounds": [_short(each.bounds.get(key)) for each in refreshes]}
                for key in dict.fromkeys(key for refresh in refreshes for key in refresh.bounds)
            ],
        },
        "forecasts": [
            {item.name: getattr(forecast, item.name) for item in fields(Forecast)}
            for forecast in timeline.forecasts
        ],
    }


def _layers(timeline: StepTimeline) -> list[dict[str, Any]]:
    """Saved tensors by module, in the step's order; together they are all that was saved."""
    groups: dict[str, list[SavedTensor]] = defaultdict(list)
    for tensor in timeline.record.tensors:
        groups[tensor.module].append(tensor)
    largest = sorted(groups, key=lambda name: -sum(tensor.saved_bytes for tensor in groups[name]))
    for name in largest[_MOST_LAYERS:]:
        groups[f"({len(largest) - _MOST_LAYERS} smaller layers)"].extend(groups.pop(name))
    layers = [_layer(name, tensors) for name, tensors in groups.items()]
    small = timeline.record.saved_bytes - sum(layer["saved"] for layer in layers)
    if small:
        part = {"action": "kept", "saved": small, "held": small}
        named = {"module": "(tensors below 4 KiB)", "bits": None, "noise": 0.0}
        layers.append({**named, "saved": small, "held": small, "parts": [part]})
    return layers


def _layer(name: str, tensors: Sequence[SavedTensor]) -> dict[str, Any]:
    parts = []
    for each in _ACTIONS:
        mine = [tensor for tensor in tensors if action(tensor) == each]
        if mine:
            sums = (sum(t.saved_bytes for t in mine), sum(t.packed_bytes for t in mine))
            parts.append({"action": each, "saved": sums[0], "held": sums[1]})
    return {
        "module": _shortened(name),
        "saved": sum(part["saved"] for part in parts),
        "held": sum(part["held"] for part in parts),
        "bits": bits(tensors),
        "noise": sum(tensor.noise_share or 0.0 for tensor in tensors),
        "parts": parts,
    }


def _refreshes(timeline: StepTimeline) -> list[BoundRecord]:
    """The history, with the tensors of the largest saving and evenly chosen steps."""
    sizes = {tensor.key: tensor.saved_bytes - tensor.packed_bytes for tensor in timeline.record.tensors}
    keys = sorted(sizes, key=lambda key: -sizes[key])
    lossy = [key for key in keys if any(key in each.bounds for each in timeline.history)][:_MOST_BOUNDS]
    count = len(timeline.history)
    chosen = sorted({round(i * (count - 1) / (_MOST_REFRESHES - 1)) for i in range(_MOST_REFRESHES)})
    kept = timeline.history if count <= _MOST_REFRESHES else [timeline.history[i] for i in chosen]
    return [
        BoundRecord(step=each.step, bounds={key: each.bounds[key] for key in lossy if key in each.bounds})
        for each in kept
    ]


# --- tables: what the drawings show, also where no script runs


def _totals(timeline: StepTimeline) -> str:
    record = timeline.record
    limit = f" of {human_bytes(record.budget_bytes)}" if record.budget_bytes is not None else ""
    noise = record.noise if record.noise is not None else record.predicted_noise
    items = {
        "peak" + (" of the budget" if limit else ""): human_bytes(record.peak_bytes or 0) + limit,
        "saved by plain PyTorch": human_bytes(record.saved_bytes),
        "held instead": human_bytes(record.packed_bytes),
        "step, without and with profiler": f"{timeline.unprofiled_seconds:.3f} s, {timeline.seconds:.3f} s",
        "gradient noise" + (" (predicted)" if record.noise is None else ""): _power(noise),
    }
    return "".join(
        f"<div><dt>{_escaped(name)}</dt><dd>{_escaped(value)}</dd></div>" for name, value in items.items()
    )


def _peak(timeline: StepTimeline) -> str:
    pairs = zip(timeline.kinds, timeline.peak.nbytes, strict=True)
    return _table(("what", "live"), [(kind.value, nbytes) for kind, nbytes in pairs], (str, human_bytes))


def _cells(cells: Sequence[TimelineCell]) -> str:
    largest = sorted(cells, key=lambda cell: -max(cell.seconds, 1e-9 * cell.peak_bytes))
    rest = largest[_MOST_CELLS:]
    shown = sorted(largest[:_MOST_CELLS], key=lambda cell: PHASES.index(cell.phase))
    names = [item.name for item in fields(TimelineCell)]
    rows = [[getattr(cell, name) for name in names] for cell in shown]
    if rest:
        numbers = [sum(getattr(cell, name) for cell in rest) for name in names[2:]]
        numbers[names.index("highest_bytes") - 2] = max(cell.highest_bytes for cell in rest)
        rows.append(["rest", f"{len(rest)} smaller ones", *numbers])
    shapes = [
        str if name in names[:2] else human_bytes if name.endswith("bytes") else _seconds for name in names
    ]
    titles = [_TITLES.get(name, name.partition("_")[0]) for name in names]
    return _table(titles, rows, shapes)


_TITLES = {
    "seconds": "time",
    "peak_bytes": "live at the peak",
    "highest_bytes": "highest meanwhile",
    "waiting_seconds": "waiting for offload",
    "packed_bytes": "held",
    "packing_seconds": "packing time",
    "unpacking_seconds": "unpacking time",
    "recomputing_seconds": "recomputing time",
}


def _tensors(timeline: StepTimeline) -> str:
    record, planned = timeline.record, timeline.planned_bytes or {}
    largest = sorted(record.tensors, key=lambda tensor: -tensor.saved_bytes)
    rest = largest[_MOST_TENSORS:]
    rows: list[Row] = [
        (
            tensor.key,
            tensor.role.value,
            action(tensor),
            tensor.codec,
            tensor.saved_bytes,
            tensor.packed_bytes,
            planned.get(tensor.key),
            bits([tensor]),
            tensor.bound,
            tensor.noise_share,
        )
        for tensor in largest[:_MOST_TENSORS]
    ]
    if rest:
        sums = sum(t.saved_bytes for t in rest), sum(t.packed_bytes for t in rest)
        noise = sum(tensor.noise_share or 0.0 for tensor in rest)
        rows.append((f"{len(rest)} smaller ones", "", "", "", *sums, None, bits(rest), None, noise))
    titles = ("tensor", "role", "action", "codec", "saved", "held", "planned", "bits", "bound", "noise")
    shapes = (str, str, str, str, human_bytes, human_bytes, human_bytes, "{:.2f}".format, _power, _power)
    return _table(titles, rows, shapes)


def _history(refreshes: Sequence[BoundRecord]) -> str:
    keys = list(dict.fromkeys(key for refresh in refreshes for key in refresh.bounds))
    rows = [(key, *(refresh.bounds.get(key) for refresh in refreshes[-6:])) for key in keys]
    titles = ("tensor", *(f"step {refresh.step}" for refresh in refreshes[-6:-1]), "profiled")
    return _table(titles, rows, (str, *[_power] * (len(titles) - 1)))


def _forecasts(forecasts: Iterable[Forecast]) -> str:
    shapes = dict(zip(UNITS, (human_bytes, _seconds, _power), strict=True))
    rows = [
        (
            each.name,
            shapes[each.unit](each.estimated),
            shapes[each.unit](each.measured),
            each.measured / each.estimated if each.estimated else None,
        )
        for each in forecasts
    ]
    titles = ("figure", "predicted", "measured", "measured / predicted")
    return _table(titles, rows, (str, str, str, "{:.3f}".format)) if rows else ""


def _table(titles: Sequence[str], rows: Iterable[Row], shapes: Sequence[Callable[[Any], str]]) -> str:
    texts = [' class="text"' if shape is str else "" for shape in shapes]
    head = "".join(
        f'<th scope="col"{text}>{_escaped(title)}</th>' for title, text in zip(titles, texts, strict=True)
    )
    body = "".join(
        f"<tr>{''.join(_cell(*each) for each in zip(row, shapes, texts, strict=True))}</tr>" for row in rows
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _cell(value: str | int | float | None, shape: Callable[[Any], str], text: str) -> str:
    if isinstance(value, str):
        return f"<td{text}>{_escaped(_shortened(value))}</td>"
    if not value:
        return f'<td data-v="{0 if value is not None else -1}">{"-" if value is None else "0"}</td>'
    return f'<td data-v="{_short(value)}">{_escaped(shape(value))}</td>'


def _short(value: float | None) -> float | None:
    """As exact as a picture needs; whole numbers stay."""
    return float(f"{value:.7g}") if isinstance(value, float) else value


def _shortened(name: str) -> str:
    return name if len(name) <= _LONGEST else f"…{name[1 - _LONGEST :]}"


def _seconds(value: float) -> str:
    return f"{value * 1e3:.2f} ms" if value < 1.0 else f"{value:.3f} s"


def _power(value: float | None) -> str:
    return "-" if value is None else f"{value:.1e}" if value else "0"


def _escaped(text: str) -> str:
    return html.escape(text)

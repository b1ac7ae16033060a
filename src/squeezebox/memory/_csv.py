"""Buffers and layouts as MiniMalloc's CSV files hold them."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from squeezebox.schema import Buffer, FormatError, Layout

_DIGITS, _SHOWN = 18, 40
_COLUMNS = ("id", "lower", "upper", "size")


def read_buffers(path: str | os.PathLike[str]) -> tuple[Buffer, ...]:
    """The buffers of a file with the columns id, lower, upper and size, in any order.

    Raises:
        FormatError: the file is missing or damaged, or has other columns; names the line that is wrong.
    """
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise FormatError(f"'{path}' cannot be read: {error}.") from error
    try:
        return tuple(_buffers(csv.reader(io.StringIO(text), strict=True)))
    except (FormatError, csv.Error) as error:
        raise FormatError(
            f"'{path}' is no list of buffers: {error}. Its first line must be id,lower,upper,size; each "
            "other one a buffer that lives from lower until just before upper."
        ) from error


def layout_csv(buffers: Sequence[Buffer], layout: Layout) -> str:
    """The columns id, lower, upper, size and offset, one line for each buffer, as MiniMalloc writes them."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow((*_COLUMNS, "offset"))
    for each, offset in zip(buffers, layout.offsets, strict=True):
        writer.writerow((each.name, each.lower, each.upper, each.nbytes, offset))
    return text.getvalue()


def _buffers(rows: Any) -> Iterator[Buffer]:
    header = [name.strip() for name in next(rows, [])]
    if sorted(header) != sorted(_COLUMNS):
        raise FormatError(f"line 1 names the columns {','.join(header) or '(none)'}")
    lines: dict[str, int] = {}
    for row in rows:
        if row:
            line = rows.line_num  # where it ends
            buffer = _buffer(header, row, line)
            if buffer.name in lines:
                raise FormatError(f"lines {lines[buffer.name]} and {line} have the same id '{buffer.name}'")
            lines[buffer.name] = line
            yield buffer


def _buffer(header: list[str], row: list[str], line: int) -> Buffer:
    if len(row) != len(header):
        raise FormatError(f"line {line} has {len(row)} values for {len(header)} columns")
    values = dict(zip(header, row, strict=True))
    lower, upper, size = (_integer(values, column, line) for column in _COLUMNS[1:])
    if lower >= upper:
        raise FormatError(f"line {line} has lower {lower} and upper {upper}, which is no time at all")
    return Buffer(name=values["id"], lower=lower, upper=upper, nbytes=size)


def _integer(values: dict[str, str], column: str, line: int) -> int:
    text = values[column].strip()
    if not (text.isascii() and text.isdigit()) or len(text) > _DIGITS:
        shown = text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
        raise FormatError(
            f"line {line} has {column} '{shown}', which is no whole number from 0 of at most {_DIGITS} digits"
        )
    return int(text)

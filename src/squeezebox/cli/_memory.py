"""The commands of ``squeezebox memory`` and their options."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

memory = typer.Typer(help="Lay buffers out in one block of memory.", no_args_is_help=True)


@memory.callback()
def _root() -> None:
    pass


@memory.command()
def pack(
    file: Annotated[Path, typer.Argument(metavar="FILE.csv", help="Columns: id,lower,upper,size.")],
    capacity: Annotated[
        str | None, typer.Option(help="What must suffice, such as 1MiB (default: as little as is found).")
    ] = None,
    seconds: Annotated[float, typer.Option(help="What the search may take.")] = 10.0,
    packer: Annotated[str, typer.Option(help="search, or somas for the heuristics alone.")] = "search",
    alignment: Annotated[int, typer.Option(help="Of offsets, in bytes.")] = 1,
    out: Annotated[
        Path | None, typer.Option(help="Where id,lower,upper,size,offset go (default: nowhere).")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")] = False,
) -> None:
    """Give each buffer an offset at which no two that live at the same time overlap.

    A buffer lives from step lower until just before step upper. Exit status 1: the capacity does not suffice;
    then nothing is written.
    """
    from squeezebox.cli._packing import Request, run

    figures = run(Request(file, capacity, seconds, packer, alignment, out))
    print(json.dumps(figures.to_dict(), indent=1) if as_json else figures)
    figures.require_fit()

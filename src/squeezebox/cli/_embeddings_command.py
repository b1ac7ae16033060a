"""``squeezebox embeddings`` and its options. Loads typer, but torch only once it runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from squeezebox.cli._options import Json


def embeddings(
    sample: Annotated[
        str,
        typer.Argument(
            metavar="MODULE:CALLABLE",
            help="Returns (tables, batches): (rows, dim) of each, and (indices, offsets) of some steps.",
        ),
    ],
    memory: Annotated[str, typer.Option(help="Of a rank, for rows of tables, such as 2GiB.")],
    ranks: Annotated[int, typer.Option(help="Processes on this machine; torchrun starts its own.")] = 1,
    optimizer: Annotated[str, typer.Option(help="sgd, adagrad or adam.")] = "adagrad",
    mode: Annotated[str, typer.Option(help="Of the bags: sum or mean.")] = "sum",
    out: Annotated[Path, typer.Option(help="Where the plan goes, as JSON.")] = Path("plan.json"),
    as_json: Json = False,
) -> None:
    """Choose where embedding tables lie: whole or split over ranks, and which share of memory each has.

    Ranks take the batches in turn, as their own. The best placements are measured with tables of full size.
    """
    from squeezebox.cli._embeddings import Request, run

    plan = run(Request(sample=sample, memory=memory, optimizer=optimizer, mode=mode), ranks, out)
    if plan is not None:
        print(json.dumps(plan.to_dict(), indent=1) if as_json else f"{plan}\nThe plan is in {out}.")

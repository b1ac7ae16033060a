"""The commands of ``squeezebox pipeline`` and their options."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

pipeline = typer.Typer(help="Train over several ranks, a piece of the model each.", no_args_is_help=True)


@pipeline.callback()
def _root() -> None:
    pass


@pipeline.command()
def simulate(
    schedule: Annotated[
        str,
        typer.Argument(
            metavar="SCHEDULE",
            help="gpipe, 1f1b, interleaved, breadth-first, zb-h1, zb-h2, pipedream or 2bw.",
        ),
    ],
    ranks: Annotated[int, typer.Option(help="How many work together.")] = 4,
    microbatches: Annotated[int, typer.Option(help="Of a batch. PipeDream updates after each.")] = 8,
    loops: Annotated[
        int | None,
        typer.Option(help="Stages a rank, of interleaved and breadth-first.", show_default="2 for those"),
    ] = None,
    batches: Annotated[int, typer.Option(help="One after the other.")] = 1,
    forward: Annotated[
        str, typer.Option(help="Seconds of a microbatch: a number, or 1,2,1,1 by stage.")
    ] = "1",
    backward: Annotated[str, typer.Option(help="Likewise; zb-h1 and zb-h2 halve it.")] = "2",
    transfer: Annotated[float, typer.Option(help="Seconds from rank to rank.")] = 0.0,
    activation: Annotated[
        str | None, typer.Option(help="Bytes a microbatch leaves at a stage: 12MiB, or a size a stage.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Where the drawing goes, as SVG.")] = Path("schedule.svg"),
    trace: Annotated[
        Path | None, typer.Option(help="Where a trace for ui.perfetto.dev goes, as JSON.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")] = False,
) -> None:
    """Draw a schedule, and say what a batch takes and what every rank holds; nothing is run."""
    from squeezebox.cli._simulate import Request, run

    result = run(
        Request(schedule, ranks, microbatches, loops, batches),
        forward=forward,
        backward=backward,
        transfer=transfer,
        activation=activation,
        out=out,
        trace=trace,
    )
    print(json.dumps(result.to_dict(), indent=1) if as_json else f"{result}\n\nThe drawing is in {out}.")

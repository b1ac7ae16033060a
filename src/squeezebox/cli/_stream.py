"""The command ``squeezebox stream train`` and its options."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

stream = typer.Typer(help="Train on images that no memory holds, strip by strip.", no_args_is_help=True)


@stream.callback()
def _root() -> None:
    pass


@stream.command()
def train(
    factory: Annotated[str, typer.Argument(metavar="MODULE:CALLABLE", help="Returns the model when called.")],
    data: Annotated[
        str,
        typer.Option(metavar="MODULE:CALLABLE", help="Returns pairs of image and target."),
    ],
    memory: Annotated[str, typer.Option(help="What a step may take beyond image and model, such as 1GiB.")],
    loss: Annotated[
        str | None,
        typer.Option(metavar="MODULE:CALLABLE", help="loss(output, target) (default: cross entropy)."),
    ] = None,
    optimizer: Annotated[str, typer.Option(help="sgd, sgd-momentum, adam or adamw.")] = "adamw",
    lr: Annotated[float | None, typer.Option(help="Learning rate (default: the optimizer's usual).")] = None,
    epochs: Annotated[int, typer.Option(help="Passes over the data.")] = 1,
    spool: Annotated[bool, typer.Option("--spool", help="Keep what passes hand on in a file.")] = False,
    recompute: Annotated[bool, typer.Option("--recompute", help="Keep less within a strip.")] = False,
    out: Annotated[Path, typer.Option(help="Where the weights go after every epoch.")] = Path("weights.pt"),
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")] = False,
) -> None:
    """Train with whole images a step, each read strip by strip; losses are printed.

    MODULE is looked for in the current directory first.
    """
    from squeezebox.cli._slides import Request, run

    run(
        Request(
            factory=factory,
            data=data,
            memory=memory,
            loss=loss,
            optimizer=optimizer,
            rate=lr,
            epochs=epochs,
            spool=spool,
            recompute=recompute,
            out=out,
            as_json=as_json,
        )
    )

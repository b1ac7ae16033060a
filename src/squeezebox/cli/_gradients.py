"""The commands of ``squeezebox gradients`` and their options."""

from __future__ import annotations

import json
from typing import Annotated

import typer

gradients = typer.Typer(help="Exchange data parallel gradients in fewer bytes.", no_args_is_help=True)


@gradients.callback()
def _root() -> None:
    pass


@gradients.command()
def measure(
    factory: Annotated[str, typer.Argument(metavar="MODULE:CALLABLE", help="Returns the model when called.")],
    ranks: Annotated[int, typer.Option(help="Processes on this machine; torchrun starts its own.")] = 2,
    input: Annotated[str | None, typer.Option(help="One sample's shape (default: 3x224x224).")] = None,
    input_dtype: Annotated[str | None, typer.Option(help="Of the input, such as int64 for tokens.")] = None,
    batch: Annotated[int | None, typer.Option(help="Samples of a rank (default: 32).")] = None,
    sample: Annotated[
        str | None, typer.Option(metavar="MODULE:CALLABLE", help="Returns (inputs, target), a real batch.")
    ] = None,
    loss: Annotated[str | None, typer.Option(metavar="MODULE:CALLABLE", help="loss(output, target).")] = None,
    optimizer: Annotated[str, typer.Option(help="sgd, sgd-momentum, adam or adamw.")] = "sgd",
    noise: Annotated[
        float, typer.Option(help="Squared error over squared gradient that may be caused.")
    ] = 0.01,
    ratio: Annotated[float, typer.Option(help="Of top-k and random-k: times fewer bytes.")] = 50.0,
    bandwidth: Annotated[
        str | None, typer.Option(help="Of a link to emulate, bytes a second: 12.5MB is 100 Mb/s.")
    ] = None,
    latency: Annotated[float, typer.Option(help="Seconds of a collective; goes with --bandwidth.")] = 0.0,
    rounds: Annotated[int, typer.Option(help="Measured steps of each exchange.")] = 7,
    out: Annotated[str | None, typer.Option(help="Where the figures go, as JSON (default: nowhere).")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")] = False,
) -> None:
    """Time plain, fp16, bf16, PowerSGD, top-k, random-k, 1-bit and Squeezebox's exchange side by side.

    On this machine; over your own link start it with torchrun on all machines:
    torchrun ... -m squeezebox.cli gradients measure my_models:net
    """
    from squeezebox.cli._exchange import Request, run
    from squeezebox.cli._plan import Step

    found = run(
        Request(
            step=Step(factory, input, batch, sample, loss, optimizer, input_dtype=input_dtype),
            noise=noise,
            ratio=ratio,
            bandwidth=bandwidth,
            latency=latency,
            rounds=rounds,
        ),
        ranks,
        out,
    )
    if found is not None:
        print(json.dumps(found.to_dict(), indent=1) if as_json else found)

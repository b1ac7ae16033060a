"""Options that several commands share."""

from __future__ import annotations

from typing import Annotated

import typer

Factory = Annotated[str, typer.Argument(metavar="MODULE:CALLABLE", help="Returns the model when called.")]
Input = Annotated[str | None, typer.Option(help="One sample's shape (default: 3x224x224).")]
InputDtype = Annotated[str | None, typer.Option(help="Of the input, such as int64 for tokens.")]
Sample = Annotated[
    str | None, typer.Option(metavar="MODULE:CALLABLE", help="Returns (inputs, target), a real batch.")
]
Loss = Annotated[str | None, typer.Option(metavar="MODULE:CALLABLE", help="loss(output, target).")]
Optimizer = Annotated[str, typer.Option(help="sgd, sgd-momentum, adam or adamw.")]
Noise = Annotated[float | None, typer.Option(help="Allowed gradient noise (default: 1e-3).")]
Exact = Annotated[bool, typer.Option("--exact", help="Lose nothing.")]
Load = Annotated[str | None, typer.Option(help="How tokens choose experts: balanced or worst.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")]

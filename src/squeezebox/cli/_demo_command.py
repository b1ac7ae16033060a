"""``squeezebox demo`` and its options. Loads typer, but torch only once it runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from squeezebox.cli._estimate import refuse_useless
from squeezebox.cli._options import Json
from squeezebox.cli._values import require_apart
from squeezebox.schema import OptionError


def demo(
    out: Annotated[Path, typer.Option(help="Where the figures go, as JSON.")] = Path("demo.json"),
    data: Annotated[Path | None, typer.Option(help="Folder of the full Fashion-MNIST.")] = None,
    epochs: Annotated[float | None, typer.Option(help="Training length (default: 160 steps).")] = None,
    batch: Annotated[int | None, typer.Option(help="Samples a training step (default: 64).")] = None,
    noise: Annotated[
        float | None, typer.Option(help="Allowed relative gradient noise (default: 1e-3).")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the weights and of the order of images.")] = 0,
    gigapixel: Annotated[
        bool, typer.Option("--gigapixel", help="Instead, train a U-Net on one whole gigapixel image.")
    ] = False,
    size: Annotated[str | None, typer.Option(help="Of the gigapixel image (default: 16000x64000).")] = None,
    memory: Annotated[
        str | None, typer.Option(help="For strips of the gigapixel image (default: 512MiB).")
    ] = None,
    steps: Annotated[int | None, typer.Option(help="On the gigapixel image (default: 1).")] = None,
    timeline: Annotated[
        Path | None, typer.Option(help="Also profile a squeezed step, for `squeezebox report`.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Train the same BatchNorm CNN on Fashion-MNIST twice, plain and squeezed, and compare.

    With --gigapixel: lay an image out of photographs in a temporary file of 4 bytes a pixel, and train a
    small U-Net on all of it at once, strip by strip, with --size, --memory, --steps, --seed and --out.
    """
    of_training = {"data": data, "epochs": epochs, "batch": batch, "noise": noise, "timeline": timeline}
    of_image = {"size": size, "memory": memory, "steps": steps}
    if gigapixel:
        why = "of a demonstration without --gigapixel; leave one of the two out"
    else:
        why = "of --gigapixel; give that too, or leave it out"
    useless, useful = (of_training, of_image) if gigapixel else (of_image, of_training)
    refuse_useless({f"--{name}": each is not None for name, each in useless.items()}, why)
    require_apart({"--out": out, "--timeline": timeline})
    if not 0 <= seed < 2**64:
        raise OptionError(f"--seed {seed} is not from 0 to 2**64 - 1; give 0.")
    given: dict[str, Any] = {name: each for name, each in useful.items() if each is not None}
    if gigapixel:
        from squeezebox.cli._gigapixel import Gigapixel
        from squeezebox.cli._gigapixel import run as run_gigapixel
        from squeezebox.cli._show import show_gigapixel

        found = run_gigapixel(Gigapixel(out=out, seed=seed, **given))
        print(json.dumps(found, indent=1)) if as_json else show_gigapixel(found, out)
        return
    from squeezebox.cli._demo import Settings, run
    from squeezebox.cli._show import show_demo

    result = run(Settings(out=out, seed=seed, **given))
    print(json.dumps(result, indent=1)) if as_json else show_demo(result, out)

"""``squeezebox estimate`` and its options. Loads typer, but torch only once it runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

import squeezebox
from squeezebox.cli._estimate import refuse_useless, require_step
from squeezebox.cli._options import Input, InputDtype, Json, Load, Loss, Sample


def estimate(
    factory: Annotated[
        str | None,
        typer.Argument(metavar="MODEL", help="MODULE:CALLABLE, hf:CONFIG of transformers, or timm:NAME."),
    ] = None,
    input: Input = None,
    batch: Annotated[int | None, typer.Option(help="Samples a step (default: 32).")] = None,
    sample: Sample = None,
    loss: Loss = None,
    optimizer: Annotated[str | None, typer.Option(help="sgd, sgd-momentum (default), adam or adamw.")] = None,
    dtype: Annotated[str | None, typer.Option(help="Of model and input, such as bfloat16.")] = None,
    input_dtype: InputDtype = None,
    load: Load = None,
    devices: Annotated[
        str | None,
        typer.Option(help="Where it fits: all, for many known ones, or a file of 'devices measure'."),
    ] = None,
    steps: Annotated[int, typer.Option(help="With --devices: of the training, for its hours.")] = 0,
    noise: Annotated[
        float | None, typer.Option(help="With --devices: gradient noise of plans (default: 1e-3).")
    ] = None,
    exact: Annotated[bool, typer.Option("--exact", help="With --devices: plans that lose nothing.")] = False,
    plans: Annotated[
        bool, typer.Option("--plans/--no-plans", help="With --devices: whether to try any.")
    ] = True,
    reserve: Annotated[
        str | None,
        typer.Option(
            help="With --devices: to leave free of a memory (default: 10%; a CPU: 35%, at least 64 MiB)."
        ),
    ] = None,
    jobs: Annotated[
        Path | None, typer.Option(help="Instead of a model: jobs that share each device, as TOML.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Say what a training step would hold, without training and without using the memory.

    MODULE is looked for in the current directory first. With --devices: on which of them it fits, plain or
    under a plan, and how long it takes there. Exit status 1 where it fits none.
    """
    require_step(input, batch)
    if (factory is None) == (jobs is None):
        raise squeezebox.OptionError("name a model, as in my_models:resnet, or give --jobs; one of the two.")
    of_devices = {
        "--steps": steps != 0,
        "--noise": noise is not None,
        "--exact": exact,
        "--no-plans": not plans,
        "--reserve": reserve is not None,
    }
    if devices is None and jobs is None:
        refuse_useless(of_devices, "of --devices; give that too, such as --devices all, or leave it out")
    if devices is not None:
        of_none = {"--dtype": dtype is not None, "--load": load is not None}
        refuse_useless(of_none, "of an estimate without --devices; leave one of the two out")
    if jobs is not None:
        of_models = {
            "--input": input,
            "--batch": batch,
            "--sample": sample,
            "--loss": loss,
            "--optimizer": optimizer,
            "--dtype": dtype,
            "--input-dtype": input_dtype,
            "--load": load,
        }
        given = {name: each is not None for name, each in of_models.items()} | of_devices
        refuse_useless(given, "of a model, and --jobs names a file that says all of its jobs; leave it out")
    from squeezebox.cli._feasibility import described, estimated, on_devices, on_shared_devices

    if jobs is not None:
        on_shared_devices(jobs, devices or "all", as_json)
        return
    step = described(str(factory), input, batch, sample, loss, input_dtype)
    step |= {"optimizer": "sgd-momentum" if optimizer is None else optimizer}
    if devices is None:
        estimated(as_json, **step, dtype=dtype, load=load or "balanced")
        return
    options = {"steps": steps, "noise": noise, "exact": exact, "plans": plans, "reserve": reserve}
    on_devices(devices, as_json, **step, **options)

"""The commands of ``squeezebox devices`` and their options."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

devices = typer.Typer(help="Say what ranks run on, for pipelines over unequal devices.", no_args_is_help=True)


@devices.callback()
def _root() -> None:
    pass


@devices.command()
def measure(
    ranks: Annotated[int, typer.Option(help="Processes on this machine; torchrun starts its own.")] = 2,
    memory: Annotated[
        str | None,
        typer.Option(help="What each may hold, such as 2GiB (default: its share of what is free)."),
    ] = None,
    rates: Annotated[
        bool, typer.Option("--rates", help="Also what 'estimate --devices' reckons seconds with.")
    ] = False,
    out: Annotated[Path, typer.Option(help="Where they go, as TOML.")] = Path("devices.toml"),
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")] = False,
) -> None:
    """Measure the memory and speed of each rank's device, and the links between them.

    Over several machines start it with torchrun on all of them, as you will start the training:
    torchrun ... -m squeezebox.cli devices measure
    """
    from squeezebox.cli._measured_devices import run
    from squeezebox.reports import human_bytes
    from squeezebox.schema import plain

    found = run(ranks, memory, out, rates=rates)
    if found is None:
        return
    if as_json:
        print(json.dumps(plain(found), indent=1))
        return
    for device in found.devices:
        print(f"{device.name}: {human_bytes(device.memory_bytes)}, speed {device.speed:.4g}")
    for link in found.links:
        speed = f"{human_bytes(link.bytes_per_second)} a second"
        print(f"{' - '.join(link.between)}: {speed}, {1e6 * link.latency_seconds:.0f} us a message")
    print(f"\nThe devices are in {out}.")

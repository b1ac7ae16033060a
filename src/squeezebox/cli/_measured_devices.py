"""``squeezebox devices measure``: ranks that say what they run on, and time messages between each two."""

from __future__ import annotations

import contextlib
import dataclasses
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

from squeezebox import pipeline, profiling
from squeezebox.cli._processes import Place, on_ranks
from squeezebox.cli._show import progress
from squeezebox.gradients import joined
from squeezebox.reports import parse_size, require_writable
from squeezebox.schema import Device, DeviceLink, Devices, OptionError


def run(ranks: int, memory: str | None, out: Path, *, rates: bool) -> Devices | None:
    """Measure on processes of this machine, or as the rank that torchrun has started.

    Returns:
        The devices, also written to ``out``; None on all ranks of torchrun but the first.

    Raises:
        OptionError: an argument is out of range.
        OutputError: ``out`` cannot be written; found before anything is run.
        RankError: a rank was lost.
    """
    if ranks < 1:
        raise OptionError(f"--ranks {ranks}: give 1 or more.")
    nbytes = None if memory is None else parse_size("--memory", memory)
    if nbytes == 0:
        raise OptionError(f"--memory {memory}: give more than 0, such as 2GiB, or leave it out.")
    require_writable(out)
    with progress("measuring devices"):
        found = on_ranks(_rank, ranks, (nbytes, rates), lost="each trains a network of 8 MiB.")
    if found is not None:
        found.save(out)
    return found


def _rank(place: Place | None, request: tuple[int | None, bool]) -> Devices | None:
    nbytes, rates = request
    with contextlib.redirect_stdout(sys.stderr), _joined(place):
        device = pipeline.own_device()
        hosts = pipeline.told_by_all(socket.gethostname())
        mates = hosts.count(socket.gethostname()) if device.type == "cpu" else 1
        own = Device(
            name=socket.gethostname(),
            memory_bytes=profiling.free_bytes(device) // mates if nbytes is None else nbytes,
            speed=profiling.measure_speed(device),  # all at once, as in training
            type=device.type,
        )
        told = pipeline.told_by_all(profiling.rated(own, device) if rates else own)
        links = pipeline.measure_links(device)
        if not pipeline.is_first_process():
            return None
        names = [f"{each.name} {rank}" for rank, each in enumerate(told)]
        return Devices(
            devices=tuple(
                dataclasses.replace(each, name=name) for each, name in zip(told, names, strict=True)
            ),
            links=tuple(
                DeviceLink(
                    between=(names[one], names[other]),
                    bytes_per_second=link.bytes_per_second,
                    latency_seconds=link.latency_seconds,
                )
                for (one, other), link in links.items()
            ),
        )


@contextlib.contextmanager
def _joined(place: Place | None) -> Iterator[None]:
    """In the process group that training will be in: over nccl where torchrun starts it and there is CUDA."""
    if place is None and torch.cuda.is_available():
        pipeline.own_device()
        pipeline.join()
        yield
    else:
        with joined(place):
            yield

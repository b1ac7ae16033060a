"""What it takes to move tensors elsewhere and back: to a disk while the step runs, or to the host."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from squeezebox.memory import CudaStreams, Elsewhere, Staging, disk_speed, usual_folder
from squeezebox.profiling._ledgers import now

_BLOCK, _BLOCKS = 1 << 24, 4  # bytes, and how many are moved there and back
_LEAST = 1 << 12
_FORWARD = 1 / 3  # of a step


@dataclass(frozen=True, slots=True)
class Transfer:
    """Where tensors are moved to, and seconds to move a byte there and back."""

    place: str
    leaving: float
    returning: float


def transfer_of(
    device: torch.device, folder: Elsewhere | None, moved: Sequence[int], seconds: float
) -> Transfer | None:
    """To where tensors of a device can be moved, if that saves memory.

    Args:
        device: that of the tensors.
        folder: from the CPU, where to; None: the usual one.
        moved: bytes of the tensors that could be.
        seconds: of a plain step.
    """
    if device.type == "cpu":
        return _to_disk(folder or usual_folder(), sum(moved), seconds)
    return _to_host(device, max(moved, default=0))


def _to_disk(folder: Elsewhere, total: int, seconds: float) -> Transfer | None:
    """The disk works while the step goes on: what it takes in all is less by that, and shared by all bytes.

    So that is right where most of them are moved, and too much where few are.
    """
    if not folder.frees_memory:
        return None
    speed, hidden = disk_speed(folder), seconds / max(total, 1)
    return Transfer(
        folder.kind,
        leaving=speed.leaving + speed.slowing + max(0.0, speed.writing - _FORWARD * hidden),
        returning=speed.returning + speed.slowing + max(0.0, speed.reading - (1 - _FORWARD) * hidden),
    )


def _to_host(device: torch.device, largest: int) -> Transfer:
    """The least of a few blocks: pinned memory is slow to come by, and then kept.

    They are no larger than the ``largest`` tensor, for which there is room.
    """
    data = torch.zeros(min(max(largest, _LEAST), _BLOCK), dtype=torch.uint8, device=device)
    staging = Staging(CudaStreams(device))
    leaving = returning = math.inf
    for _ in range(_BLOCKS):
        begun = now(device)
        host = staging.write(data)
        staging.clear()
        written = now(device)
        staging.read(host)
        leaving, returning = min(leaving, written - begun), min(returning, now(device) - written)
    return Transfer("host", leaving / len(data), returning / len(data))

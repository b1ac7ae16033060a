"""Checkpoints of a pipeline: a file for each rank, in a directory that appears only when all are written."""

from __future__ import annotations

import contextlib
import os
import pickle
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from squeezebox.pipeline._data import random_state, restore_random_state
from squeezebox.schema import FormatError, OutputError

_COMPLETE = re.compile(r"batch-(\d+)$")
_FORMAT = 2


def write(
    directory: Path, batch: int, number: int, state: Mapping[str, Any], meet: Callable[[str], None]
) -> None:
    """Write this process's part of a checkpoint.

    Args:
        directory: where checkpoints go, one directory each; the same for all ranks, or a disk of their own.
        batch: how many batches have been trained on.
        number: this process's among all.
        state: tensors and plain values.
        meet: waits until all ranks have come to the point that it is given.

    Raises:
        OutputError: this rank's file could not be written, or the checkpoint is there already; earlier ones
            are as they were.
    """
    partial, complete = directory / f".batch-{batch}.partial", directory / f"batch-{batch}"
    if complete.exists():
        raise OutputError(
            f"{complete} is there already, of an earlier run or of another one. Remove it, or name another "
            "directory."
        )
    try:
        partial.mkdir(parents=True, exist_ok=True)
        with open(partial / f"rank-{number}.pt", "wb") as file:
            torch.save({"format": _FORMAT, **state}, file)
            file.flush()
            os.fsync(file.fileno())
    except (OSError, RuntimeError) as error:
        raise OutputError(
            f"the checkpoint of rank {number} could not be written to {partial}: {error}. Earlier "
            "checkpoints are as they were; make room or name another directory."
        ) from error
    meet(f"written {batch}")
    try:
        with contextlib.suppress(FileNotFoundError):  # where ranks share a disk, another one has been faster
            partial.rename(complete)
    except OSError as error:
        raise OutputError(f"{partial} could not be renamed to {complete}: {error}.") from error
    meet(f"complete {batch}")


def random_states() -> dict[str, Any]:
    """Of the host's generators, and of the current device's."""
    device = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None
    return {**random_state(), "device": device}


def restore_random_states(states: Mapping[str, Any]) -> None:
    """Go on where :func:`random_states` was called."""
    restore_random_state(states)
    if states["device"] is not None:
        torch.cuda.set_rng_state(states["device"])


def newest(directory: Path) -> int | None:
    """How many batches the newest complete checkpoint has seen; None if there is none."""
    found = [_COMPLETE.match(path.name) for path in directory.glob("batch-*")]
    return max((int(match[1]) for match in found if match), default=None)


def read(directory: Path, batch: int, number: int) -> dict[str, Any]:
    """This process's part of a checkpoint.

    Raises:
        FormatError: it is missing, damaged or of a newer version.
    """
    path = directory / f"batch-{batch}" / f"rank-{number}.pt"
    try:
        state: dict[str, Any] = torch.load(path, weights_only=True, map_location="cpu")
    except (OSError, RuntimeError, EOFError, ValueError, pickle.UnpicklingError) as error:
        raise FormatError(
            f"{path} cannot be read ({type(error).__name__}: {error}). Resume from another checkpoint: "
            "load(directory, batch=...)."
        ) from error
    if state.get("format") != _FORMAT:
        raise FormatError(
            f"{path} has format {state.get('format')}, and this Squeezebox reads {_FORMAT}. Upgrade it."
        )
    return state

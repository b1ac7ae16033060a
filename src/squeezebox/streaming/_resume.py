"""A step that was interrupted, in a file: what had been added up, and at which strip."""

from __future__ import annotations

import hashlib
import os
import pickle
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from squeezebox.schema import FormatError, OutputError, whole_file
from squeezebox.streaming._graph import Streamed
from squeezebox.streaming._run import Run
from squeezebox.streaming._spool import Choice
from squeezebox.streaming._stages import Stage
from squeezebox.streaming._strip import Read

_FORMAT = 2
_SAMPLED = 16  # rows of the image and of every target that are compared


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Position:
    """The strip and the stage that come next, and every stage's height and width of strips."""

    stage: int
    strip: int
    sizes: tuple[tuple[int, int], ...]


def fingerprint(streamed: Streamed, read: Read, whole: Mapping[Node, Any]) -> str:
    """Tells a step from others: its graph, weights, buffers, some rows of what it reads, what has no rows.

    Args:
        streamed: its graph.
        read: gives rows of the image and of targets.
        whole: targets that have no rows, such as a label.
    """
    digest = hashlib.sha256(str(streamed.program.graph).encode())
    for value in whole.values():
        digest.update(b"" if isinstance(value, Tensor) else repr(value).encode())
    for tensor in _content(streamed, read, whole):
        digest.update(f"{tuple(tensor.shape)} {tensor.dtype}".encode())
        digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _content(streamed: Streamed, read: Read, whole: Mapping[Node, Any]) -> Iterable[Tensor]:
    yield from streamed.program.held.values()
    yield from (value for value in whole.values() if isinstance(value, Tensor))
    for node in [streamed.program.image, *streamed.program.targets]:
        if node in streamed.rows:
            count = streamed.rows[node].count
            for number in range(_SAMPLED):
                row = number * (count - 1) // (_SAMPLED - 1)
                yield read(node, row, row + 1)


def save(path: Path, mark: str, position: Position, run: Run, stored: dict[str, Any]) -> None:
    """Write everything, whole or not at all; ``stored`` is what a spool needs.

    Raises:
        OutputError: the folder is missing or not writable, or the disk is full.
    """
    content = {
        "format": _FORMAT,
        "fingerprint": mark,
        "stored": stored,
        "position": (position.stage, position.strip, [list(size) for size in position.sizes]),
        "states": {node.name: list(state) for node, state in run.states.items()},
        "gradients": {name: leaf.grad for name, leaf in run.values.gradients() if leaf.grad is not None},
    }
    try:
        with whole_file(path) as file:
            torch.save(content, file)
            file.flush()
            os.fsync(file.fileno())
    except (OSError, RuntimeError) as error:
        raise OutputError(
            f"the checkpoint {path} could not be written: {error}. An earlier one is as it was; make room or "
            "name another file."
        ) from error


def load(path: Path, mark: str, device: torch.device) -> dict[str, Any] | None:
    """What :func:`save` wrote, if there is anything; its tensors are on this device.

    Raises:
        FormatError: the file is damaged, or belongs to another step.
    """
    if not path.exists():
        return None
    try:
        content: dict[str, Any] = torch.load(path, map_location=device, weights_only=True)
        version, known = content["format"], content["fingerprint"]
    except (OSError, RuntimeError, pickle.UnpicklingError, KeyError, TypeError, EOFError) as error:
        raise FormatError(
            f"{path} is no checkpoint of a streamed step, or damaged: {error}. Remove it."
        ) from error
    if version != _FORMAT or known != mark:
        raise FormatError(
            f"{path} belongs to a step with other weights, another image or target, another model or loss, "
            "or another version of Squeezebox, so its gradients are of no use here. Remove it, or name "
            "another file."
        )
    return content


def position_of(content: dict[str, Any]) -> Position:
    """Where the step goes on."""
    stage, strip, sizes = content["position"]
    return Position(stage=stage, strip=strip, sizes=tuple((height, width) for height, width in sizes))


def filed_in(content: dict[str, Any], streamed: Streamed) -> Choice:
    """What the step has in its file; it keeps to that, whatever a plan would choose by now."""
    names = {*content["stored"].get("filed", ())}
    return frozenset(), frozenset(node for node in streamed.rows if node.name in names)


def restore(content: dict[str, Any], run: Run, stages: Sequence[Stage], position: Position) -> None:
    """Put a fresh run where :func:`save` found the other one."""
    states = content["states"]
    run.states.update(
        {node: tuple(states[node.name]) for node in run.streamed.reductions if node.name in states}
    )
    for stage in stages[: position.stage]:
        if stage.reduces:
            run.reduce(stage)
    for stage in stages[: position.stage + 1]:
        if stage.derives:
            run.values.for_strips(stage)
    for name, leaf in run.values.gradients():
        leaf.grad = content["gradients"].get(name)

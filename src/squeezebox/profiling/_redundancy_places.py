"""Whose line of Python an operator belongs to, in forward and in backward."""

from __future__ import annotations

import os
import sys
import sysconfig
import threading
from bisect import bisect_right
from collections.abc import Iterator
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch

from squeezebox.profiling._record import Modules
from squeezebox.profiling._redundancy_events import Place

_TORCH = os.path.join(os.path.dirname(torch.__file__), "")
_OWN = os.path.join(os.path.dirname(os.path.dirname(__file__)), "")
_STANDARD = sysconfig.get_path("stdlib")
_INSTALLED = (sysconfig.get_path("purelib"), sysconfig.get_path("platlib"))
_RECORDER = os.path.join(_OWN, "profiling", "_redundancy")
_CHECKPOINT = os.path.join(_TORCH, "utils", "checkpoint.py")
_OPTIMIZERS = os.path.join(_TORCH, "optim", "")


class Origin(NamedTuple):
    """Where an operator comes from."""

    place: Place
    phase: str
    recomputed: bool
    own: bool
    of_optimizer: bool  # issued by torch.optim itself


class Places:
    """Finds origins while a step runs; enter it around the step."""

    def __init__(self) -> None:
        self.modules = Modules()
        self._thread = threading.get_ident()
        self._owners: dict[CodeType, str] = {}
        self._numbers: list[int] = []  # each above those of the autograd nodes made at its place
        self._places: list[Place] = []

    def __enter__(self) -> Places:
        self.modules.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self.modules.__exit__(*error)

    def origin(self) -> Origin:
        """Of the operator that is being dispatched."""
        backward = torch._C._current_graph_task_id() != -1
        found, seen, checkpoint = self._innermost(sys._getframe(1), backward)
        if backward and found is None:
            place = self._of_node() or self._caller()
        else:
            place = Place(*(found or ("<unknown>", 0, "")), self.modules.current())
            self._note(place)
        return Origin(
            place,
            "backward" if backward else "forward" if place.module else "",
            recomputed=backward and checkpoint,
            own=_OWN in seen,
            of_optimizer=_OPTIMIZERS in seen,
        )

    def _innermost(
        self, frame: FrameType | None, backward: bool
    ) -> tuple[tuple[str, int, str] | None, set[str], bool]:
        """The user's innermost line, whose frames lie within it, and whether checkpointing is under way.

        In backward only lines that autograd itself called count: of a function's own backward, or a hook.
        """
        found, seen, checkpoint = None, set[str](), False
        for each, owner in self._frames(frame):
            if backward and each.f_code.co_name == "_engine_run_backward":
                break
            checkpoint = checkpoint or each.f_code.co_filename == _CHECKPOINT
            if found is None and not owner:
                found = (each.f_code.co_filename, each.f_lineno, each.f_code.co_name)
            if found is not None and not backward:
                break
            seen.add(owner)
        return found, seen, checkpoint

    def _frames(self, frame: FrameType | None) -> Iterator[tuple[FrameType, str]]:
        while frame is not None:
            owner = self._owners.get(frame.f_code)
            if owner is None:
                owner = self._owners[frame.f_code] = _owner(frame.f_code.co_filename)
            if owner != _RECORDER:
                yield frame, owner
            frame = frame.f_back

    def _of_node(self) -> Place | None:
        """Of the forward that made the node whose backward runs."""
        node: Any = torch._C._current_autograd_node()
        if node is None:
            return None
        at = bisect_right(self._numbers, node._sequence_nr())
        return self._places[at] if at < len(self._places) else None

    def _caller(self) -> Place:
        """Who called backward; a device's nodes run in a thread that has no such line."""
        frame = sys._current_frames().get(self._thread)
        for each, owner in self._frames(frame):
            if not owner:
                return Place(each.f_code.co_filename, each.f_lineno, each.f_code.co_name, "")
        return Place("<unknown>", 0, "", "")

    def _note(self, place: Place) -> None:
        """Autograd's nodes made for this operator have numbers below the next one."""
        number = torch._C._autograd._get_sequence_nr()
        if not self._numbers or number > self._numbers[-1]:
            self._numbers.append(number)
            self._places.append(place)


def _owner(file: str) -> str:
    """Whose file it is; "" for a user's."""
    for known in (_RECORDER, _OWN, _OPTIMIZERS, _TORCH):
        if file.startswith(known):
            return known
    if file.startswith(_STANDARD) and not file.startswith(_INSTALLED):
        return _STANDARD
    return file if file.startswith(("<eval_with_key", "<frozen")) else ""

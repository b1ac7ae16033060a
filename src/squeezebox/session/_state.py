"""What a session's state says, checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from squeezebox.bounds import ControllerState
from squeezebox.schema import FormatError, Role

STATE_VERSION = 2


@dataclass(frozen=True, slots=True)
class State:
    """Where a session was. ``counts`` are its lossy tensors, weighted ones or not.

    ``regions`` counts what the model's own checkpointing saves in a step.
    """

    controller: ControllerState
    step: int
    late_values: dict[str, Role]
    counts: dict[bool, int]
    regions: int


def read_state(state: Mapping[str, Any]) -> State:
    """From plain values; FormatError if they are damaged or of a newer version."""
    version = state.get("version")
    if version != STATE_VERSION:
        raise FormatError(
            f"session state has version {version}; this Squeezebox reads version {STATE_VERSION}. "
            "Upgrade squeezebox, or start a new session."
        )
    try:
        weighted, others = (int(count) for count in state["counts"])
        return State(
            controller=ControllerState.from_dict(dict(state["controller"])),
            step=int(state["step"]),
            late_values={str(key): Role(role) for key, role in state["late_values"].items()},
            counts={True: weighted, False: others},
            regions=int(state.get("regions", 0)),
        )
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise FormatError(
            f"session state has fields {sorted(state)}, of which one is missing or damaged ({error}). "
            "Pass the object that state_dict() gave, or start a new session."
        ) from error

"""What a run leaves: the values that passed each place, or how far they were from another run's."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from squeezebox.comparing._values import Difference

Call = tuple[str, int]  # a layer's name, and which of its calls


class Kind(enum.Enum):
    """What passes a place."""

    INPUT = "input"
    OUTPUT = "output"
    OUTPUT_GRADIENT = "gradient of output"
    INPUT_GRADIENT = "gradient of input"
    PARAMETER_GRADIENT = "gradient of parameter"


class Place(NamedTuple):
    """Where values pass: ``part`` is a parameter's name, or which of several tensors a gradient is of."""

    layer: str
    call: int
    kind: Kind
    part: str = ""

    @property
    def backward(self) -> bool:
        """Whether gradients pass."""
        return self.kind not in (Kind.INPUT, Kind.OUTPUT)


class Maker(NamedTuple):
    """The code that made what passes: a layer's, and which part of it."""

    layer: str
    what: str


@dataclass(slots=True)
class Tape:
    """Of one run. A run without a reference has ``values`` and ``random``, one with it ``differences``."""

    values: dict[Place, list[Any]] = field(default_factory=dict)
    random: dict[Place, list[torch.Tensor]] = field(default_factory=dict)
    differences: dict[Place, Difference] = field(default_factory=dict)
    makers: dict[Place, Maker] = field(default_factory=dict)
    shapes: dict[Call, str] = field(default_factory=dict)  # of what went in and came out
    written: set[Call] = field(default_factory=set)  # calls that wrote to what they were given
    output: Any = None
    has_gradients: bool = False
    gradient_error: float = 0.0  # squared, of all parameters' gradients

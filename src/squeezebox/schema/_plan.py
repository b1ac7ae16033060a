"""What can be done with each saved tensor, what it costs, and what was decided."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Action(Enum):
    """What is done with a saved tensor between its forward and its backward."""

    KEEP = "keep"
    COMPRESS = "compress"
    RECOMPUTE = "recompute"
    REGENERATE = "regenerate"
    OFFLOAD = "offload"


@dataclass(frozen=True, kw_only=True, slots=True)
class Option:
    """One way to hold one tensor, as measured on this machine.

    ``held_bytes`` stay from saving to the last use; ``working_bytes`` come on top while backward uses the
    tensor (its unpacked form, or what recomputing it needs). ``seconds`` are beyond keeping it, per step.
    ``noise`` is the relative squared error it puts on the gradient.
    """

    action: Action
    codec: str = ""
    bound: float = 0.0
    held_bytes: int
    working_bytes: int = 0
    seconds: float = 0.0
    noise: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorProfile:
    """A saved tensor's life, in positions of the step, and its options.

    It is held from position ``saved_at`` to ``last_use``, and used from ``first_use`` on; all inclusive.
    What it works in is there until ``idle_until``, if that is later: its buffer is freed by the next request.
    Its original is part of ``base_bytes`` until ``dropped_at``; an option that keeps it holds it from there.
    """

    key: str
    saved_at: int
    dropped_at: int = -1
    idle_until: int = -1
    first_use: int
    last_use: int
    options: tuple[Option, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Profile:
    """One training step: what each position holds apart from the tensors below, and these.

    Positions number the operators of forward, then of backward, then the optimizer's step.
    ``base_bytes`` has one entry a position: parameters, gradients so far, optimizer state, temporaries.
    """

    base_bytes: tuple[int, ...]
    tensors: tuple[TensorProfile, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Budget:
    """What a step may use: bytes at every position, and relative gradient noise in total."""

    peak_bytes: int
    noise: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """The option chosen for each tensor, and what it should come to."""

    choices: dict[str, Option]
    predicted_peak_bytes: int
    predicted_seconds: float
    predicted_noise: float
    peak_position: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Region:
    """A network's first operators, each reading only the one before, to be worked in slices of the batch.

    ``functions`` and ``modules`` name the calls in their order and the modules that make them; ``keys`` are
    those of the tensors that need not be saved for them. ``output_bytes`` is the last result's size.
    """

    functions: tuple[str, ...]
    modules: tuple[str, ...]
    keys: tuple[str, ...]
    slices: int
    output_bytes: int

    def __str__(self) -> str:
        ends = [f"{self.functions[end]} of '{self.modules[end]}'" for end in (0, -1)]
        return f"the first layers ({' to '.join(ends)})"

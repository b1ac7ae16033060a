"""What can be done with each saved tensor, what it costs, and what was decided."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from squeezebox.schema._files import checked_flat, plain_flat


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
    tensor (its unpacked form); ``making_bytes`` only at the first position of that, while it is recomputed,
    and ``packing_bytes`` only while it is packed. ``lasting``: what is held is there at every position,
    in memory that goes from one step to the next.
    ``seconds`` are beyond keeping it, per step, however often it is unpacked.
    ``noise`` is the relative squared error it puts on the gradient.

    Recomputing starts from the tensors named in ``sources``. Each of them must be held in an option that
    ``serves``, having all its values exactly, and is unpacked or recomputed by then and stays so until its
    own last use. An option that ``tolerates`` errors needs one that ``approximates`` instead: its noise is
    also that of all tensors which may be made from what it holds.
    """

    action: Action
    codec: str = ""
    bound: float = 0.0
    held_bytes: int
    lasting: bool = False
    working_bytes: int = 0
    making_bytes: int = 0
    packing_bytes: int = 0
    seconds: float = 0.0
    noise: float = 0.0
    sources: tuple[str, ...] = ()
    serves: bool = False
    approximates: bool = False
    tolerates: bool = False


class Part(Enum):
    """What a tensor is to a training step."""

    SAVED = "saved"  # by autograd, between forward and backward
    GRADIENT = "gradient"
    STATE = "state"  # an optimizer's, of one parameter
    PARAMETER = "parameter"  # one that is not trained


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorProfile:
    """A tensor's life, in positions of the step, and its options.

    It is held from position ``saved_at`` to ``last_use``, and used from ``first_use`` on; all inclusive.
    What it works in is there until ``idle_until``, if that is later: its buffer is freed by the next request.
    Between uses far apart there are ``gaps``, (first, last), in which it is not, unless it is recomputed, or
    others are made from it meanwhile or earlier.
    Its original is part of ``base_bytes`` until ``dropped_at``; an option that keeps it holds it from there.
    """

    key: str
    part: Part = Part.SAVED
    saved_at: int
    dropped_at: int = -1
    idle_until: int = -1
    first_use: int
    last_use: int
    gaps: tuple[tuple[int, int], ...] = ()
    options: tuple[Option, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Moment:
    """Where in the step a position lies.

    ``phase`` is "forward", "loss" (its backward included), "backward" or "optimizer". ``event`` is what began
    it: "save", "saved", "use", "used" or "release" of the saved tensor called ``key``, or "freed" for the end
    of its original. ``gradient_bytes`` of the position's base are gradients.
    """

    phase: str
    event: str = ""
    key: str = ""
    gradient_bytes: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Profile:
    """One training step: what each position holds apart from the tensors below, and these.

    Positions number the operators of forward, then of backward, then the optimizer's step.
    ``base_bytes`` has one entry a position: parameters, gradients so far, optimizer state, temporaries.
    ``moments``, if there, has one too; ``gradients_at`` are the positions at which a parameter's gradient is
    complete, by its name, and ``weights_at`` those, (first, last), at which a frozen one that can be moved is
    read. ``sliced`` names the weights whose gradient is no part of the base at its own position, only after:
    it need not be whole in memory for an update. ``split`` names the weights that were held as bfloat16, with
    the other 16 bits as a part of the optimizer's state.
    Of every position's base, ``parameter_bytes`` are parameters and
    buffers, ``input_bytes`` the sample and ``state_bytes`` the optimizer's state.
    """

    base_bytes: tuple[int, ...]
    tensors: tuple[TensorProfile, ...]
    moments: tuple[Moment, ...] = ()
    parameter_bytes: int = 0
    input_bytes: int = 0
    state_bytes: int = 0
    gradients_at: dict[str, int] = field(default_factory=dict)
    weights_at: dict[str, tuple[tuple[int, int], ...]] = field(default_factory=dict)
    sliced: tuple[str, ...] = ()
    split: tuple[str, ...] = ()


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


@dataclass(frozen=True, kw_only=True, slots=True)
class Slicing:
    """What a region takes in its slices, by itself.

    The most bytes of forward, its result included, and of backward, its gradients included; and the seconds
    by which both are longer than plainly.
    """

    region: Region
    forward_bytes: int
    backward_bytes: int
    seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class StepProfile:
    """A profile and what else a plan needs of the step.

    ``saved_bytes`` is what plain PyTorch holds, by tensor; ``plain_seconds`` the time of a step without
    Squeezebox, and ``file_seconds`` what it takes longer while the process has a file, since freed memory
    goes back to the system then. With every saved tensor in Squeezebox's hands and kept as it is the step
    takes ``holding_seconds`` longer, and ``following_seconds`` more if it is also noted how each was made.
    ``late_values`` names tensors of which a later operator reads more than the first one, and its role.
    The first layers were worked in slices if there is a ``region``; each of ``regions`` could be, in as many
    slices as it says. ``peak_bytes`` is the most that measuring all this held, plain steps left out, and
    those that gather statistics unless they were metered too.
    ``small_bytes`` are of saved tensors that are too small for a choice, at this batch.
    ``clock_seconds`` is what the timed plain steps differ by.
    ``plain_peak_bytes`` is the plain step's peak where the profile, with rows of gradients or of optimizer
    state, does not tell. ``in_backward``: it is that of a step whose backward updates the parameters.
    ``output_bytes`` is what the model returned, which nobody held through backward.
    """

    profile: Profile
    saved_bytes: dict[str, int]
    plain_seconds: float
    late_values: dict[str, str]
    holding_seconds: float = 0.0
    following_seconds: float = 0.0
    file_seconds: float = 0.0
    clock_seconds: float = 0.0
    region: Region | None = None
    regions: tuple[Region, ...] = ()
    peak_bytes: int = 0
    small_bytes: dict[str, int] = field(default_factory=dict)
    plain_peak_bytes: int | None = None
    in_backward: bool = False
    output_bytes: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerPlan:
    """What a plan does with gradients and the optimizer's state. Sizes are bytes.

    ``name`` is the optimizer's class, other names are those of parameters. ``in_backward``: each parameter is
    updated as soon as its gradient is there, which is then gone; else all are updated in
    ``optimizer.step()``, one by one. ``states`` names those whose optimizer state lives in a file between two
    updates, ``gradients`` those whose gradient waits there for its own, ``sliced`` those whose gradient is
    made some rows at a time while they are updated, and ``packed`` those whose state is packed, with the bits
    an element. ``split`` names the weights that are held as the bfloat16 ones that autocast reads, with the
    other 16 bits where the state is, and as a part of it.
    ``state_bytes`` and ``gradient_bytes`` are all that the optimizer has,
    ``moved_bytes`` what the file holds of them, ``packed_bytes`` what packed state takes, and ``seconds``
    what moving and packing take in a step. ``update_noise`` is the predicted squared error of packed
    parameters' updates over their squared norm.
    """

    name: str
    in_backward: bool
    states: tuple[str, ...]
    gradients: tuple[str, ...]
    state_bytes: int
    gradient_bytes: int
    moved_bytes: int
    seconds: float
    sliced: tuple[str, ...] = ()
    split: tuple[str, ...] = ()
    packed: dict[str, int] = field(default_factory=dict)
    packed_bytes: int = 0
    update_noise: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightsPlan:
    """What a plan does with frozen parameters. Sizes are bytes.

    ``moved`` names those that live in a file, and ``moved_bytes`` is their size. ``packed`` names those that
    are packed, with the bits an element, and ``packed_bytes`` is what they take. ``weight_bytes`` are all
    that could be either, and ``seconds`` what reading and unpacking take in a step. ``weight_noise`` is the
    largest squared error of a packed weight over its squared norm.
    """

    moved: tuple[str, ...]
    weight_bytes: int
    moved_bytes: int
    seconds: float
    packed: dict[str, int] = field(default_factory=dict)
    packed_bytes: int = 0
    weight_noise: float = 0.0


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
class MemoryParts:
    """What the memory of one moment of a step is made of.

    ``parameter_bytes`` count buffers too, ``input_bytes`` are the sample, ``saved_bytes`` what is held of
    saved tensors, ``temporary_bytes`` operators' inputs, outputs and working memory.
    """

    parameter_bytes: int = 0
    input_bytes: int = 0
    gradient_bytes: int = 0
    state_bytes: int = 0
    saved_bytes: int = 0
    temporary_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        """All of it."""
        held = self.parameter_bytes + self.input_bytes + self.gradient_bytes + self.state_bytes
        return held + self.saved_bytes + self.temporary_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedPeak:
    """Where a plan's peak lies, and what is live then.

    ``phase``, ``event`` and ``key`` are those of its :class:`Moment`.
    """

    phase: str
    event: str
    key: str
    parts: MemoryParts

    def to_dict(self) -> dict[str, Any]:
        """Where it lies and the parts' fields, side by side."""
        return plain_flat(self, "parts")

    @classmethod
    def from_dict(cls, values: Any, where: str) -> PlannedPeak:
        """The peak of such values; FormatError names the field that is wrong, which lies at ``where``."""
        return cls(**checked_flat(cls, "parts", values, where))


@dataclass(frozen=True, kw_only=True, slots=True)
class StepCurve:
    """Bytes over a step, plain and under a plan, by phase: the most in each of its equal shares.

    Phases are "forward" (with the loss), "backward" and "optimizer", in this order, those that there are.
    """

    plain_bytes: dict[str, tuple[int, ...]]
    planned_bytes: dict[str, tuple[int, ...]]


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanPoint:
    """What the fastest plan of one budget takes."""

    peak_bytes: int
    seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Shortage:
    """Why no plan fits a budget, and what would; sizes are bytes.

    ``parts`` are those of the lowest peak found, which is at ``moment``. The rest are changes that would fit,
    None where one would not: more noise, a smaller batch, the peaks without optimizer state and without the
    loss.
    """

    budget_bytes: int
    noise: float
    moment: Moment
    parts: MemoryParts
    more_noise: float | None
    smaller_batch: int | None
    stateless_peak_bytes: int | None
    peak_bytes_but_loss: int | None

"""What autograd saves: roles, what backward reads of a tensor, and one row of the report."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Role(str, enum.Enum):
    """Why a tensor was saved, in the words of the operator that saved it."""

    CONV_INPUT = "conv input"
    LINEAR_INPUT = "linear input"
    MATMUL_OPERAND = "matmul operand"
    BATCH_NORM_INPUT = "batch-norm input"
    NORM_INPUT = "norm input"
    RELU_OUTPUT = "relu output"
    ACTIVATION = "activation"
    SOFTMAX = "softmax output"
    ATTENTION = "attention operand"
    PRODUCT = "product operand"
    POOL_INPUT = "pool input"
    POOL_INDEX = "pool index"
    DROPOUT_MASK = "dropout mask"
    INTEGER = "integer"
    OTHER = "other"


class Reads(enum.IntEnum):
    """How much of a saved tensor backward reads; a larger value includes the smaller ones."""

    SHAPE = 0  # only shape and dtype: pooling inputs
    SIGN = 1  # only x > 0: ReLU outputs
    VALUES = 2  # values, with an error the law can weigh
    EXACT = 3  # values, to the bit


@dataclass(frozen=True, kw_only=True, slots=True)
class SavedTensor:
    """One saved storage of one training step, as the report shows it.

    ``key`` names the tensor stably over steps: module path, operator and attribute of its first saver.
    ``saved_bytes`` is what plain PyTorch holds for it, ``packed_bytes`` what is held instead.
    ``bound`` is the absolute elementwise error bound (0.0 where exact). ``noise_share`` is this tensor's
    predicted share of the squared gradient error, relative to the squared gradient norm (None: unknown).
    """

    key: str
    role: Role
    roles: tuple[Role, ...]
    module: str
    shape: tuple[int, ...]
    dtype: str
    saved_bytes: int
    packed_bytes: int
    codec: str
    bound: float
    noise_share: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Injection:
    """Squared error that one saved tensor puts on one edge of the backward graph.

    ``energy`` is the expected squared L2 norm of the error on that edge's gradient for a unit bound
    (it scales with the bound squared). ``layer``: it is a layer's weight gradient by the error law, and
    goes no further.
    """

    key: str
    edge: int
    energy: float
    layer: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Edge:
    """One gradient that an operator's backward hands on.

    ``target`` is the number of the receiving node (None: nothing follows), ``parameter`` says that the
    gradient ends in a parameter, ``energy`` is its squared L2 norm and ``gain`` the squared norm that
    white noise of unit squared norm in the node's incoming gradient leaves on this edge (None: as the
    signal's own, energy / grad_energy).
    """

    target: int | None
    parameter: bool
    energy: float
    gain: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeStatistics:
    """What one backward node showed on a step whose statistics were due."""

    number: int
    operator: str
    module: str
    grad_energy: float
    edges: tuple[Edge, ...]
    injections: tuple[Injection, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorStatistics:
    """What a bound controller may know of one saved tensor (see ``bounds``).

    ``numel`` counts elements of the whole storage; ``nonzero`` is the fraction that is not exactly
    zero; ``rms`` is over the non-zero ones, or the deviation where zeros carry no
    meaning; ``mean_abs_loss`` is the mean absolute gradient at the reading
    operator's output, ``batch`` its first dimension, ``positions`` its output positions per sample
    (all three 0 where no operator of a known law reads the tensor). ``bound`` is what the tensor had, in the
    controller's unit: its channels' or rows' deviations where ``scaled``.
    """

    key: str
    role: Role
    numel: int
    nonzero: float
    rms: float
    mean_abs_loss: float = 0.0
    batch: int = 0
    positions: int = 0
    parameter: str = ""
    bound: float = 0.0
    scaled: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class StepStatistics:
    """Everything a controller sees of one due step.

    ``mean_abs_momentum`` maps a parameter's name to the mean absolute momentum (or gradient where the
    optimizer keeps none). ``noise`` is the squared error of all parameter gradients over their squared norm
    (None: not known).
    """

    nodes: tuple[NodeStatistics, ...]
    tensors: tuple[TensorStatistics, ...]
    mean_abs_momentum: dict[str, float]
    checks: tuple[Check, ...] = ()
    noise: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """Gradients from one lossy tensor against those from its exact values.

    ``measured`` and ``predicted`` are squared errors relative to the squared norm of the layer's own
    weight gradient (``layer``), or of all parameter gradients (the error traced through backward).
    """

    key: str
    step: int
    layer: bool
    measured: float
    predicted: float


@dataclass(frozen=True, kw_only=True, slots=True)
class ArenaRecord:
    """How one step used the arena, whose places have ``nbytes`` together; sizes are bytes.

    Of the packed tensors whose size varies, ``tensors`` lay in their places; ``spills`` had none, or one that
    was too small, and took ``spilled_bytes`` elsewhere. ``total_spills`` counts those of all steps, and
    ``layouts`` how often places were made or changed. Before any tensor had one, nothing is counted.
    """

    nbytes: int = 0
    tensors: int = 0
    spills: int = 0
    spilled_bytes: int = 0
    total_spills: int = 0
    layouts: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class OffloadRecord:
    """Where tensors are moved to, and what memory that takes; sizes are bytes.

    Files in ``folder`` have ``file_bytes``. ``buffer_bytes`` of the process and ``cache_bytes`` of the
    system's page cache are the most they take on top of the step's peak, a file as much as another. A plan
    counts the files of saved tensors, of gradients and optimizer state, and of frozen weights; a step's
    record that of saved tensors.
    """

    folder: str
    filesystem: str
    file_bytes: int
    buffer_bytes: int
    cache_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class StepRecord:
    """One training step as the report shows it; all sizes in bytes.

    ``borrowed_bytes`` are saved tensors that others own anyway (parameters, buffers, the caller's
    inputs): they are left alone and count neither as saved nor as packed. ``peak_bytes`` is the
    highest sum of live allocations during the last measured step, ``peak_step``, what lived before it
    included: the first two steps, those with larger inputs than any before, and one after statistics;
    ``highest_peak_bytes`` is the largest of these since the session began; ``activation_peak_bytes`` is the
    part beyond parameters, buffers, gradients, optimizer state and inputs; ``floor_bytes`` the largest
    working set of one operator plus what is packed at that time.
    ``split_bytes`` is the most that lay idle in parts of a CUDA allocator's blocks (fragmentation; None on
    the CPU). ``refresh_peak_bytes`` is the peak of the last measured step that gathered statistics.
    ``budget_bytes``, ``predicted_peak_bytes`` and ``predicted_seconds`` are those of the plan, if any.
    ``arena`` is there where packed tensors have one, ``offload`` where tensors are in a file.
    ``noise`` is the measured squared gradient error relative to the squared gradient norm,
    ``predicted_noise`` what the error law expects of it. ``update_noise`` is the same for the last updates of
    parameters whose optimizer state is packed, as measured on some of their elements.
    """

    step: int
    tensors: tuple[SavedTensor, ...]
    saved_bytes: int
    packed_bytes: int
    borrowed_bytes: int
    noise: float | None = None
    predicted_noise: float | None = None
    peak_bytes: int | None = None
    peak_step: int | None = None
    highest_peak_bytes: int | None = None
    activation_peak_bytes: int | None = None
    split_bytes: int | None = None
    refresh_peak_bytes: int | None = None
    floor_bytes: int | None = None
    budget_bytes: int | None = None
    predicted_peak_bytes: int | None = None
    predicted_seconds: float | None = None
    arena: ArenaRecord | None = None
    offload: OffloadRecord | None = None
    update_noise: float | None = None
    checks: tuple[Check, ...] = ()
    notes: tuple[str, ...] = ()

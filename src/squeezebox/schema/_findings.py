"""What the doctor finds: in a training step, and in what is installed."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass


class Waste(enum.Enum):
    """Why work was not needed, or wrong, or had to wait."""

    REPEATED = "repeated operator"
    CONSTANT = "repeated in every step"
    DEAD = "dead store"
    COPY = "needless copy"
    SYNC = "host-device sync"
    OVERWRITTEN = "overwritten before backward"


@dataclass(frozen=True, kw_only=True, slots=True)
class Redundancy:
    """Calls of one operator from one line of Python, in one phase, in one step.

    ``phase`` is "forward" within a module, "backward" within autograd, "" elsewhere. ``modules`` are those
    whose forward ran, or whose backward. A backward's line is the one whose forward it belongs to.
    ``count`` are the calls that could go, or that the host waits for; ``seconds`` and ``nbytes`` are
    theirs: what they took, and what they wrote, or moved to the host. ``first`` is where the same was
    computed before: ``file:line``, or ``file:line of module``.
    """

    waste: Waste
    operator: str
    file: str
    line: int
    function: str
    modules: tuple[str, ...]
    phase: str
    count: int
    seconds: float
    nbytes: int
    first: str | None = None
    note: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckedStep:
    """One recorded step; ``seconds`` are the operators' own, as recorded.

    ``repeated_on_purpose`` are operators that checkpointing computed again, which are no findings.
    ``as_device`` says whether syncs are counted as if the tensors were on a device.
    """

    device: str
    as_device: bool
    operators: int
    seconds: float
    repeated_on_purpose: int
    findings: tuple[Redundancy, ...]


class Fault(enum.Enum):
    """What is wrong with a package, or with one of its files or classes."""

    CHANGED = "changed since it was installed"
    MISSING = "missing"
    ADDED = "not of the package's installation"
    PATCHED = "not what its source defines"
    BROKEN = "does not work here"


@dataclass(frozen=True, kw_only=True, slots=True)
class EnvironmentFault:
    """``subject`` is a file, a class's method, or a package; ``detail`` says more."""

    fault: Fault
    package: str
    subject: str
    detail: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckedPackage:
    """What was looked at, or why nothing was (``skipped``); ``loaded`` counts its modules."""

    name: str
    version: str
    files: int = 0
    loaded: int = 0
    skipped: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckedEnvironment:
    """``facts`` are versions, devices and memory; ``notes`` what is no fault but good to know."""

    facts: Mapping[str, str]
    packages: tuple[CheckedPackage, ...]
    faults: tuple[EnvironmentFault, ...]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Overflow:
    """The first operator of a step that can leave a type of numbers, and what cures it.

    ``type`` is "fp16", "bf16" or that of the tensor, such as "int16"; "int32" also is what int8 products of
    its operands would be added up in. ``reach`` is the largest magnitude that is proven, ``most`` the type's.
    Its operands divided by ``2 ** shift`` keep it within. ``count`` are the operators that can.
    """

    type: str
    operator: str
    module: str
    number: int
    reach: float
    most: float
    shift: int
    count: int


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckedRanges:
    """How far a step's operators reach: ``proven`` of them by rules, the others as seen.

    Inputs and parameters, and what operators without a rule make, are taken to reach ``margin`` times as far
    as seen. ``unproven`` counts operators without a rule by name.
    """

    margin: float
    operators: int
    proven: int
    overflows: tuple[Overflow, ...]
    unproven: Mapping[str, int]

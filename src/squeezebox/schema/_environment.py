"""What is installed here, and whether it still is what was installed."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass


class Fault(enum.Enum):
    """What is wrong with a package, or with one of its files or classes."""

    CHANGED = "changed since it was installed"
    MISSING = "missing"
    ADDED = "not of the package's installation"
    BYTE_CODE = "byte code that its source does not make"
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
    byte_code_files: int = 0
    loaded: int = 0
    skipped: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckedEnvironment:
    """``facts`` are versions, devices and memory; ``notes`` what is no fault but good to know."""

    facts: Mapping[str, str]
    packages: tuple[CheckedPackage, ...]
    faults: tuple[EnvironmentFault, ...]
    notes: tuple[str, ...] = ()

"""How the loops are compiled: few functions that Python calls, and their parts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba import njit

_ANY: dict[str, Any] = {"nogil": True, "error_model": "numpy", "no_cfunc_wrapper": True}
PART: dict[str, Any] = {**_ANY, "no_cpython_wrapper": True}
"""Of a function that only compiled ones call: without what Python would call it by, which costs most."""


def kernel(function: Callable[..., Any]) -> Any:
    """A loop that Python calls; kept on disk, unless numba finds no folder that it may write to."""
    compiled = njit(**_ANY)(function)
    try:
        compiled.enable_caching()
    except (RuntimeError, OSError):
        return compiled  # each process then compiles for itself
    return compiled


def part(function: Callable[..., Any]) -> Any:
    """A function that kernels call, kept on disk within each of them."""
    return njit(**PART)(function)

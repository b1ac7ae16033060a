"""Compiled CPU loops, one for each operator worth it; numba is imported when the first one runs.

In: flat CPU tensors. Out: codes equal to the reference's to the bit.
May touch: numba, numpy, torch, the worker threads.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

KERNELS: dict[str, Callable[..., Any]] = {}

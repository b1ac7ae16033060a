"""The time at which everything asked for so far is done."""

from __future__ import annotations

import time

import torch


def now() -> float:
    """Seconds, after waiting for the device if there is one."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return time.perf_counter()

"""The time at which everything that a device was asked for so far is done."""

from __future__ import annotations

import time

import torch


def now(device: torch.device) -> float:
    """Seconds, after waiting for the device, which need not be the current one."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()

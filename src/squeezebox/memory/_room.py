"""How many bytes a process may still take on a device."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from squeezebox.schema import OptionError

_CGROUP = Path("/sys/fs/cgroup")


def free_bytes(device: torch.device) -> int:
    """Bytes that tensors can still take there: of the device, or of the host and this process's limits.

    On a host the least of what the system says is available, what the control group leaves, and what
    ``ulimit -v`` leaves of the address space.

    Raises:
        OptionError: the system does not say; Linux does.
    """
    if device.type == "cuda":
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + cached
    known = [free for free in (_available(), _of_group(), of_address_space()) if free is not None]
    if not known:
        raise OptionError("this system does not say how much memory is free; give memory=, such as '8GiB'.")
    return max(min(known), 0)


def _available() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")), None)


def _of_group() -> int | None:
    """What is left of the control group, whose caches of files would give way."""
    try:
        limit = (_CGROUP / "memory.max").read_text().strip()
        used = int((_CGROUP / "memory.current").read_text())
        parts = dict(line.split() for line in (_CGROUP / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return None
    return None if limit == "max" else int(limit) - used + int(parts.get("inactive_file", 0))


def of_address_space(field: str = "VmSize") -> int | None:
    """Bytes that ``ulimit -v`` leaves of this process's address space; None without that limit."""
    try:
        import resource

        limit = resource.getrlimit(resource.RLIMIT_AS)[0]
        lines = Path("/proc/self/status").read_text().splitlines()
    except (ImportError, OSError):
        return None
    used = next((1024 * int(line.split()[1]) for line in lines if line.startswith(f"{field}:")), None)
    return None if used is None or limit == resource.RLIM_INFINITY else limit - used


def free_at_peak() -> int | None:
    """Bytes that ``ulimit -v`` left when this process was largest; None without that limit."""
    free = of_address_space("VmPeak")
    return None if free is None else max(free, 0)


def live_bytes(device: torch.device) -> int | None:
    """Bytes of tensors on a CUDA device, or of this process's memory on a host that says so."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return None
    return pages * os.sysconf("SC_PAGESIZE")

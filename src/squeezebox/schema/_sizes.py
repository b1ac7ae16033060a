"""Sizes in bytes, as people write and read them."""

from __future__ import annotations

import re
from types import MappingProxyType

from squeezebox.schema._errors import OptionError

BYTE_UNITS = MappingProxyType(
    {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
)
"""Bytes of each unit in which sizes may be given, in capitals."""


def parse_size(name: str, size: int | str) -> int:
    """Bytes of a number, or of a text such as ``4096``, ``12MiB`` or ``1.5GB``; ``name`` is the argument's.

    Raises:
        OptionError: it is no size.
    """
    found = re.fullmatch(r"([0-9]{1,15}(?:\.[0-9]*)?|\.[0-9]+)\s*([A-Za-z]*)", str(size))
    unit = (found[2].upper() or "B") if found else ""
    if not found or unit not in BYTE_UNITS:
        raise OptionError(f"{name} {size or 'nothing'} is no size; give bytes, 12MiB or 1.5GB.")
    return round(float(found[1]) * BYTE_UNITS[unit])


def human_bytes(nbytes: float) -> str:
    """Bytes in the largest binary unit that keeps the number above one."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(nbytes) < 1024 or unit == "GiB":
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.2f} {unit}"
        nbytes /= 1024
    raise AssertionError("unreachable")

"""Doors of rooms that load a file when one of its names is used."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping


def door(room: str, files: Mapping[str, str]) -> Callable[[str], object]:
    """A module's ``__getattr__`` (PEP 562).

    Args:
        room: the module's own name.
        files: the module within ``room`` that has each name.

    Raises:
        AttributeError: from what is returned: no file has the name.
    """

    def found(name: str) -> object:
        if name not in files:
            raise AttributeError(f"module '{room}' has no attribute {name!r}")
        return getattr(importlib.import_module(f"{room}.{files[name]}"), name)

    return found

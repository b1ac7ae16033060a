"""Ranges of groups, shared out over the worker threads."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

from squeezebox.codecs import _workers

Result = TypeVar("Result")
LEAST_GROUPS = 256


def over_groups(work: Callable[[int, int], Result], count: int, least: int = LEAST_GROUPS) -> list[Result]:
    """``work(first, last)`` for a few runs of at least ``least`` groups that together make ``count``."""
    pieces = _workers.spans(count, least)
    return _workers.run(lambda index: work(*pieces[index]), len(pieces))


def new_codes(groups: int, bits: int) -> Tensor:
    """Room for the codes of this many groups."""
    return torch.empty(groups * 32 * bits, dtype=torch.uint8, device="cpu")

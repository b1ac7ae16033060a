"""Channels that go away in the middle of training, with their optimizer state.

In: a model in training, its optimizer, inputs to follow channels with, and when. Out: the same, narrower.
May touch: parameters, buffers, sizes that layers keep, optimizer state, and hooks of the optimizer's step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from squeezebox.schema import door

__all__ = ["Pruning", "load_pruned", "prune"]

if TYPE_CHECKING:
    from squeezebox.pruning._load import load_pruned
    from squeezebox.pruning._prune import Pruning, prune
else:  # hidden from type checkers, who would take any name for an attribute
    __getattr__ = door(__name__, {"Pruning": "_prune", "load_pruned": "_load", "prune": "_prune"})

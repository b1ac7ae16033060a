"""Whether two models or pipelines that should agree do, and which layer is the first that does not.

In: two models, functions or lists of stages, and batches. Out: a report by layer, forward and backward.
May touch: modules' hooks, gradients, buffers, modes and random states, which come back as they were.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from squeezebox.schema import door

__all__ = ["parity"]

if TYPE_CHECKING:
    from squeezebox.comparing._parity import parity
else:  # hidden from type checkers, who would take any name for an attribute
    __getattr__ = door(__name__, {"parity": "_parity"})

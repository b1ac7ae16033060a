"""Computes parts of a model in ways that need less memory, and checks that they compute the same.

In: a model, a sample and its loss. Out: a rewritten model, and a table of what was rewritten.
May touch: the model's class while it is rewritten; gradients, buffers and random states, which come back.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from squeezebox.schema import door

__all__ = ["PLAIN_ONLY", "Rewritten", "proposed", "rewrite", "sliced_cross_entropy"]

if TYPE_CHECKING:
    from squeezebox.rewriting._rewrite import Rewritten, proposed, rewrite
    from squeezebox.rewriting._rules import PLAIN_ONLY
    from squeezebox.rewriting._sliced_loss import sliced_cross_entropy
else:  # hidden from type checkers, who would take any name for an attribute
    __getattr__ = door(
        __name__,
        {
            "PLAIN_ONLY": "_rules",
            "Rewritten": "_rewrite",
            "proposed": "_rewrite",
            "rewrite": "_rewrite",
            "sliced_cross_entropy": "_sliced_loss",
        },
    )

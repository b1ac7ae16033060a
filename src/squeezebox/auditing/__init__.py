"""Trainings side by side: whether a lossy way trains as the plain one does.

In: a function that trains, and the ways to train with. Out: paired outcomes, intervals and a verdict.
May touch: a folder for what has been trained, so that an audit goes on where it was ended.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from squeezebox.schema import door

__all__ = [
    "AuditRun",
    "Factor",
    "Outcome",
    "audit",
]

if TYPE_CHECKING:
    from squeezebox.auditing._audit import audit
    from squeezebox.auditing._run import AuditRun, Factor, Outcome
else:  # hidden from type checkers, who would take any name for an attribute
    __getattr__ = door(
        __name__,
        {
            "audit": "_audit",
            "AuditRun": "_run",
            "Factor": "_run",
            "Outcome": "_run",
        },
    )

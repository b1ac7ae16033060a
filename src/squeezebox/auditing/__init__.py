"""Trainings side by side: whether a lossy way trains as the plain one does, and how lossy it may be.

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
    "Searched",
    "audit",
    "calibrate",
    "search",
]

if TYPE_CHECKING:
    from squeezebox.auditing._audit import audit
    from squeezebox.auditing._calibrate import calibrate
    from squeezebox.auditing._run import AuditRun, Factor, Outcome
    from squeezebox.auditing._search import Searched, search
else:  # hidden from type checkers, who would take any name for an attribute
    __getattr__ = door(
        __name__,
        {
            "audit": "_audit",
            "calibrate": "_calibrate",
            "AuditRun": "_run",
            "Factor": "_run",
            "Outcome": "_run",
            "Searched": "_search",
            "search": "_search",
        },
    )

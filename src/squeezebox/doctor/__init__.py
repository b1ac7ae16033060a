"""What a training step does needlessly, and whether the environment is as it was installed.

In: a function that takes a step, names of packages. Out: findings by line of Python, faults by package.
May touch: files of installed packages, to read them; processes that import them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from squeezebox.schema import door

__all__ = [
    "check_environment",
    "check_ranges",
    "check_step",
]

if TYPE_CHECKING:
    from squeezebox.doctor._environment import check_environment
    from squeezebox.doctor._ranges import check_ranges
    from squeezebox.doctor._step import check_step
else:  # hidden from type checkers, who would take any name for an attribute
    __getattr__ = door(
        __name__,
        {
            "check_environment": "_environment",
            "check_ranges": "_ranges",
            "check_step": "_step",
        },
    )

"""``squeezebox doctor``: what a step does in vain."""

from __future__ import annotations

import squeezebox
from squeezebox.cli._estimate import load_factory
from squeezebox.reports import StepCheck

_ANY = 64  # arguments that a step may need, if a batch gives them


def examine_step(name: str, batch: str | None, as_device: bool) -> StepCheck:
    """Check the step called ``module:callable``.

    Raises:
        OptionError: a name says nothing that can be called like this.
    """
    make = None if batch is None else load_factory(batch)
    step = load_factory(name, arguments=0 if batch is None else _ANY)
    return squeezebox.check_step(step, batch=make, as_device=as_device)

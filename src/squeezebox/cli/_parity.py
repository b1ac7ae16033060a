"""``squeezebox parity``: two models or pipelines by their names, their batches, and the findings."""

from __future__ import annotations

import json

import squeezebox
from squeezebox.cli._estimate import call_factory, load_factory
from squeezebox.cli._show import progress
from squeezebox.schema import SqueezeboxError


def run(names: tuple[str, str], data: str, *, backward: bool, tolerance: float, as_json: bool) -> None:
    """Compare what two functions return on the batches that a third one returns, and print the findings.

    Raises:
        OptionError: a name says nothing that can be called, or what it returned is no model or batch.
        SqueezeboxError: after printing, where they differ; or a function raised something.
    """
    with progress("comparing") as on_progress:
        make_a, make_b, draw = map(load_factory, (*names, data))
        a, b = call_factory(names[0], make_a), call_factory(names[1], make_b)
        batches = call_factory(data, lambda: list(draw()))
        found = squeezebox.parity(
            a, b, batches, backward=backward, tolerance=tolerance, on_progress=on_progress
        )
    print(json.dumps(found.to_dict(), indent=1) if as_json else found)
    if found.first is not None:
        raise SqueezeboxError(
            f"{names[1]} differs from {names[0]}, first at {found.first.layer} ({found.first.what}). Mend "
            "that, or give --tolerance if this much is meant."
        )

"""Two systems that should agree: run free, and run with every layer of one given the other's inputs."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from squeezebox.comparing._comparison import Comparison, left_as_found
from squeezebox.comparing._sides import read_sides
from squeezebox.reports import Parity
from squeezebox.schema import OptionError
from squeezebox.steps import Progress


def parity(
    a: Any,
    b: Any,
    batches: Iterable[Any],
    *,
    backward: bool = True,
    tolerance: float = 1e-5,
    on_progress: Progress | None = None,
) -> Parity:
    """Find out whether two models or pipelines agree, and which layer of ``b`` is the first that does not.

    Each batch runs through ``a``, through ``b`` by itself, and through ``b`` once more, in which every layer
    is given what the same layer of ``a`` was given, forward and backward. So each layer's difference is its
    own. What a model computes between its layers counts as a part of it, and so does each stage of a
    pipeline. Both start from the same random state, in whatever mode they are in. Modes, gradients, buffers,
    random states and hooks come back as they were.

    Args:
        a: what is right: a model, a function, or a list of stages, as ``[("resize", resize), ("net", net)]``.
            Each stage is given what the one before returned; a tuple is several arguments. Layers of models
            that a function refers to are seen too.
        b: what should agree with it. Layers are matched by name, or by the order of their calls where fewer
            than half of the names are there.
        batches: what the first stage is called with; a tuple is several arguments. All are run, and a
            layer's inputs and outputs are held for one batch at a time.
        backward: compare gradients too. They begin at the output: with 1 where it is one number, such as a
            loss, else with random numbers, the same ones for both.
        tolerance: largest ``|a - b| / (|a| + rms(a))`` of an element that counts as agreement. Four
            roundings of a's dtype always do. A gradient may differ by four times what a rounding of the
            incoming gradient does to it as well: some are zero but for rounding, such as
            that of a bias before a normalisation.
        on_progress: called with (done, total, note) after each batch.

    Returns:
        The findings: ``agrees``, ``first``, and ``str()`` for a table.

    Raises:
        OptionError: there is no stage or no batch, the tolerance is not above 0, or ``a`` fails on a batch.
    """
    sides = read_sides(a, b)
    if not 0.0 < tolerance < math.inf:
        raise OptionError(f"tolerance {tolerance} is not finite and above 0; give 1e-5 for float32.")
    with left_as_found(*sides):
        given = list(batches)
        if not given:
            raise OptionError("there is no batch; give at least one, of what the first stage is called with.")
        comparison = Comparison(*sides, backward, tolerance)
        for number, batch in enumerate(given, 1):
            comparison.add(batch)
            if on_progress is not None:
                on_progress(number, len(given), "batches")
        return Parity(comparison.figures(given))

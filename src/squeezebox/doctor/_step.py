"""Whether a training step does anything needlessly."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch

from squeezebox.capture import Overwrite, Overwrites
from squeezebox.profiling import check_redundancy
from squeezebox.reports import StepCheck
from squeezebox.schema import Redundancy, Waste

_STEPS = 3  # one to begin with, one that is judged, one that tells what is the same in every step


def check_step(
    step: Callable[..., object],
    *,
    batch: Callable[[], object] | None = None,
    as_device: bool = False,
    on_progress: Callable[[int, int, str], None] | None = None,
) -> StepCheck:
    """Run a training step three times, and name what it does needlessly, by line of Python, time and bytes.

    Named are operators whose results were there already, results that nobody reads, copies in whose place
    the original would have done, and operators for which the host waits for a device. Random operators
    and in-place updates are no repeats. Only what is certain from the operators that ran is named: a step
    with other inputs may take other branches. To the model and the optimizer these are three steps of
    training like any other. In the first, checksums tell of saved tensors that were overwritten before
    backward read them where autograd does not see it, as through ``.data``: gradients are wrong then.

    Args:
        step: takes one training step, with optimizer if that is to be seen.
        batch: makes what ``step`` is called with, a tuple or one argument; before each step, so that what
            depends on the batch alone is not taken for a constant. None: ``step`` takes nothing.
        as_device: on a machine without a device, name what would wait for one.
        on_progress: called with (done, total, note) after each step.

    Returns:
        The findings, the slowest first: file and line, module, calls, seconds and bytes of one step. As
        text, ``to_dict()`` and ``save(path)``.

    Raises:
        Exception: whatever ``step`` or ``batch`` raises; nothing stays recorded.

    After PieProf (Tan et al., "Toward efficient interactions between Python and native libraries", 2021),
    with torch's dispatcher in place of hardware counters: calls are seen whole, and operators' insides not.
    """
    batches = enumerate([arguments(batch) for _ in range(_STEPS)], 1)

    def run() -> object:
        number, arguments = next(batches)
        result = step(*arguments)
        if on_progress is not None:
            on_progress(number, _STEPS, "steps")
        return result

    with Overwrites() as overwrites:
        run()
    on_device = torch.cuda.is_initialized()
    device = torch.device("cuda", torch.cuda.current_device()) if on_device else torch.device("cpu")
    checked = check_redundancy(run, device=device, as_device=as_device)
    return StepCheck(replace(checked, findings=(*checked.findings, *_findings(overwrites.found))))


def _findings(overwrites: Iterable[Overwrite]) -> tuple[Redundancy, ...]:
    """Each line's once."""
    counts = Counter((each.operator, each.stamp.file, each.stamp.line) for each in overwrites)
    first = {(each.operator, each.stamp.file, each.stamp.line): each for each in reversed([*overwrites])}
    return tuple(
        Redundancy(
            waste=Waste.OVERWRITTEN,
            operator=each.operator,
            file=each.stamp.file,
            line=each.stamp.line,
            function=each.stamp.function,
            modules=(each.stamp.module,) if each.stamp.module else (),
            phase="forward" if each.stamp.module else "",
            count=counts[place],
            seconds=0.0,
            nbytes=each.nbytes,
        )
        for place, each in first.items()
    )


def arguments(batch: Callable[[], object] | None) -> tuple[Any, ...]:
    """What a step is called with."""
    if batch is None:
        return ()
    made = batch()
    return made if isinstance(made, tuple) else (made,)

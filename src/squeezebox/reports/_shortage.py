"""Why a budget cannot be met, in words."""

from __future__ import annotations

from collections.abc import Iterator

from squeezebox.reports._report import human_bytes
from squeezebox.schema import MemoryParts, Moment, Shortage

_EVENTS = {
    "save": "while '{}' is packed",
    "saved": "after '{}' was packed",
    "freed": "after '{}' was packed and let go",
    "use": "while '{}' is unpacked",
    "used": "in the operator that reads '{}'",
    "release": "after '{}' was read",
    "lend": "while a frozen weight is read",
    "lent": "in the operator that reads a frozen weight",
    "given back": "after a frozen weight was read",
    "gradient": "where a parameter is updated",
    "updated": "after a parameter was updated",
}


def explain(shortage: Shortage) -> str:
    """What is missing, what the peak is made of, and what would fit."""
    needed = exact_bytes(shortage.parts.total_bytes)
    ways = [*_ways(shortage), f"raise the budget to {needed}"]
    return (
        f"Budget {exact_bytes(shortage.budget_bytes)} is below the {needed} that the smallest plan "
        f"found at noise {shortage.noise:g} needs. Its peak is {where(shortage.moment)}, "
        f"and holds {_listed(shortage.parts)}. What would fit: {'; '.join(ways)}."
    )


def explain_floor(budget_bytes: int, parts: MemoryParts) -> str:
    """That a budget is below what a step holds whatever is done with saved tensors."""
    return (
        f"Budget {exact_bytes(budget_bytes)} is below the {exact_bytes(parts.total_bytes)} that "
        f"{_listed(parts)} take, whatever is done with saved tensors. Raise it well above that, or make the "
        "model or the optimizer's state smaller."
    )


def exact_bytes(nbytes: int) -> str:
    """``1.50 GiB (1610612736 bytes)``; below 1 KiB only the bytes."""
    return f"{human_bytes(nbytes)} ({nbytes} bytes)" if nbytes >= 1024 else f"{nbytes} bytes"


def where(moment: Moment) -> str:
    """``in backward, in the operator that reads 'head:Addmm.mat1'``."""
    if moment.phase == "optimizer":
        return "in the optimizer's step"
    event = _EVENTS.get(moment.event, "at its start").format(moment.key)
    return f"in {'the loss' if moment.phase == 'loss' else moment.phase}, {event}"


def named(parts: MemoryParts) -> dict[str, int]:
    """Bytes of the parts that there are, by what they are called."""
    names = {
        "parameters and buffers": parts.parameter_bytes,
        "the sample": parts.input_bytes,
        "gradients": parts.gradient_bytes,
        "optimizer state": parts.state_bytes,
        "saved tensors": parts.saved_bytes,
        "temporaries": parts.temporary_bytes,
    }
    return {name: nbytes for name, nbytes in names.items() if nbytes}


def _listed(parts: MemoryParts) -> str:
    listed = [f"{name} {exact_bytes(nbytes)}" for name, nbytes in named(parts).items()]
    return " and ".join([", ".join(listed[:-1]), *listed[-1:]] if len(listed) > 1 else listed)


def _ways(shortage: Shortage) -> Iterator[str]:
    """The changes that would fit, the cheapest first."""
    if shortage.peak_bytes_but_loss is not None:
        yield (
            "compute the loss in slices of the batch (outside of it the peak is "
            f"{exact_bytes(shortage.peak_bytes_but_loss)})"
        )
    if shortage.more_noise is not None and shortage.noise > 0.0:
        yield f"allow noise {shortage.more_noise:g}"
    if shortage.stateless_peak_bytes is not None and shortage.parts.state_bytes > 0:
        yield (
            "an optimizer without state, such as SGD without momentum (peak "
            f"{exact_bytes(shortage.stateless_peak_bytes)})"
        )
    if shortage.smaller_batch is not None:
        yield f"a batch of about {shortage.smaller_batch}"

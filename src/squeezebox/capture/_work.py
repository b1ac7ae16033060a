"""The first layers' calls, taken from a forward to be made by themselves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from squeezebox.capture._region import Tracer, chain_of
from squeezebox.capture._slices import Sliced
from squeezebox.capture._stand_in import Deferred


@dataclass(frozen=True, slots=True, eq=False)
class Work:
    """Calls of a region, each on the result of the one before, and what the first one reads."""

    calls: tuple[Deferred, ...]
    source: torch.Tensor

    def first(self, count: int) -> Work:
        """The work of a shorter region."""
        return Work(self.calls[:count], self.source)

    def of(self, size: int) -> Work:
        """The work of the first ``size`` samples."""
        return Work(self.calls, self.source[:size])

    def run(self, slices: int) -> torch.Tensor:
        """The last call's result; in one slice, as torch computes it."""
        if slices == 1:
            x = self.source
            for call in self.calls:
                x = call.function(x, *call.arguments, **call.keywords)
            return x
        chain, tensors = chain_of(self.calls)
        result: torch.Tensor = Sliced.apply(chain, slices, self.source, *tensors)  # type: ignore[no-untyped-call]
        return result


def work_of(forward: Callable[[], object]) -> Work | None:
    """Run ``forward``, without gradients, and take the calls that could be a region; None without any."""
    watching = _Watching()
    with torch.no_grad(), watching:
        forward()
    tracer = watching.tracer
    return Work(tuple(tracer.deferred), tracer.sources[0]) if tracer.deferred else None


class _Watching(TorchFunctionMode):
    """Shows every call to a tracer."""

    module = ""
    catches = True

    def __init__(self) -> None:
        super().__init__()
        self.tracer = Tracer(holding=True)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.tracer.saw(func, args, kwargs or {}, out, self)
        return out

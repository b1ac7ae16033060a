"""The steps that gather statistics, from which new bounds follow."""

from __future__ import annotations

import math

import torch

from squeezebox.capture import Collector, Recorder
from squeezebox.session._policy import BoundPolicy
from squeezebox.steps import names_of

_UNKNOWN_COUNT = 64  # lossy tensors of a model, before the first step has counted them
_GOLDEN = (math.sqrt(5.0) - 1.0) / 2.0  # multiples of it spread evenly over the unit interval


class Refreshes:
    """Of one session.

    ``counts`` are a step's lossy tensors: True for those of weighted layers, False for others. Where
    ``sums_errors``, a refresh also measures the error of all tensors together.
    """

    def __init__(self, policy: BoundPolicy, checks_per_refresh: int) -> None:
        self.counts = {True: _UNKNOWN_COUNT, False: _UNKNOWN_COUNT}
        self.collector: Collector | None = None  # of the running step, if that is a refresh
        self.sums_errors = True
        self._policy, self._checks_per_refresh = policy, checks_per_refresh

    def due(self, step: int) -> bool:
        """Whether this step gathers statistics."""
        controller = self._policy.controller
        return step >= 0 and controller is not None and controller.due(step)

    def begin(self, recorder: Recorder, model: torch.nn.Module, step: int) -> None:
        """Gather them from now on, if they are due."""
        if self.due(step):
            found = Collector(recorder.store, names_of(model), self._is_checked, step)
            if not self.sums_errors:
                found.total.fail()
            self.collector = recorder.collector = found

    def end(self, recorder: Recorder) -> Collector | None:
        """Take the hooks off the graph; what they gathered, if they did."""
        found, self.collector, recorder.collector = self.collector, None, None
        if found is not None:
            found.close()
        return found

    def _is_checked(self, weighted: bool, number: int) -> bool:
        """Whether the lossy tensor of this running number is checked now; turns cover all evenly."""
        count = max(self.counts[weighted], 1)
        first = int(self._policy.state.updates * _GOLDEN % 1.0 * count)
        return number < count and (number - first) % count < self._checks_per_refresh

"""The mean of gradients by matrices of low rank: PowerSGD (arXiv:1905.13727), as torch has it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

from squeezebox.gradients._exchange import Exchange
from squeezebox.gradients._residuals import Names

_NOT_ZERO = 1e-20  # added to a column's norm: one of zeros stays zero, and others keep their bits
# Until the process ends: the hook's callbacks hold a group a little longer than its result is waited for, and
# gloo ends the process where one of its own threads is the last to let go of a group.
_groups: set[Any] = set()


@dataclass(frozen=True, kw_only=True, slots=True)
class _Bucket:
    """What torch's hook asks of a bucket."""

    flat: Tensor
    shapes: Sequence[Sequence[int]]

    def buffer(self) -> Tensor:
        return self.flat

    def gradients(self) -> list[Tensor]:
        parts = self.flat.split([math.prod(shape) for shape in self.shapes])
        return [part.view(tuple(shape)) for part, shape in zip(parts, self.shapes, strict=True)]

    def index(self) -> int:
        return 0

    def is_last(self) -> bool:
        return False


class LowRank:
    """PowerSGD, a group of parameters at a time: torch's hook mixes up several at once over gloo.

    Each group has a state of torch's, and begins with its factors of the pass before. Feedback is the same as
    of all methods, by parameter, so torch's own is off.
    """

    def __init__(self, rank: int, shapes: Mapping[str, Sequence[int]]) -> None:
        self.rank, self._shapes = rank, shapes
        self._states: dict[Names, PowerSGDState] = {}

    def knows(self, names: Names) -> bool:
        """Whether a group has factors; the first ones are drawn from torch's global generator."""
        return names in self._states

    def average(self, exchange: Exchange, names: Names, flat: Tensor) -> None:
        """Put nearly the mean over ranks of a group's flat tensor into it."""
        state = self._states.get(names) or self._new(names)
        state.process_group = exchange.group
        _groups.add(exchange.group)
        state.total_numel_after_compression = 0
        bucket: Any = _Bucket(flat=flat, shapes=[self._shapes[name] for name in names])
        powerSGD_hook(state, bucket).wait()
        nbytes = int(state.total_numel_after_compression) * flat.element_size()
        exchange.count_reduced(nbytes)

    def state(self, groups: Iterable[Names]) -> list[list[Tensor] | None]:
        """Each group's factors, copied; None for a group that has none yet."""
        found = [self._states.get(names) for names in groups]
        return [
            None if each is None else [each.p_memory_dict[0].clone(), each.q_memory_dict[0].clone()]
            for each in found
        ]

    def restore(self, groups: Sequence[Names], factors: Sequence[list[Tensor] | None]) -> None:
        """Go on from :meth:`state` of the same rank."""
        self._states.clear()
        for names, found in zip(groups, factors, strict=True):
            if found is not None:
                state = self._new(names)
                state.p_memory_dict[0], state.q_memory_dict[0] = (each.clone() for each in found)

    def _new(self, names: Names) -> PowerSGDState:
        for stale in [each for each in self._states if not set(each).isdisjoint(names)]:
            del self._states[stale]
        made = PowerSGDState(
            None,
            self.rank,
            start_powerSGD_iter=2,
            use_error_feedback=False,
            orthogonalization_epsilon=_NOT_ZERO,
        )
        made.iter = made.start_powerSGD_iter
        self._states[names] = made
        return made

"""Which noise a layer draws: a key for every call, and the same key again where a call is recomputed."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from squeezebox.schema import OptionError, UnsupportedModelError

_WORD = 2**32


@dataclass(frozen=True, kw_only=True, slots=True)
class Key:
    """What noise depends on, and all that is kept of it.

    ``seed`` is below 2^63, the others below 2^32. ``sample`` is the first of those that a call draws.
    """

    seed: int
    module: int
    draw: int
    sample: int

    def words(self, sample: int, *, bias: bool = False) -> tuple[int, int, int, int]:
        """As the operators take them, of the call's weight or bias for one of its samples."""
        return self.seed, self.draw % _WORD, (self.sample + sample) % _WORD, self.module * 2 + bias


class Call:
    """One call of a layer; it lives as long as the graph that waits for its backward."""

    __slots__ = ("__weakref__", "done", "key")

    def __init__(self, key: Key) -> None:
        self.key = key
        self.done = False


class Draws:
    """Counts a layer's calls, those in training and those in evaluation, so that each draws other noise."""

    def __init__(self, seed: int, module: int = 0, *, same_on_ranks: bool = False) -> None:
        if not 0 <= seed < 2**63:
            raise OptionError(f"seed={seed} is not between 0 and 2^63 - 1; pick one that is.")
        self.seed, self.module, self.same_on_ranks = seed, module, same_on_ranks
        self._counts = {True: 0, False: 0}
        self._open: list[weakref.ref[Call]] = []

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_open": []}

    def state(self) -> dict[str, int]:
        """Plain numbers, for a checkpoint."""
        return {
            "seed": self.seed,
            "module": self.module,
            "training": self._counts[True],
            "evaluation": self._counts[False],
        }

    def load(self, state: dict[str, int]) -> None:
        """Go on from a checkpoint: the next call draws what it would have drawn there."""
        self.seed, self.module = state["seed"], state["module"]
        self._counts = {True: state["training"], False: state["evaluation"]}

    def call(self, samples: int, *, training: bool) -> Call:
        """The next call; within a backward, the one that is recomputed.

        Raises:
            UnsupportedModelError: a call is recomputed, and several wait for their backward.
        """
        self._open = [each for each in self._open if each() is not None]
        if torch._C._current_graph_task_id() != -1:
            return self._recomputed()
        key = Key(
            seed=self.seed,
            module=self.module * 2 + (not training),
            draw=self._counts[training],
            sample=0 if self.same_on_ranks else _rank() * samples,
        )
        self._counts[training] += 1
        call = Call(key)
        self._open.append(weakref.ref(call))
        return call

    def _recomputed(self) -> Call:
        alive = [call for each in self._open if (call := each()) is not None]
        waiting = [call for call in alive if not call.done] or alive
        if len(waiting) != 1:
            raise UnsupportedModelError(
                f"A Bayesian layer is recomputed within backward, and {len(waiting)} of its calls wait for "
                "theirs, so which of their noise to draw is not known. Fold the samples into one call "
                "(bayesian_(model, samples=...)), checkpoint with use_reentrant=False, and drop graphs that "
                "have no backward."
            )
        return waiting[0]


def _rank() -> int:
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0

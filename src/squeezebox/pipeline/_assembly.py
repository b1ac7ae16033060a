"""What all ranks tell each other in words, through the process group's store."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from typing import Any

from torch.distributed.distributed_c10d import Store

from squeezebox.pipeline._health import Health


class Assembly:
    """One of ``count`` ranks, number ``number``; all of them must call the same methods in the same order."""

    def __init__(self, store: Store, health: Health, number: int, count: int) -> None:
        self._store, self._health = store, health
        self._number, self._count = number, count
        self._turns = itertools.count()

    def gather(self, value: Any, what: str = "waits for what rank {} has") -> list[Any]:
        """Everybody's plain values, in the order of ranks."""
        key = f"assembly/{next(self._turns)}"
        self._store.set(f"{key}/{self._number}", json.dumps(value))
        told = [
            self._health.await_key(f"{key}/{number}", what.format(number), number)
            for number in range(self._count)
        ]
        return [json.loads(each) for each in told]

    def meet(self, what: str) -> None:
        """Wait for all ranks to come here."""
        self.gather(None, f"waits until rank {{}} has {what}")

    def choose(self, choice: Callable[[], Any], what: str) -> Any:
        """What the first rank chooses."""
        key = f"assembly/{next(self._turns)}"
        if self._number == 0:
            self._store.set(key, json.dumps(choice()))
        return json.loads(self._health.await_key(key, f"waits for the first rank's choice of {what}", 0))

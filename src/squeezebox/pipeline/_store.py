"""The process group's store, given up where the process that has it is silent."""

from __future__ import annotations

import contextlib
import functools
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from queue import SimpleQueue
from threading import Thread
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store, _get_default_store

_LEAST = 3.0  # seconds that an answer may take, whatever the patience
Question = tuple[Callable[[], Any], Future[Any]]


class PatientStore:
    """A store with the methods of torch's ``Store``, each of which raises DistStoreError in time.

    Torch waits without end for an answer of a machine that is cut off or stopped. So a thread asks. Once an
    answer takes more than ``patience`` seconds, no more is asked.
    """

    def __init__(self, store: Store, patience: float) -> None:
        self._store, self._seconds = store, max(patience, _LEAST)
        self._is_silent = False
        self._begun: list[float] = []  # when what is not yet answered was asked
        self._questions: SimpleQueue[Question | None] = SimpleQueue()
        Thread(target=_ask, args=(self._questions,), name="squeezebox-store", daemon=True).start()
        weakref.finalize(self, self._questions.put, None)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return functools.partial(self._answer, getattr(self._store, name))

    def _answer(self, method: Callable[..., Any], *arguments: Any) -> Any:
        if self._is_silent:
            raise dist.DistStoreError("the process that has the store is silent")
        answer, begun = Future[Any](), time.monotonic()
        self._begun.append(begun)
        self._questions.put((functools.partial(method, *arguments), answer))
        try:
            while not self._is_silent:
                oldest = self._begun[0]  # it may be another thread's
                with contextlib.suppress(FutureTimeout):  # another class than TimeoutError in Python 3.10
                    return answer.result(oldest + self._seconds - time.monotonic())
                if self._begun[0] == oldest:
                    self._is_silent = True
        finally:
            self._begun.remove(begun)
        raise dist.DistStoreError(f"the store did not answer for {self._seconds:.0f} s")


def _ask(questions: SimpleQueue[Question | None]) -> None:
    while (question := questions.get()) is not None:
        ask, answer = question
        try:
            answer.set_result(ask())
        except Exception as error:  # noqa: BLE001
            answer.set_exception(error)


def own_store(serial: int, patience: float) -> PatientStore:
    """A part of the process group's store, on a connection of its own."""
    own = PrefixStore(f"squeezebox/{serial}", _get_default_store().clone())  # type: ignore[attr-defined]
    return PatientStore(own, patience)

"""The exchange runs in a thread of its own, in order; a rank that is missing is named."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store, _get_default_store

from squeezebox.schema import RankError

_ANSWER = 3.0  # seconds that a roll call waits


def own_store(serial: int) -> Store:
    """A part of the process group's store, on a connection of its own."""
    return PrefixStore(f"squeezebox/gradients/{serial}", _get_default_store().clone())  # type: ignore[attr-defined]


def missing(store: Store, rank: int, ranks: Sequence[int]) -> list[int]:
    """Call the roll: the ranks that do not answer within seconds, though their exchange has failed too."""
    absent = [each for each in ranks if each != rank]
    end = time.monotonic() + _ANSWER
    try:
        store.set(f"here/{rank}", "1")
        while absent and time.monotonic() < end:
            absent = [each for each in absent if not store.check([f"here/{each}"])]
            time.sleep(0.05)
    except (RuntimeError, dist.DistError):  # its host has gone, which is the first rank if there is one
        return absent[:1]
    return absent


class Worker:
    """Does what it is given, one job after the other, until one fails.

    ``patience``: seconds that a rank is waited for, of which the group's connections make sure.
    """

    def __init__(self, store: Store, rank: int, ranks: Sequence[int], patience: float) -> None:
        self._store, self._rank, self._ranks, self._patience = store, rank, ranks, patience
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._begun, self._done = 0, 0
        self._turn = threading.Condition()
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._work, name="squeezebox-gradients", daemon=True)
        self._thread.start()

    def submit(self, job: Callable[[], None]) -> None:
        """Have it done after what was submitted before."""
        self._begun += 1
        self._jobs.put(job)

    def finish(self) -> None:
        """Return once all is done.

        Raises:
            RankError: a rank is gone or hangs, and there is no going on.
            Exception: what a job raised.
        """
        with self._turn:
            self._turn.wait_for(lambda: self._failure is not None or self._done == self._begun)
        self._raise()

    def run_here(self, jobs: Sequence[Callable[[], None]]) -> None:
        """Do these in the calling thread, while nothing is submitted.

        Raises:
            RankError, Exception: as :meth:`finish`.
        """
        for job in jobs:
            try:
                job()
            except RuntimeError as failure:  # gloo's: a rank is gone
                self._failure = failure
                self._raise()

    def _raise(self) -> None:
        if isinstance(self._failure, RuntimeError) and not isinstance(self._failure, RankError):
            self._failure = self._explained(self._failure)
        if self._failure is not None:
            raise self._failure

    def stop(self) -> None:
        """End the thread, once what it does is done."""
        self._jobs.put(None)
        self._thread.join(self._patience + _ANSWER)

    def _work(self) -> None:
        torch.get_num_threads()  # as many as the others have; a new thread's products would take all
        while (job := self._jobs.get()) is not None and self._failure is None:
            try:
                job()
            except Exception as failure:  # noqa: BLE001  finish() raises it
                self._failure = failure
            with self._turn:
                self._done += 1
                self._turn.notify_all()

    def _explained(self, failure: RuntimeError) -> RankError:
        absent = missing(self._store, self._rank, self._ranks)
        names = ", ".join(map(str, absent))
        if absent:
            found = RankError(
                f"rank{'s' * (len(absent) > 1)} {names} did not come to the exchange of gradients: gone, or "
                f"hanging for {self._patience:.0f} s, and silent when called. Look at what was printed "
                "there, then start all ranks again from the last checkpoint."
            )
        else:
            found = RankError(
                f"the ranks' exchange of gradients failed: {str(failure).splitlines()[0]}. All of them "
                "answer when called, so look at the link between them, and at what each printed. "
                "Start all again from the last checkpoint."
            )
        found.__cause__ = failure
        return found

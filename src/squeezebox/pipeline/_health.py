"""What ranks tell each other, and what becomes of a pipeline of which one rank dies, hangs or raises."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import TimeoutError as FutureTimeout
from datetime import timedelta
from typing import Any, NoReturn, Protocol, TypeVar

import torch
import torch.distributed as dist

from squeezebox.pipeline._store import PatientStore
from squeezebox.schema import PipelineError, SqueezeboxError, UnsupportedModelError, in_one_line

T = TypeVar("T")
R_co = TypeVar("R_co", covariant=True)


class Outcome(Protocol[R_co]):
    """What comes of work under way, such as a Future."""

    def result(self, timeout: float) -> R_co:
        """It, or TimeoutError after ``timeout`` seconds."""


def await_until(is_done: Callable[[], bool], seconds: float) -> None:
    """Look until it is; TimeoutError after that time."""
    end = time.monotonic() + seconds
    while not is_done():
        if time.monotonic() > end:
            raise TimeoutError(f"nothing came within {seconds:.0f} s")
        time.sleep(_PAUSE)


class Refused(Exception):
    """Within a guard all ranks refuse alike, before anything has changed; the caller gets the ``error``."""

    def __init__(self, error: SqueezeboxError) -> None:
        super().__init__(str(error))
        self.error = error


_BEAT = 1.0  # seconds between two signs of life
_STALE = 3.0 * _BEAT
_SURE = 0.5  # seconds in which a rank that has failed itself says so
_FAILURE = "failure"
_PAUSE = 5e-5  # seconds between two looks at what a device has done
_IDLE = "is between two steps"
_TRANSPORT = "gloo/transport"  # is in the message of a connection's error
_NEVER = 1 << 20  # a tag that nothing is ever sent under


class Health:
    """A rank's own signs of life, and what it knows of the others.

    A thread tells the process group's store once a second what this rank is doing. A rank that fails writes
    that into the store and closes the runner's connections, which wakes all that wait for a message. Each of
    them raises an error that names the rank which failed first.

    ``names`` says what each rank holds, such as "stage 2"; ``patience`` is in seconds; ``groups`` have the
    connections, ``device`` is where this rank computes.
    """

    def __init__(
        self,
        store: PatientStore,
        rank: int,
        names: Sequence[str],
        patience: float,
        groups: Sequence[dist.ProcessGroup],
        device: torch.device,
    ) -> None:
        self._store, self._groups, self._device = store, list(groups), device
        self.failed = False
        self._rank, self._names, self._patience = rank, names, patience
        self._work = _IDLE
        self._doing: tuple[str, int | None, float] = (_IDLE, None, time.monotonic())
        begun = time.monotonic()
        self._seen: dict[int, tuple[list[Any], float]] = {  # a rank's last sign of life, and when it was new
            other: ([0, "has never begun", None], begun) for other in range(len(names)) if other != rank
        }
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="squeezebox-health", daemon=True)
        self._thread.start()

    def connected(self, groups: Sequence[dist.ProcessGroup]) -> None:
        """There are further connections."""
        self._groups += groups

    def works(self, what: str) -> None:
        """From now on this rank computes."""
        self._work = what
        self._doing = (what, None, time.monotonic())

    def waits(self, what: str, peer: int) -> None:
        """From now on it waits for another rank, or for all of them if ``peer`` is its own."""
        self._doing = (what, peer, time.monotonic())

    def resumes(self) -> None:
        """What was waited for has come: this rank goes on with what it did before."""
        self.works(self._work)

    def await_key(self, key: str, what: str, peer: int) -> bytes:
        """A value that another rank puts into the store.

        Raises:
            RuntimeError: a rank has failed.
            TimeoutError: it took too long.
        """
        self.waits(what, peer)
        begun, pause = time.monotonic(), 0.001
        while not self._store.check([key]):
            if self._failure() is not None:
                raise RuntimeError(f"another rank failed while this one {what}")
            if time.monotonic() - begun > self._patience:
                raise TimeoutError(f"{key} did not come within {self._patience} s")
            time.sleep(pause)
            pause = min(2.0 * pause, 0.1)
        self.resumes()
        value: bytes = self._store.get(key)
        return value

    def await_outcome(self, outcome: Outcome[T]) -> T:
        """What the ranks tell each other meanwhile.

        Raises:
            TimeoutError: it took too long.
        """
        self.waits("waits for the other ranks' gradients", self._rank)
        try:
            result = outcome.result(self._patience)
        except FutureTimeout as error:  # another class than TimeoutError in Python 3.10
            raise TimeoutError(f"nothing came within {self._patience:.0f} s") from error
        self.resumes()
        return result

    def stop(self) -> None:
        """End the thread."""
        self._stopped.set()
        self._thread.join()

    @contextlib.contextmanager
    def guard(self) -> Iterator[None]:
        """Around all that a rank does: an error here stops the other ranks too, and there is no going on.

        Raises:
            PipelineError: another rank failed; the message names it. Or this one has failed before.
        """
        if self.failed:
            raise PipelineError(
                "this runner has failed and cannot go on. Start all ranks again from the last checkpoint."
            )
        self.failed = True  # until the guard is left without an error
        self.works("begins")
        try:
            yield
        except Refused as refusal:
            self.failed = False
            self.works(_IDLE)
            raise refusal.error from None
        except BaseException as error:
            peer = self._doing[1]
            # A send may fail as soon as it begins, and so may a question to the store.
            waits = peer is not None or _TRANSPORT in str(error) or isinstance(error, dist.DistStoreError)
            lost = waits and isinstance(error, RuntimeError | TimeoutError)
            failure = self._why(error) if lost else self._report(self._rank, f"raised {in_one_line(error)}")
            self.works(_IDLE)
            self._stopped.set()
            for group in self._groups:
                _close(group)
            if not lost:
                raise
            self._raise(failure, error)
        self.failed = False
        self.works(_IDLE)

    def _raise(self, failure: dict[str, Any], error: BaseException) -> NoReturn:
        rank = failure["rank"]
        raise PipelineError(
            f"rank {rank} ({self._names[rank]}) {failure['what']}; rank {self._rank} "
            f"({self._names[self._rank]}) has stopped, as it cannot go on alone. Look at what rank {rank} "
            "printed, then start all ranks again from the last checkpoint."
        ) from error

    def _why(self, error: BaseException) -> dict[str, Any]:
        """Who failed first, as far as this rank can know."""
        waited = time.monotonic() - self._doing[2] >= self._patience
        # What was waited for so long would be known to be silent; else it takes as long to know.
        end = time.monotonic() + (_SURE if waited and self._patience >= _STALE else _STALE)
        while True:
            failure = self._failure()
            if failure is not None:
                return failure
            self._look()
            silent = self._silent(_STALE)
            if silent or time.monotonic() > end:
                break
            time.sleep(0.1)
        if silent:
            return self._report(silent[0], self._of_silent(waited))
        rank = self._last_waited_for()
        # Another one's wait that ran out of time closes this one's connections too.
        how = f"was waited for {self._patience:.0f} s" if waited else "is alive, its connection closed"
        what = self._doing[0] if rank == self._rank else self._seen[rank][0][1]
        return self._report(rank, f"hangs: it {how}, and {what}")

    def _of_silent(self, waited: bool) -> str:
        if waited:
            return f"gives no sign of life and was waited for {self._patience:.0f} s"
        return "is gone: it gives no sign of life, and its connection is closed"

    def _silent(self, seconds: float) -> list[int]:
        """The ranks that have given no sign of life for so long."""
        now = time.monotonic()
        return [rank for rank, (_, since) in self._seen.items() if now - since >= seconds]

    def _last_waited_for(self) -> int:
        """The rank that all the others wait for in the end."""
        awaits = {rank: told[2] for rank, (told, _) in self._seen.items()}
        rank, seen = self._doing[1], {self._rank}  # the ranks on the way
        while rank is not None and rank not in seen:
            seen.add(rank)
            if awaits[rank] is None:
                return rank
            rank = awaits[rank]
        # It waits for nobody, or ranks wait in a circle: then one that works and does not wait is named.
        working = [each for each, peer in awaits.items() if peer is None]
        return (working or [self._rank if rank is None else rank])[0]

    def _report(self, rank: int, what: str) -> dict[str, Any]:
        """Write down a failure, unless another one was first, and return the first."""
        mine = {"rank": rank, "what": what}
        try:
            first = self._store.compare_set(_FAILURE, "", json.dumps(mine))
        except (RuntimeError, dist.DistError):  # the process that held the store is gone
            return mine
        found: dict[str, Any] = json.loads(first)
        return found

    def _failure(self) -> dict[str, Any] | None:
        with contextlib.suppress(RuntimeError, dist.DistError):
            if self._store.check([_FAILURE]):
                found: dict[str, Any] = json.loads(self._store.get(_FAILURE))
                return found
        return None

    def _look(self) -> None:
        """Note the other ranks' signs of life: a count of them, what the rank does, whom it waits for."""
        with contextlib.suppress(RuntimeError, dist.DistError):
            there = [rank for rank in self._seen if self._store.check([f"beat/{rank}"])]
            for rank, told in zip(
                there, self._store.multi_get([f"beat/{rank}" for rank in there]), strict=True
            ):
                new = json.loads(told)
                if new[0] != self._seen[rank][0][0]:
                    self._seen[rank] = new, time.monotonic()

    def _watch(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)  # of each thread its own
        count = 0
        while not self._stopped.wait(_BEAT) and not self._others_stopped(count):
            count += 1
            self._look()
            silent = self._silent(self._patience)
            if silent and self._doing[1] is not None:
                self._report(silent[0], self._of_silent(waited=True))
                break
        for group in self._groups if not self._stopped.is_set() else ():
            _close(group)  # wakes what waits here
        woken = time.monotonic()
        while not self._stopped.wait(_BEAT):
            what, _, since = self._doing
            now = time.monotonic()
            if what != _IDLE and now - since > self._patience and now - woken > _STALE:
                os.kill(os.getpid(), signal.SIGTERM)  # it hangs, or it would have noticed

    def _others_stopped(self, count: int) -> bool:
        """Give a sign of life; whether a rank has failed or the store is gone."""
        what, peer, since = self._doing
        told = f"{what} for {time.monotonic() - since:.0f} s"
        try:
            self._store.set(f"beat/{self._rank}", json.dumps([count + 1, told, peer]))
            return bool(self._store.check([_FAILURE]))
        except (RuntimeError, dist.DistError):
            return True


def _close(group: dist.ProcessGroup) -> None:
    """Close a group's connections, which wakes what waits on them.

    gloo does so when a wait on one of them runs out of time; nccl aborts what its communicators do.
    """
    if group.size() < 2:
        return
    if dist.get_backend(group) == "nccl":
        with contextlib.suppress(RuntimeError):
            group.abort()
        return
    peer = dist.get_global_rank(group, (group.rank() + 1) % group.size())
    with contextlib.suppress(RuntimeError):
        work = dist.irecv(torch.empty(1, device="cpu"), peer, group=group, tag=_NEVER)
        if work is not None:
            work.wait(timedelta(milliseconds=1))


class Assembly:
    """One of ``count`` ranks, number ``number``; all of them must call the same methods in the same order."""

    def __init__(self, store: PatientStore, health: Health, number: int, count: int) -> None:
        self._store, self._health = store, health
        self._number, self._count = number, count
        self._turns = itertools.count()
        self._read: list[str] = []  # own keys that all have read when they gather again

    def gather(self, value: Any, what: str = "waits for what rank {} has") -> list[Any]:
        """Everybody's plain values, in the order of ranks."""
        key = f"assembly/{next(self._turns)}"
        self._store.set(f"{key}/{self._number}", json.dumps(value))
        told = [
            self._health.await_key(f"{key}/{number}", what.format(number), number)
            for number in range(self._count)
        ]
        for earlier in self._read:  # by all, as they have come here
            self._store.delete_key(earlier)
        self._read = [f"{key}/{self._number}"]
        return [json.loads(each) for each in told]

    def meet(self, what: str) -> None:
        """Wait for all ranks to come here."""
        self.gather(None, f"waits until rank {{}} has {what}")

    def make(self, made_here: Callable[[], T]) -> T:
        """What each rank makes of the model.

        Raises:
            Refused: a rank cannot.
        """
        made, why = list[T](), ""
        try:
            made.append(made_here())
        except UnsupportedModelError as error:
            why = str(error)
        for refused in filter(None, self.gather(why)):
            raise Refused(UnsupportedModelError(refused))
        return made[0]

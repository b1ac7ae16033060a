"""Another rank's memory as a place for tensors: one rank lends it, and serves it; the other one moves there.

The two have a gloo group of their own. A request is a header, [what, area, offset, bytes], and the bytes. The
borrower sends headers and bytes in one order, and the lender takes them in that order, several at once.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import mmap
import queue
import threading
import time
import weakref
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, Store, _get_default_store

from squeezebox.memory._elsewhere import Area, Elsewhere, close_at_exit
from squeezebox.memory._room import free_bytes, keep_freed, return_freed
from squeezebox.schema import OptionError, RankError, human_bytes, in_one_line, parse_size

_LEAST = 1 << 25  # bytes: measuring its price moves some
_PAUSE = 0.02  # seconds between two looks at the store
_NEVER = timedelta(days=1000)
_WRITE, _READ, _DROP, _END = range(4)
_HEADER, _THERE, _BACK = range(3)  # tags of messages
_AT_ONCE = 6  # requests that the lender has begun
_BORROWER, _LENDER = range(2)  # ranks of the group


class Neighbour(Elsewhere):
    """The memory that another rank lends by :func:`lend`: give it as ``offload=``, to plan and to attach.

    Tensors come back to the bit. Where the other rank is gone or hangs, backward raises an error that names
    it within ``patience``; parameters and optimizer are then as before the step.

    Args:
        rank: of the process that lends.
        bytes: how many, such as "2GiB"; all that it lends by default.
        patience: seconds that it is waited for, now and whenever tensors are moved.

    Raises:
        OptionError: it lends less; there is no such rank; torch.distributed is not initialised.
        RankError: it lends nothing within ``patience``.
    """

    filesystem, kind = "gloo", "neighbour"
    frees_memory, keeps_state = True, False

    def __init__(self, *, rank: int, bytes: int | str | None = None, patience: float = 30.0) -> None:
        store = _store(rank, lender=rank, borrower=_own_rank())
        self.path, self._rank, self._patience = f"the memory of rank {rank}", rank, patience
        self.advice = (
            f"Have rank {rank} lend more, or make the plan with a larger budget, which offloads less.",
            "Parameters and optimizer are as before this step: detach, then attach with another neighbour or "
            "with a plan that offloads to a file.",
        )
        offer = self._offer(store)
        self.most_bytes = offer["nbytes"] if bytes is None else parse_size("bytes", bytes)
        if not _LEAST <= self.most_bytes <= offer["nbytes"]:
            raise OptionError(
                f"rank {rank} lends {human_bytes(offer['nbytes'])}, and {human_bytes(self.most_bytes)} were "
                f"asked for. Ask for at least {human_bytes(_LEAST)} and no more than it lends."
            )
        store.delete_key("offer")
        store.set(f"taken/{offer['number']}", "1")
        self._group: Any = _group(store, offer["number"], _BORROWER, timedelta(seconds=patience))
        self._lost = ""  # why it is not there any more
        self._turn = threading.Lock()  # requests are sent one by one
        self._begun: queue.SimpleQueue[tuple[list[Any], Future[None]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._wait, name="squeezebox-neighbour", daemon=True)
        self._thread.start()
        self._used: dict[int, int] = {}  # bytes of each area
        self._numbers = itertools.count()
        self._dropped: deque[int] = deque()  # areas of which the lender has not heard
        close_at_exit(self)  # a gloo group that is held when Python ends may abort the process

    def __str__(self) -> str:
        return self.path

    __repr__ = __str__

    def free_bytes(self) -> int:
        """Of those that it lends."""
        assert self.most_bytes is not None
        return self.most_bytes - sum([*self._used.values()])  # at once: areas may go meanwhile

    def open(self) -> Area:
        """An area of its own."""
        number = next(self._numbers)
        self._used[number] = 0
        return LentArea(self, number)

    def close(self) -> None:
        """Give the memory back: the other rank's :func:`lend` returns. Close sessions first."""
        if self._group is None:
            return
        if not self._lost:
            with contextlib.suppress(RuntimeError):  # it has gone before
                self._send_header(_END).wait(timedelta(seconds=self._patience))
        self._begun.put(None)
        self._thread.join()
        self._lost, self._group = f"{self} was given back", None

    def reserve(self, area: int, end: int) -> None:
        """Have an area reach to ``end``; OSError if that is more than is lent."""
        if end - self._used[area] > self.free_bytes():
            raise OSError("that is more than was lent")
        self._used[area] = max(self._used[area], end)

    def drop(self, area: int) -> None:
        """Nobody needs an area; the garbage collector may say so, at any time."""
        del self._used[area]
        self._dropped.append(area)

    def begin(self, what: int, area: int, offset: int, data: memoryview) -> Future[None]:
        """Begin to write or read bytes; it ends in OSError once the other rank has not answered."""
        begun: Future[None] = Future()
        try:
            with self._turn:
                if not self._lost:
                    works = self._start(what, area, offset, torch.frombuffer(data, dtype=torch.uint8))
                    self._begun.put((works, begun))
                    return begun
        except RuntimeError as error:
            self._lost = self._lost or self._why(error)
        begun.set_exception(OSError(self._lost))
        return begun

    def _wait(self) -> None:
        """In a thread of its own: requests end in the order in which they were begun."""
        while (found := self._begun.get()) is not None:
            works, begun = found
            try:
                for work in works:
                    work.wait(timedelta(seconds=self._patience))
                begun.set_result(None)
            except RuntimeError as error:
                self._lost = self._lost or self._why(error)
                begun.set_exception(OSError(self._lost))

    def _start(self, what: int, area: int, offset: int, flat: Tensor) -> list[Any]:
        works = []
        while self._dropped:
            works.append(self._send_header(_DROP, self._dropped.popleft()))
        if what == _READ:  # expected before it is asked for
            works.append(_Message(self._group.recv([flat], _LENDER, _BACK), flat))
        works.append(self._send_header(what, area, offset, flat.numel()))
        if what == _WRITE:
            works.append(_Message(self._group.send([flat], _LENDER, _THERE), flat))
        return works

    def _send_header(self, *numbers: int) -> Any:
        header = torch.tensor([*numbers, *[0] * (4 - len(numbers))], dtype=torch.int64, device="cpu")
        return _Message(self._group.send([header], _LENDER, _HEADER), header)

    def _why(self, error: RuntimeError) -> str:
        if "time" in str(error).lower():  # of gloo: "timed out", and of what others then see, "timeout"
            return f"rank {self._rank} has not answered for {self._patience:g} s"
        return f"rank {self._rank} is gone, its connection closed"

    def _offer(self, store: Store) -> dict[str, int]:
        """What the other rank lends, as soon as it does."""
        end = time.monotonic() + self._patience
        while not store.check(["offer"]):
            if time.monotonic() > end:
                raise RankError(
                    f"rank {self._rank} has lent no memory within {self._patience:g} s. Have it call "
                    f"squeezebox.memory.lend('2GiB', rank={_own_rank()}), and look at what it printed."
                )
            time.sleep(_PAUSE)
        found: dict[str, int] = json.loads(store.get("offer"))
        return found


@dataclass(frozen=True, slots=True)
class _Message:
    """A message on its way, whose memory must stay."""

    work: Any
    tensor: Tensor

    def wait(self, timeout: timedelta) -> None:
        self.work.wait(timeout)


class LentArea(Area):
    """Some of a neighbour's memory."""

    direct = fills_anything = True

    def __init__(self, neighbour: Neighbour, number: int) -> None:
        self._neighbour, self._number = neighbour, number
        return_freed()
        self._close = weakref.finalize(self, _give_back, neighbour, number)

    def reserve(self, offset: int, nbytes: int) -> None:
        self._neighbour.reserve(self._number, offset + nbytes)

    def begin_write(self, data: memoryview, offset: int) -> Future[None]:
        return self._neighbour.begin(_WRITE, self._number, offset, data)

    def begin_read(self, data: memoryview, offset: int) -> Future[None]:
        return self._neighbour.begin(_READ, self._number, offset, data)

    def finish(self, *, wait: bool) -> None:
        self._is_finished = True

    def close(self) -> None:
        self._close()


def _give_back(neighbour: Neighbour, number: int) -> None:
    neighbour.drop(number)
    keep_freed()


def lend(bytes: int | str, *, rank: int = 0, patience: float = 30.0) -> None:
    """Lend another rank this process's memory, until that one gives it back or is gone.

    Memory is taken as it is written. The other rank's :class:`Neighbour` may call before or after.

    Args:
        bytes: how many, such as "2GiB".
        rank: who may take them.
        patience: seconds in which the two must have connected, once that one has taken them.

    Raises:
        OptionError: this machine has not as many free; there is no such rank; torch.distributed is not
            initialised.
        RankError: the process group's store is gone, or the two cannot connect.
    """
    store, nbytes = _store(rank, lender=_own_rank(), borrower=rank), parse_size("bytes", bytes)
    free = free_bytes(torch.device("cpu"))
    if not _LEAST <= nbytes <= free:
        raise OptionError(
            f"{human_bytes(nbytes)} were to be lent to rank {rank}, and this machine has {human_bytes(free)} "
            f"free. Lend at least {human_bytes(_LEAST)} and no more than is free."
        )
    served: Future[None] = Future()

    def work() -> None:
        try:
            _Loan(_taken(store, nbytes, rank, patience), nbytes).serve()
            served.set_result(None)
        except RankError as error:
            served.set_exception(error)

    # In a thread of its own, as nothing interrupts a wait of gloo's.
    threading.Thread(target=work, name="squeezebox-lend", daemon=True).start()
    served.result()


def _taken(store: Store, nbytes: int, rank: int, patience: float) -> Any:
    """Offer them, and wait for the group that the other rank makes."""
    try:
        number = store.add("number", 1)
        store.set("offer", json.dumps({"number": number, "nbytes": nbytes}))
        while not store.check([f"taken/{number}"]):
            time.sleep(_PAUSE)
        return _group(store, number, _LENDER, timedelta(seconds=patience))
    except RuntimeError as error:  # dist.DistError is one
        raise RankError(
            f"rank {rank} and this one have not connected ({in_one_line(error)}; {patience:g} s are "
            "allowed). Look at what that rank printed, then start both again."
        ) from error


class _Loan:
    """Memory that is lent, and the requests for it."""

    def __init__(self, group: Any, nbytes: int) -> None:
        self._group, self._nbytes = group, nbytes
        self._areas: dict[int, Tensor] = {}
        self._begun: deque[tuple[tuple[int, int, int], Any]] = deque()  # (area, start, end), work

    def serve(self) -> None:
        """Until the borrower ends it, or is gone."""
        headers = deque(self._next_header() for _ in range(_AT_ONCE))
        try:
            while True:
                sent = headers.popleft()
                sent.wait(_NEVER)
                what, area, offset, nbytes = sent.tensor.tolist()
                if what == _END:
                    return
                headers.append(self._next_header())
                self._take(what, area, offset, offset + nbytes)
        except RuntimeError:  # gloo's: the borrower is gone
            return

    def _next_header(self) -> _Message:
        header = torch.empty(4, dtype=torch.int64, device="cpu")
        return _Message(self._group.recv([header], _BORROWER, _HEADER), header)

    def _take(self, what: int, area: int, start: int, end: int) -> None:
        if what == _DROP:
            self._settle(area, 0, self._nbytes)
            self._areas.pop(area, None)
            return
        self._settle(area, start, end)
        if area not in self._areas:
            self._areas[area] = torch.frombuffer(_pages(self._nbytes), dtype=torch.uint8)
        part = [self._areas[area][start:end]]
        move = self._group.recv if what == _WRITE else self._group.send
        work = move(part, _BORROWER, _THERE if what == _WRITE else _BACK)
        self._begun.append(((area, start, end), work))

    def _settle(self, area: int, start: int, end: int) -> None:
        """Wait for what was begun with these bytes, and for more than a few in all."""

        def is_pending() -> bool:
            places = (place for place, _ in self._begun)
            return any(where == area and first < end and start < last for where, first, last in places)

        while len(self._begun) >= _AT_ONCE or is_pending():
            self._begun.popleft()[1].wait(_NEVER)


def _pages(nbytes: int) -> mmap.mmap:
    """Memory that is there once it is written."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
    found = mmap.mmap(-1, nbytes, flags=flags)
    if hasattr(mmap, "MADV_HUGEPAGE"):  # fewer first writes of a page, and fewer addresses to look up
        found.madvise(mmap.MADV_HUGEPAGE)
    return found


def _own_rank() -> int:
    if not (dist.is_available() and dist.is_initialized()):
        raise OptionError(
            "memory is lent from rank to rank, and this process has none yet; call "
            "torch.distributed.init_process_group('gloo') on both first."
        )
    return dist.get_rank()


def _store(rank: int, *, lender: int, borrower: int) -> Store:
    """The two ranks' part of the process group's store, on a connection of its own."""
    if rank == _own_rank() or not 0 <= rank < dist.get_world_size():
        raise OptionError(
            f"rank={rank} is no other rank: this one is {_own_rank()} of {dist.get_world_size()}. Name "
            "the one on the other side."
        )
    own = _get_default_store().clone()  # type: ignore[attr-defined]
    return PrefixStore(f"squeezebox/lent/{lender}/{borrower}", own)


def _group(store: Store, number: int, rank: int, patience: timedelta) -> Any:
    return dist.ProcessGroupGloo(PrefixStore(str(number), store), rank, 2, patience)

"""A group of ranks whose collectives take as long as over a slower link: gloo's own, delayed.

It is a process group of torch like any other, so DDP, its hooks and this room's exchange all go over it.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Work

from squeezebox.schema import Link, OptionError

Future = torch.futures.Future
_ALONE = 1  # rank, which hands nothing to anybody


@dataclass(kw_only=True, slots=True)
class _Call:
    """A collective on its way. ``group`` is gloo's."""

    group: Any
    start: Callable[[], Any]
    nbytes: int
    outputs: Any
    called_at: float
    done: threading.Event = field(default_factory=threading.Event)
    failure: Exception | None = None

    def fulfil(self, future: Future[Any]) -> None:
        """Wait for the end, and say so."""
        torch.get_num_threads()  # as many as the others have; a new thread's products would take all
        self.done.wait()
        if self.failure is None:
            future.set_result(self.outputs)
        else:
            future.set_exception(self.failure)


class Wire:
    """A rank's end of the link: collectives of all groups on it, one after the other, in the order of calls.

    ``sent_bytes`` are those that this rank has put onto it.
    """

    def __init__(self, link: Link) -> None:
        self.link, self.sent_bytes = link, 0
        self._free_at = 0.0
        self._calls: queue.SimpleQueue[_Call] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="squeezebox-link", daemon=True)
        self._thread.start()

    def submit(self, call: _Call) -> None:
        """Have it done after those before."""
        self.sent_bytes += call.nbytes
        self._calls.put(call)

    def _work(self) -> None:
        while True:
            call = self._calls.get()
            try:
                self._take(call)
            except RuntimeError as failure:  # gloo's: a rank is gone
                call.failure = failure
            call.done.set()
            del call  # its tensors and group are nobody's until the next one comes

    def _take(self, call: _Call) -> None:
        """Do it, and let it last as long as its bytes take from the last rank's call on."""
        came = torch.tensor([call.called_at], dtype=torch.float64, device="cpu")
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.MAX  # type: ignore[assignment]
        call.group.allreduce([came], options).wait()
        call.start().wait()
        begun = max(float(came), self._free_at)  # the same on all ranks
        self._free_at = begun + self.link.seconds(call.nbytes)
        time.sleep(max(0.0, self._free_at - time.monotonic()))


class _LinkWork(Work):
    def __init__(self, call: _Call) -> None:
        super().__init__()
        self._call = call

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        self._call.done.wait()
        if self._call.failure is not None:
            raise self._call.failure
        return True

    def is_completed(self) -> bool:
        return self._call.done.is_set()

    def is_success(self) -> bool:
        return self._call.done.is_set() and self._call.failure is None

    def get_future(self) -> Future[Any]:
        future: Future[Any] = Future()
        # Not in the wire's thread: what follows a future may call a collective, and wait for it.
        threading.Thread(target=self._call.fulfil, args=(future,), daemon=True).start()
        return future


class LinkGroup(dist.ProcessGroup):
    """What :func:`link_group` returns. Collectives that data parallel training has no use for are missing."""

    def __init__(self, inner: Any, wire: Wire) -> None:
        super().__init__(inner.rank(), inner.size())  # type: ignore[call-arg]
        self.inner, self.wire = inner, wire
        self._name = ""

    @property
    def group_name(self) -> Any:
        return self._name

    def _set_group_name(self, name: str) -> None:
        self._name = name

    def allreduce(  # type: ignore[override]
        self, tensors: list[Tensor], opts: Any = None
    ) -> Work:
        nbytes = all_reduce_bytes(_bytes(tensors), self.size())
        return self._call(lambda: self.inner.allreduce(tensors, opts), nbytes, tensors)

    def broadcast(  # type: ignore[override]
        self, tensors: list[Tensor], opts: Any = None
    ) -> Work:
        return self._call(lambda: self.inner.broadcast(tensors, opts), _bytes(tensors), tensors)

    def allgather(  # type: ignore[override]
        self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None
    ) -> Work:
        nbytes = (self.size() - 1) * _bytes(inputs)
        return self._call(lambda: self.inner.allgather(outputs, inputs, opts), nbytes, outputs)

    def alltoall_base(
        self, output: Tensor, mine: Tensor, out_sizes: list[int], sizes: list[int], opts: Any = None
    ) -> Work:
        own = sizes[self.rank()] * mine[:1].nbytes if sizes else mine.nbytes // self.size()
        return self._call(
            lambda: self.inner.alltoall_base(output, mine, out_sizes, sizes, opts), mine.nbytes - own, output
        )

    def barrier(self, opts: Any = None) -> Work:
        return self._call(lambda: self.inner.barrier(opts or dist.BarrierOptions()), 0, [])

    def getBackendName(self) -> str:  # noqa: N802  torch's name for it
        return "gloo over a link"

    def shutdown(self) -> None:
        self.inner.shutdown()

    def _call(self, start: Callable[[], Any], nbytes: int, outputs: Any) -> Work:
        call = _Call(
            group=self.inner,
            start=start,
            nbytes=nbytes if self.size() > _ALONE else 0,
            outputs=outputs,
            called_at=time.monotonic(),
        )
        self.wire.submit(call)
        return _LinkWork(call)


def link_group(link: Link, ranks: Sequence[int] | None = None, patience: float = 60.0) -> dist.ProcessGroup:
    """Make a process group over gloo that is as slow as a link; give it to DDP as ``process_group``.

    Every collective really happens, and ends no sooner than ``link.seconds(bytes)`` after the last rank has
    called it, or after the one before has ended: a rank sends over one link, both ways at once. Bytes are
    what a ring sends from a rank: of an all-reduce 2 (W - 1) / W times the tensor. Not emulated: what other
    traffic does to a link, lost packets, rounds of a ring that each wait for the latency. Where this machine
    is slower than the link, its own time counts.

    :func:`squeezebox.compress_gradients` sends over the same link. Ranks are processes of one machine, as
    they compare clocks, and call the group's collectives in one order.

    Args:
        link: bytes a second, one way, and seconds that each collective takes at least.
        ranks: of the new group (default: all). All ranks call this alike.
        patience: seconds after which a rank that is waited for counts as failed.

    Raises:
        OptionError: the link has no speed.
    """
    if not (link.bytes_per_second > 0.0 and link.latency_seconds >= 0.0):
        raise OptionError(
            f"a link of {link.bytes_per_second:g} bytes and {link.latency_seconds:g} s carries nothing. Give "
            "bytes a second above 0, and a latency from 0: 1.25e8 is 1 Gb/s."
        )
    made = _new_group(Wire(link), ranks, patience)
    assert made is not None
    return made


def group_like(like: dist.ProcessGroup, patience: float) -> dist.ProcessGroup:
    """A group of the same ranks, over gloo and the same link if there is one."""
    ranks = dist.get_process_group_ranks(like)
    made = _new_group(like.wire if isinstance(like, LinkGroup) else None, ranks, patience)
    assert made is not None
    return made


def all_reduce_bytes(nbytes: int, ranks: int) -> int:
    """What each rank sends in a ring all-reduce of a tensor."""
    return 2 * (ranks - 1) * nbytes // ranks


def _new_group(wire: Wire | None, ranks: Sequence[int] | None, patience: float) -> dist.ProcessGroup | None:
    backend = "gloo"
    if wire is not None:
        backend = f"squeezebox_link_{id(wire)}"
        if not hasattr(dist.Backend, backend.upper()):
            dist.Backend.register_backend(backend, _maker(wire), devices=["cpu"])
    is_part = ranks is not None and len(ranks) < dist.get_world_size()
    found: dist.ProcessGroup | None = dist.new_group(
        None if ranks is None else list(ranks),
        timeout=timedelta(seconds=patience),
        backend=backend,
        # Groups that are made so may take the name, and stale addresses, of a closed one of the same ranks.
        use_local_synchronization=is_part,
    )
    return found


def _maker(wire: Wire) -> Callable[[Any, int, int, timedelta], LinkGroup]:
    def make(store: Any, rank: int, size: int, timeout: timedelta) -> LinkGroup:
        return LinkGroup(dist.ProcessGroupGloo(store, rank, size, timeout), wire)

    return make


def _bytes(tensors: Sequence[Tensor]) -> int:
    return sum(each.nbytes for each in tensors)

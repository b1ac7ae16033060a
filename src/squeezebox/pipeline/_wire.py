"""Tensors from rank to rank, sent without waiting and received ahead; and how fast that is."""

from __future__ import annotations

import multiprocessing
import socket
import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from squeezebox.pipeline._health import await_until
from squeezebox.schema import Link, PipelineError


class Form(NamedTuple):
    """What a tensor on the way looks like."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    def empty(self, device: torch.device) -> Tensor:
        """Room for such a tensor."""
        return torch.empty(self.shape, dtype=self.dtype, device=device)


@dataclass(frozen=True, kw_only=True, slots=True)
class Peer:
    """The other end of a wire.

    ``patience`` is the longest wait for anything, in seconds. ``waiting`` is called before a wait, with what
    it is for, and ``resumed`` afterwards.
    """

    rank: int
    tag: int
    group: dist.ProcessGroup
    device: torch.device
    patience: float
    waiting: Callable[[str, int], None]
    resumed: Callable[[], None]

    def finish(self, works: Sequence[dist.Work], what: str) -> None:
        """Wait until they are done; RuntimeError if the other end is gone or takes too long."""
        self.waiting(what, self.rank)
        for work in works:
            if self.device.type == "cpu":
                work.wait(timedelta(seconds=self.patience))
            else:  # this wait only queues
                await_until(work.is_completed, self.patience)
                work.wait()
        self.resumed()


@dataclass(frozen=True, kw_only=True, slots=True)
class Traffic:
    """What a rank has sent over the boundary between the stages ``boundary`` and ``boundary + 1``.

    ``back``: gradients, else activations. ``plain_bytes`` are the tensors', ``sent_bytes`` those that went.
    ``noise`` is the sum of squared errors over that of squares, measured on some of the tensors; 0 if none
    was packed. ``left_whole`` counts tensors that should have been packed and could not be.
    """

    boundary: int
    back: bool
    plain_bytes: int
    sent_bytes: int
    noise: float = 0.0
    left_whole: int = 0


def apart(tensors: Sequence[Tensor], buffers: Sequence[Tensor]) -> list[Tensor]:
    """The tensors, those in the memory of ``buffers`` copied: these take the next message."""
    taken = {buffer.untyped_storage().data_ptr() for buffer in buffers}
    return [each.clone() if each.untyped_storage().data_ptr() in taken else each for each in tensors]


class Sender:
    """One end of a wire: what is sent stays until it has arrived, at most ``most`` messages."""

    def __init__(self, peer: Peer, most: int) -> None:
        self._peer, self._most = peer, most
        self._underway: deque[tuple[list[dist.Work], list[Tensor]]] = deque()
        self.sent_bytes = 0

    def send(self, tensors: Sequence[Tensor]) -> None:
        """Send them as one message."""
        self.settle(keep=self._most - 1)
        held = [tensor.detach().contiguous() for tensor in tensors]
        works = [self._start(tensor, place) for place, tensor in enumerate(held)]
        self.sent_bytes += sum(tensor.nbytes for tensor in held)
        self._underway.append((works, held))

    def settle(self, keep: int = 0) -> None:
        """Wait until all has arrived but for the last few messages."""
        while len(self._underway) > keep:
            works, _ = self._underway[0]
            self._peer.finish(works, f"waits for rank {self._peer.rank} to receive")
            self._underway.popleft()

    def traffic(self, boundary: int, *, back: bool) -> Traffic:
        """What has been sent."""
        return Traffic(boundary=boundary, back=back, plain_bytes=self.sent_bytes, sent_bytes=self.sent_bytes)

    def _start(self, tensor: Tensor, place: int) -> dist.Work:
        work = dist.isend(tensor, self._peer.rank, group=self._peer.group, tag=self._peer.tag + place)
        assert work is not None
        return work


class Receiver:
    """The other end: buffers in a ring, of which each takes a message ahead of its use.

    ``turns`` are a line's receivers, once for each message that will come and is not asked for yet, in the
    order in which they are sent: one is asked for when its turn has come and there is a buffer.
    """

    def __init__(self, peer: Peer, forms: Sequence[Form], slots: int, turns: Turns) -> None:
        self._peer, self._turns, self._is_empty = peer, turns, not forms
        self._ring = deque([form.empty(peer.device) for form in forms] for _ in range(slots))
        self._posted: deque[tuple[list[dist.Work], list[Tensor]]] = deque()

    def expect(self, messages: int) -> None:
        """``messages`` more will come."""
        if not self._is_empty:
            self._turns.extend([self] * messages)
            _post(self._turns)

    def receive(self) -> list[Tensor]:
        """The next message; its buffers are the caller's until :meth:`release`."""
        if self._is_empty:  # as gradients in evaluation, which never come
            return []
        if not self._posted:  # it comes before others that were expected sooner
            self._turns.remove(self)
            self._turns.appendleft(self)
            _post(self._turns)
        works, buffers = self._posted[0]
        self._peer.finish(works, f"waits for rank {self._peer.rank} to send")
        self._posted.popleft()
        return buffers

    def release(self, buffers: list[Tensor]) -> None:
        """Give buffers back, for a later message."""
        if buffers:
            self._ring.append(buffers)
            _post(self._turns)

    def post(self) -> bool:
        """Ask for a message, if there is a buffer."""
        if not self._ring:
            return False
        buffers = self._ring.popleft()
        works = [self._start(buffer, place) for place, buffer in enumerate(buffers)]
        self._posted.append((works, buffers))
        return True

    def _start(self, buffer: Tensor, place: int) -> dist.Work:
        work = dist.irecv(buffer, self._peer.rank, group=self._peer.group, tag=self._peer.tag + place)
        assert work is not None
        return work


Turns = deque[Receiver]


def _post(turns: Turns) -> None:
    while turns and turns[0].post():
        turns.popleft()


_SMALL, _LARGE = 1024, 8 * 2**20  # bytes
_REPEATS = 7
_PATIENCE = 60.0


def measure_link(backend: str = "gloo") -> Link:
    """Seconds of small and large messages between two processes on this machine, there and back, halved.

    Starts two processes; a script that calls it must guard its start (``if __name__ == "__main__"``).

    Raises:
        PipelineError: they did not answer.
    """
    context = multiprocessing.get_context("spawn")
    receiving, sending = context.Pipe(duplex=False)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{probe.getsockname()[1]}"
    processes = [
        context.Process(target=_play, args=(rank, address, backend, sending), daemon=True)
        for rank in range(2)
    ]
    for process in processes:
        process.start()
    try:
        if not receiving.poll(_PATIENCE):
            raise PipelineError(
                f"two processes of this machine did not exchange a message within {_PATIENCE:.0f} s. Name "
                "the link's speed instead of having it measured."
            )
        small, large = receiving.recv()
    finally:
        for process in processes:
            process.join(1.0)
            process.kill()
    return _link(small, large)


def measure_links(device: torch.device) -> dict[tuple[int, int], Link]:
    """The link between each two ranks of the process group, measured in turns; all ranks must call it.

    Returns:
        By the lower and the higher rank, the same on all ranks.
    """
    own, world = dist.get_rank(), dist.get_world_size()
    pairs = [(one, other) for other in range(world) for one in range(other)]
    measured = torch.zeros(len(pairs), 2, dtype=torch.float64, device=device)
    for number, (one, other) in enumerate(pairs):
        if own in (one, other):
            peer = other if own == one else one
            found = [_there_and_back(own, peer, nbytes, device) / 2 for nbytes in (_SMALL, _LARGE)]
            if own == one:
                measured[number] = torch.tensor(found, dtype=torch.float64, device=device)
        dist.all_reduce(measured[number])  # also so that nobody else is measured meanwhile
    return {pair: _link(small, large) for pair, (small, large) in zip(pairs, measured.tolist(), strict=True)}


def _link(small: float, large: float) -> Link:
    """From the seconds of a small and a large message."""
    return Link(bytes_per_second=_LARGE / max(large - small, 1e-9), latency_seconds=small)


def _play(rank: int, address: str, backend: str, sending: Connection) -> None:
    dist.init_process_group(backend, init_method=address, rank=rank, world_size=2)
    device = torch.device("cpu")
    found = [_there_and_back(rank, 1 - rank, nbytes, device) / 2 for nbytes in (_SMALL, _LARGE)]
    if rank == 0:
        sending.send(found)
    dist.destroy_process_group()


def _there_and_back(rank: int, peer: int, nbytes: int, device: torch.device) -> float:
    message = torch.zeros(nbytes, dtype=torch.uint8, device=device)
    seconds = []
    for _ in range(_REPEATS):
        begun = time.perf_counter()
        for sender in sorted((rank, peer)):
            if rank == sender:
                dist.send(message, peer)
            else:
                dist.recv(message, peer)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - begun)
    return statistics.median(seconds)

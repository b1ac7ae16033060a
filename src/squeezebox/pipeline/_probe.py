"""How fast processes of this machine hand tensors to each other."""

from __future__ import annotations

import multiprocessing
import socket
import statistics
import time
from multiprocessing.connection import Connection

import torch
import torch.distributed as dist

from squeezebox.schema import Link, PipelineError

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
    return Link(bytes_per_second=_LARGE / max(large - small, 1e-9), latency_seconds=small)


def _play(rank: int, address: str, backend: str, sending: Connection) -> None:
    dist.init_process_group(backend, init_method=address, rank=rank, world_size=2)
    found = [_there_and_back(rank, nbytes) / 2 for nbytes in (_SMALL, _LARGE)]
    if rank == 0:
        sending.send(found)
    dist.destroy_process_group()


def _there_and_back(rank: int, nbytes: int) -> float:
    message = torch.zeros(nbytes, dtype=torch.uint8, device="cpu")
    seconds = []
    for _ in range(_REPEATS):
        begun = time.perf_counter()
        for sender in (0, 1):
            if rank == sender:
                dist.send(message, 1 - rank)
            else:
                dist.recv(message, 1 - rank)
        seconds.append(time.perf_counter() - begun)
    return statistics.median(seconds)

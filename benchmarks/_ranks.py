"""Real processes over gloo on this machine, and plans that part blocks evenly among them.

Goes in: a function and how many ranks call it. Comes out: what each of them returns.
May touch: processes and a port of this machine.
"""

import multiprocessing
import socket
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import torch
import torch.distributed as dist

from squeezebox.schema import InputForm, PipelinePlan, StagePlan


def run(function: Callable[..., Any], ranks: int, *arguments: Any) -> list[Any]:
    """Call ``function(rank, *arguments)`` in so many processes of one process group, a torch thread each.

    Raises:
        Exception: what one of them raised.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "squeezebox.pipeline"])
    port = free_port()
    with ProcessPoolExecutor(ranks, mp_context=context) as pool:
        futures = [pool.submit(_call, function, rank, ranks, port, arguments) for rank in range(ranks)]
        return [future.result() for future in futures]


def plan(
    blocks: int,
    ranks: int,
    schedule: str,
    microbatches: int,
    *,
    loops: int = 1,
    microbatch: int = 1,
    inputs: tuple[InputForm, ...],
) -> PipelinePlan:
    """A model's blocks in stages of as many each, whatever they cost."""
    stages = ranks * loops
    ends = [number * blocks // stages for number in range(stages + 1)]
    return PipelinePlan(
        schedule=schedule,
        ranks=ranks,
        replicas=1,
        microbatch=microbatch,
        microbatches=microbatches,
        seconds=0.0,
        inputs=inputs,
        stages=tuple(
            StagePlan(
                first=first, end=end, policy="keep", forward_seconds=0.0, backward_seconds=0.0, peak_bytes=0
            )
            for first, end in zip(ends, ends[1:], strict=False)
        ),
    )


def _call(function: Callable[..., Any], rank: int, ranks: int, port: int, arguments: tuple[Any, ...]) -> Any:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks)
    try:
        return function(rank, *arguments)
    finally:
        dist.destroy_process_group()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]

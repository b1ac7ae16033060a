"""Ranks for a measurement: processes of this machine, or those that torchrun has started."""

from __future__ import annotations

import multiprocessing
import os
import socket
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any, TypeVar

import torch

from squeezebox.schema import RankError

Result = TypeVar("Result")
Place = tuple[int, int, int]  # rank, ranks and port

_LAUNCHED = "TORCHELASTIC_RUN_ID"  # torchrun sets it


def on_ranks(function: Callable[..., Result | None], ranks: int, *arguments: Any, lost: str) -> Result | None:
    """What ``function(place, *arguments)`` returns as the first of ``ranks`` processes that are started.

    Of a process that torchrun has started, it is called there, with None.

    Raises:
        RankError: one was ended from outside; ``lost`` says why that may be.
    """
    if _LAUNCHED in os.environ:
        return function(None, *arguments)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(ranks, mp_context=context) as pool:
        futures = [pool.submit(_called, function, (rank, ranks, port), arguments) for rank in range(ranks)]
        try:
            return [each.result() for each in futures][0]
        except BrokenProcessPool as error:
            raise RankError(
                f"a process of the measurement was ended from outside, perhaps for want of memory: {lost}"
            ) from error


def _called(function: Callable[..., Result], place: Place, arguments: tuple[Any, ...]) -> Result:
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // place[1]))
    return function(place, *arguments)

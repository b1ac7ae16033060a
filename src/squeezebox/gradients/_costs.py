"""What each way of sending gradients takes on these machines and this link, measured on gradients at hand."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from squeezebox.gradients._coders import CODERS
from squeezebox.gradients._exchange import Exchange
from squeezebox.gradients._ranks import Worker
from squeezebox.gradients._residuals import wide
from squeezebox.gradients._turn import Turn
from squeezebox.planner import Line, Way

WHOLE: dict[str, torch.dtype | None] = {"plain": None, "fp16": torch.float16, "bf16": torch.bfloat16}
_SHARES = (512, 64, 8, 1)  # of all gradients, a trial has one over this
_FEWEST = 1024  # elements of a trial, if there are as many
_REPEATS = 3
_MORE = 9  # repeats of a trial that is short
_SHORT = 0.02  # seconds
_LONGEST = 0.4  # seconds that a trial may take, as foreseen from the smaller ones
_PROBE = 1 << 15  # elements of a call that tells whether there are processors to spare
_LOUDEST = 0.9  # noise above which a gradient is better left out
_TRIED = {"planes": (0.8, 4.0), "entropy": (0.2, 0.8, 4.0, 16.0)}  # shares of the noise that is allowed
_TOP_K = 100.0  # elements, of which one goes


def measured_ways(
    parts: Sequence[Tensor], noise: float, exchange: Exchange, worker: Worker
) -> tuple[Way, ...]:
    """All ways that a plan may choose from; every rank has the same, the slowest rank's seconds.

    Args:
        parts: flat gradients in the order in which backward makes them.
        noise: that is allowed, around which levels are tried.
        exchange: the one that gradients will go over.
        worker: the thread that they will go in; it is idle.
    """
    crowding = _crowding(exchange, worker)
    found = [_measured(parts, *each, crowding, exchange, worker) for each in _candidates(noise)]
    return tuple(way for way in found if way.noise <= _LOUDEST)


def _crowding(exchange: Exchange, worker: Worker) -> float:
    """Share of a busy second of the worker that backward loses: 0 with processors to spare, 1 with none."""
    data = torch.ones(_PROBE, dtype=torch.float32, device="cpu")

    def passes(seconds: float) -> int:
        count, ends = 0, time.perf_counter() + seconds
        while time.perf_counter() < ends:
            data.add(1.0)
            count += 1
        return count

    alone, shared, used = list[int](), list[int](), list[int]()
    for _ in range(_REPEATS):
        exchange.numbers([0.0])  # all begin together
        alone.append(passes(_SHORT))
        worker.submit(lambda: used.append(passes(2.0 * _SHORT)))
        shared.append(passes(_SHORT))
        worker.finish()
    slowness = statistics.median(alone) / max(statistics.median(shared), 1)
    return min(max(row[0] - 1.0 for row in exchange.numbers([max(slowness, 1.0)])), 1.0)


def _candidates(noise: float) -> Iterator[tuple[str, float]]:
    """Methods and their levels."""
    yield "plain", 1.0
    yield "fp16", 1.0
    for name, shares in _TRIED.items():
        for share in shares:
            yield name, CODERS[name].start(min(noise * share, 1.0), None)
    yield "top-k", _TOP_K


def _measured(
    parts: Sequence[Tensor],
    method: str,
    level: float,
    crowding: float,
    exchange: Exchange,
    worker: Worker,
) -> Way:
    flat = torch.cat(list(parts))
    rows: list[tuple[int, float, float, float]] = []  # elements; seconds to pack, of the rest, busy
    noise = nbytes = 0.0
    for share in _SHARES:
        sizes = _sizes(parts, max(flat.numel() // share, _FEWEST))
        if rows and sum(sizes) <= rows[-1][0]:
            continue
        if rows and sum(rows[-1][1:3]) * sum(sizes) / rows[-1][0] > _LONGEST:
            break
        owed = torch.zeros(sum(sizes), dtype=wide(flat.dtype), device="cpu")
        trials = [_trial(flat, sizes, owed, method, level, exchange, worker) for _ in range(2)]
        repeats = _MORE if sum(trials[1][:2]) < _SHORT else _REPEATS
        trials += [_trial(flat, sizes, owed, method, level, exchange, worker) for _ in range(1, repeats)]
        pack, rest, busy, *_ = (min(column) for column in zip(*trials[1:], strict=True))
        rows.append((sum(sizes), pack, rest, crowding * min(busy, rest)))
        nbytes = trials[-1][4] / sum(sizes)
        noise = max(noise, trials[-1][3])  # what is owed by then makes top-k's larger
    return Way(
        name=method,
        level=level,
        pack=fitted([(count, pack) for count, pack, *_ in rows]),
        exchange=fitted([(count, rest) for count, _, rest, _ in rows]),
        unpack=Line(fixed=0.0, each=0.0),
        noise=noise,
        busy=fitted([(count, busy) for count, *_, busy in rows]),
        nbytes=nbytes,
    )


def _sizes(parts: Sequence[Tensor], most: int) -> list[int]:
    """Sizes of the first parameters, up to `most` elements; the last one is cut off."""
    found: list[int] = []
    for part in parts:
        left = most - sum(found)
        if left > 0:
            found.append(min(part.numel(), left))
    return found


def _trial(
    flat: Tensor,
    sizes: list[int],
    owed: Tensor,
    method: str,
    level: float,
    exchange: Exchange,
    worker: Worker,
) -> tuple[float, float, float, float, float]:
    """Seconds of packing, of the rest, and busy ones of it, by the slowest rank; mean noise; bytes."""
    parts, coder = list(flat[: sum(sizes)].split(sizes)), CODERS.get(method)
    exchange.numbers([0.0])  # all begin together
    begun, sent = time.perf_counter(), exchange.sent_bytes
    gradients = torch.cat(parts)
    turn = Turn(names=(), flat=gradients, sizes=sizes, residual=owed, level=level, step=0)
    if coder is None:
        job = turn.begin_whole(exchange, WHOLE[method])
    else:
        job = turn.begin_packed(coder, exchange)
    packed, used = time.perf_counter(), time.process_time()
    worker.submit(job)
    worker.finish()
    torch.empty_like(gradients).copy_(gradients)  # as the mean goes into DDP's buckets
    ended, busy = time.perf_counter(), time.process_time() - used
    noise = turn.lost_squares / max(turn.wanted_squares, 1e-300) if coder else rounding(flat, WHOLE[method])
    rows = exchange.numbers([packed - begun, ended - begun, busy, exchange.sent_bytes - sent, noise])
    pack, whole, busy, nbytes = (max(row[place] for row in rows) for place in range(4))
    return pack, max(whole - pack, 0.0), busy, statistics.fmean(row[4] for row in rows), nbytes


def rounding(flat: Tensor, dtype: torch.dtype | None) -> float:
    """Noise of a dtype; 1 if it does not hold some element."""
    if dtype is None:
        return 0.0
    noise = float((flat - flat.to(dtype)).square().sum() / flat.square().sum().clamp(min=1e-30))
    return noise if noise < 1.0 else 1.0


def fitted(points: Sequence[tuple[int, float]]) -> Line:
    """The line of least squares over seconds, neither of whose parts is below 0."""
    counts, seconds = np.array(points, dtype=float).T
    weights = np.maximum(seconds, 1e-7) ** -0.5
    rising = Line(fixed=0.0, each=float(seconds.sum() / counts.sum()))
    if len(points) < 2:
        return rising
    each, fixed = np.polyfit(counts, seconds, 1, w=weights)
    if fixed < 0.0:
        return rising
    return Line(fixed=float(np.mean(seconds)) if each < 0.0 else float(fixed), each=max(float(each), 0.0))

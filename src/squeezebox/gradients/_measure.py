"""Ways of exchanging a model's gradients against each other, in the same steps over the same link."""

from __future__ import annotations

import contextlib
import copy
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from squeezebox.gradients._auto import AUTO, ExchangeCosts
from squeezebox.gradients._compress import CompressedGradients, compress_gradients
from squeezebox.gradients._costs import WHOLE, rounding
from squeezebox.gradients._exchange import Exchange
from squeezebox.gradients._link import all_reduce_bytes, link_group
from squeezebox.reports import ExchangeArm, ExchangeWay, MeasuredExchange
from squeezebox.schema import Link, OptionError, arguments

_PATIENCE = 600.0
_SETTLING = 2  # rounds until buckets, factors and levels have settled
_MOST_INFINITE = 20  # passes without finite gradients


def arms(noise: float, ratio: float) -> dict[str, Mapping[str, Any] | None]:
    """What is compared, by name: options of compress_gradients, or None for DDP's own and torch's hook."""
    powers = {f"powersgd, rank {rank}": {"method": "powersgd", "rank": rank} for rank in (1, 2, 3, 4)}
    parts = {
        f"{method}, {ratio:g} times": {"method": method, "ratio": ratio} for method in ("top-k", "random-k")
    }
    bounded = {method: {"method": method, "noise": noise} for method in ("planes", "entropy", AUTO)}
    whole: dict[str, Mapping[str, Any] | None] = {"plain": None, "fp16": None, "bf16": {"method": "bf16"}}
    return {**whole, **powers, **parts, "1-bit": {"method": "1-bit"}, **bounded}


@dataclass(frozen=True, kw_only=True, slots=True)
class ExchangedStep:
    """A training step of one rank: ``optimizer`` makes one for a model's parameters."""

    model: nn.Module
    inputs: Any
    target: Any
    loss_fn: Callable[..., Tensor]
    optimizer: Callable[[Any], torch.optim.Optimizer]


@dataclass(kw_only=True, slots=True)
class _Arm:
    """A copy of the model that exchanges its gradients in one way."""

    ddp: DistributedDataParallel
    optimizer: torch.optim.Optimizer
    squeezed: CompressedGradients | None = None
    seconds: list[list[float]] = field(default_factory=list)  # of a round: step, and from forward's end

    def step(self, step: ExchangedStep, *, syncs: bool = True) -> list[float]:
        self.optimizer.zero_grad()
        with contextlib.nullcontext() if syncs else self.ddp.no_sync():
            begun = time.perf_counter()
            by_place, by_name = arguments(step.model, step.inputs)
            output = self.ddp(*by_place, **by_name)
            forward = time.perf_counter()
            step.loss_fn(output, step.target).backward()
            backward = time.perf_counter()
        self.optimizer.step()
        return [time.perf_counter() - begun, backward - forward]

    def is_finite(self) -> bool:
        """Whether the last gradients are, which all ranks have alike."""
        gradients = [each.grad for each in self.ddp.parameters() if each.grad is not None]
        return all(bool(each.isfinite().all()) for each in gradients)


@contextlib.contextmanager
def joined(place: tuple[int, int, int] | None) -> Iterator[int]:
    """This process's rank in a process group over gloo: of rank, ranks and port, or of what torchrun says."""
    if place is None:
        dist.init_process_group("gloo")
    else:
        rank, ranks, port = place
        dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks)
    try:
        yield dist.get_rank()
    finally:
        dist.destroy_process_group()


def measure_exchange(
    step: ExchangedStep,
    *,
    noise: float = 1e-2,
    ratio: float = 50.0,
    rounds: int = 7,
    link: Link | None = None,
) -> MeasuredExchange:
    """Train copies of a model in turns, each with another exchange of gradients; all ranks call it alike.

    Args:
        step: this rank's.
        noise: that "planes", "entropy" and "auto" keep to.
        ratio: of "top-k" and "random-k".
        rounds: measured steps of each; one goes before each of them.
        link: to emulate (see link_group); None for the one that there is.

    Raises:
        OptionError: gradients do not become finite.
    """
    group = dist.group.WORLD if link is None else link_group(link, patience=_PATIENCE)
    assert group is not None
    exchange = Exchange(group)
    torch.manual_seed(0)
    made = {name: _made(name, options, step, group) for name, options in arms(noise, ratio).items()}
    auto = made[AUTO].squeezed
    assert auto is not None
    infinite = 0  # passes in a row
    while auto.plan is None:
        made[AUTO].step(step)
        infinite = 0 if made[AUTO].is_finite() else infinite + 1
        if infinite == _MOST_INFINITE:
            raise OptionError(
                f"the gradients of {infinite} steps in a row are NaN or infinite, so that no exchange can be "
                "measured. Give a sample, loss or optimizer with which the model trains."
            )
    alone, alone_seconds = _made("plain", None, step, group), []
    for number in range(-_SETTLING, rounds):
        for arm in made.values():
            arm.step(step)  # after which processors' caches hold this copy
            exchange.numbers([0.0])  # all begin together
            seconds = arm.step(step)
            if number >= 0:
                arm.seconds.append([max(each) for each in zip(*exchange.numbers(seconds), strict=True)])
        alone.step(step, syncs=False)
        alone_seconds.append(alone.step(step, syncs=False)[0])
    costs = auto.costs
    assert costs is not None
    plan = auto.plan
    planned = {way.name: costs.of_buckets(way).seconds for way in reversed(costs.ways) if way.noise <= noise}
    planned[AUTO] = plan.seconds
    found = MeasuredExchange(
        ranks=exchange.ranks,
        elements=sum(each.numel for each in costs.gradients),
        link_bytes_per_second=_speed(costs, exchange.ranks),
        alone_seconds=statistics.median(alone_seconds[_SETTLING:]),
        groups=tuple((each.method, len(each.names)) for each in plan.groups),
        arms=tuple(
            _row(name, arm, made["plain"], planned.get(name), exchange.ranks) for name, arm in made.items()
        ),
        ways=tuple(_ways(costs)),
    )
    for arm in made.values():
        if arm.squeezed is not None:
            arm.squeezed.close()
    return found


def _made(
    name: str, options: Mapping[str, Any] | None, step: ExchangedStep, group: dist.ProcessGroup
) -> _Arm:
    ddp = DistributedDataParallel(copy.deepcopy(step.model), process_group=group)
    arm = _Arm(ddp=ddp, optimizer=step.optimizer(ddp.parameters()))
    if options is not None:
        arm.squeezed = compress_gradients(ddp, **options, patience=_PATIENCE)
    elif name == "fp16":
        ddp.register_comm_hook(group, default_hooks.fp16_compress_hook)
    return arm


def _row(name: str, arm: _Arm, plain: _Arm, planned: float | None, ranks: int) -> ExchangeArm:
    gradients = [each.grad for each in plain.ddp.parameters() if each.grad is not None]
    dtype = WHOLE.get(name)
    if arm.squeezed is not None:
        sent, noise = arm.squeezed.last.sent_bytes, arm.squeezed.last.noise
    else:
        widths = [each.element_size() if dtype is None else dtype.itemsize for each in gradients]
        nbytes = sum(width * each.numel() for width, each in zip(widths, gradients, strict=True))
        sent, noise = all_reduce_bytes(nbytes, ranks), 0.0
    if dtype is not None:
        noise = rounding(torch.cat([each.reshape(-1) for each in gradients]), dtype)
    return ExchangeArm(
        name=name,
        step_seconds=tuple(each[0] for each in arm.seconds),
        exchange_seconds=tuple(each[1] for each in arm.seconds),
        planned_seconds=planned,
        sent_bytes=sent,
        noise=noise,
    )


def _ways(costs: ExchangeCosts) -> Iterator[ExchangeWay]:
    for way in costs.ways:
        yield ExchangeWay(
            method=way.name,
            level=way.level,
            noise=way.noise,
            pack_seconds=way.pack.fixed,
            pack_each_seconds=way.pack.each,
            send_seconds=way.exchange.fixed,
            send_each_seconds=way.exchange.each,
        )


def _speed(costs: ExchangeCosts, ranks: int) -> float:
    """Bytes a second that plain float32 gradients go at."""
    plain = next(way for way in costs.ways if way.name == "plain")
    return all_reduce_bytes(4, ranks) / max(plain.exchange.each, 1e-15)

"""DistributedDataParallel's hook: buckets come in, groups of parameters go out, in one order on all ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import GradBucket

from squeezebox.gradients._residuals import Names
from squeezebox.schema import OptionError

Start = Callable[[Names, Tensor], None]
Future = torch.futures.Future


@dataclass(kw_only=True, slots=True)
class _Group:
    """Parameters that go together, and what of their gradients has come."""

    names: Names
    parts: dict[str, Tensor] = field(default_factory=dict)


class Buckets:
    """Turns DDP's buckets into groups of parameters.

    A group is a bucket. But DDP rebuilds its buckets after a process's first backward, in the order in which
    gradients came. So a process's first pass, and the second one of all, collect the ``groups`` of the pass
    before: a resumed training then goes on to the bit as if it had not stopped. Where nothing is owed
    (``owes`` is False) groups are DDP's buckets in every pass, which keeps its order of sums.

    Groups that are ``planned`` are collected in every pass, from single gradients too, which :meth:`arrive`
    before their bucket does. They start in their order, which is the same on all ranks.
    """

    def __init__(self, names: Mapping[int, str], *, owes: bool) -> None:
        self._names = names
        self.owes, self.planned = owes, False
        self.groups: tuple[Names, ...] = ()
        self._own_passes = 0  # of this process
        self._seen: list[Names] = []
        self._waiting: list[_Group] = []  # in their order
        self._open: dict[str, _Group] = {}
        self._views: dict[str, Tensor] = {}
        self._collected: list[tuple[Names, Tensor]] = []
        self._buffers: list[tuple[Future[Tensor], Tensor]] = []

    def begin(self, step: int) -> None:
        """Pass ``step`` begins; one that was broken off is forgotten."""
        self._seen, self._buffers, self._collected, self._views = [], [], [], {}
        collects = self.planned or (self.owes and (step == 1 or self._own_passes == 0))
        self._waiting = [_Group(names=names) for names in self.groups if collects]
        self._open = {name: group for group in self._waiting for name in group.names}

    def arrive(self, name: str, gradient: Tensor, start: Start) -> None:
        """A gradient of a planned group is there.

        Raises:
            OptionError: a part of it went already.
        """
        if name in self._open[name].parts:
            raise OptionError(
                f"the gradient of '{name}' came in two parts, as with reentrant checkpoints, and 'auto' had "
                "its first part on the way. Take use_reentrant=False, or another method."
            )
        self._open[name].parts[name] = gradient
        self._start_complete(start)

    def take(self, bucket: GradBucket, step: int, start: Start) -> Future[Tensor]:
        """Start what is complete with this bucket of pass ``step``; :meth:`finish` fulfils the future."""
        if bucket.index() == 0 and not (self.planned and self._open):
            self.begin(step)
        names = tuple(self._names[id(each)] for each in bucket.parameters())
        self._seen.append(names)
        if self._open:
            self._collect(names, bucket.gradients(), start)
        else:
            start(names, bucket.buffer())
        future: Future[Tensor] = Future()
        self._buffers.append((future, bucket.buffer()))
        return future

    def finish(self) -> None:
        """All groups have their mean: hand it to DDP."""
        for names, flat in self._collected:
            parts = [self._views[name] for name in names]
            for part, mean in zip(parts, flat.split([each.numel() for each in parts]), strict=True):
                part.copy_(mean.view_as(part))
        for future, buffer in self._buffers:
            future.set_result(buffer)
        if not self.planned and (self._own_passes or not self.groups):
            self.groups = tuple(self._seen)
        self._own_passes += 1
        self._open, self._buffers, self._collected, self._views = {}, [], [], {}

    def _collect(self, names: Names, gradients: Sequence[Tensor], start: Start) -> None:
        for name, gradient in zip(names, gradients, strict=True):
            self._views[name] = gradient
            self._open[name].parts.setdefault(name, gradient)
        self._start_complete(start)

    def _start_complete(self, start: Start) -> None:
        while self._waiting and len(self._waiting[0].parts) == len(self._waiting[0].names):
            group = self._waiting.pop(0)
            flat = torch.cat([group.parts[each].reshape(-1) for each in group.names])
            self._collected.append((group.names, flat))
            start(group.names, flat)


def in_bucket_order(parameter: Tensor) -> Tensor:
    """Its gradient in one dimension, as DDP lays it in a bucket: in the order of the parameter's memory.

    So it is where that memory has no gaps, as in channels_last; else it is in the order of the dimensions.
    """
    gradient: Any = parameter.grad
    dims = sorted(range(parameter.dim()), key=parameter.stride, reverse=True)
    if parameter.permute(dims).is_contiguous():
        gradient = gradient.permute(dims)
    flat: Tensor = gradient.reshape(-1)
    return flat


def hook_of(take: Callable[[Any], Future[Tensor]]) -> Callable[..., Future[Tensor]]:
    """What DDP registers: it asks for an argument called ``bucket``, and for these very annotations."""

    def compress(state: object, bucket: Any) -> Any:
        return take(bucket)

    compress.__annotations__ = {"bucket": GradBucket, "return": torch.futures.Future[torch.Tensor]}
    return compress

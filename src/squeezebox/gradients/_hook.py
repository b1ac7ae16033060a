"""DistributedDataParallel's hook: buckets come in, groups of parameters go out, in one order on all ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import GradBucket

from squeezebox.gradients._residuals import Names

Start = Callable[[Names, Tensor], None]
Future = torch.futures.Future


@dataclass(kw_only=True, slots=True)
class _Group:
    """Parameters that go together, and what of their gradients has come."""

    names: Names
    parts: dict[str, Tensor]


class Buckets:
    """Turns DDP's buckets into groups of parameters.

    A group is a bucket. But DDP rebuilds its buckets after a process's first backward, in the order in which
    gradients came. So a process's first pass, and the second one of all, collect the ``groups`` of the pass
    before: a resumed training then goes on to the bit as if it had not stopped. Where nothing is owed
    (``owes`` is False) groups are DDP's buckets in every pass, which keeps its order of sums.
    """

    def __init__(self, names: Mapping[int, str], *, owes: bool) -> None:
        self._names, self._owes = names, owes
        self.groups: tuple[Names, ...] = ()
        self._own_passes = 0  # of this process
        self._seen: list[Names] = []
        self._open: dict[str, _Group] = {}
        self._scattered: list[tuple[Tensor, list[Tensor]]] = []
        self._buffers: list[tuple[Future[Tensor], Tensor]] = []

    def take(self, bucket: GradBucket, step: int, start: Start) -> Future[Tensor]:
        """Start what is complete with this bucket of pass ``step``; :meth:`finish` fulfils the future."""
        if bucket.index() == 0:
            self._begin(collects=self._owes and (step == 1 or self._own_passes == 0))
        names = tuple(self._names[id(each)] for each in bucket.parameters())
        self._seen.append(names)
        if not self._open or names in self.groups:
            start(names, bucket.buffer())
        else:
            self._collect(names, bucket.gradients(), start)
        future: Future[Tensor] = Future()
        self._buffers.append((future, bucket.buffer()))
        return future

    def finish(self) -> None:
        """All groups have their mean: hand it to DDP."""
        for flat, parts in self._scattered:
            for part, mean in zip(parts, flat.split([each.numel() for each in parts]), strict=True):
                part.copy_(mean.view_as(part))
        for future, buffer in self._buffers:
            future.set_result(buffer)
        self._buffers, self._scattered = [], []
        if self._own_passes or not self.groups:
            self.groups = tuple(self._seen)
        self._own_passes += 1

    def _begin(self, *, collects: bool) -> None:
        self._seen, self._buffers, self._scattered = [], [], []
        groups = [_Group(names=names, parts={}) for names in self.groups if collects]
        self._open = {name: group for group in groups for name in group.names}

    def _collect(self, names: Names, gradients: Sequence[Tensor], start: Start) -> None:
        for name, gradient in zip(names, gradients, strict=True):
            group = self._open[name]
            group.parts[name] = gradient
            if len(group.parts) == len(group.names):
                parts = [group.parts[each] for each in group.names]
                flat = torch.cat([part.reshape(-1) for part in parts])
                self._scattered.append((flat, parts))
                start(group.names, flat)


def hook_of(take: Callable[[Any], Future[Tensor]]) -> Callable[..., Future[Tensor]]:
    """What DDP registers: it asks for an argument called ``bucket``, and for these very annotations."""

    def compress(state: object, bucket: Any) -> Any:
        return take(bucket)

    compress.__annotations__ = {"bucket": GradBucket, "return": torch.futures.Future[torch.Tensor]}
    return compress

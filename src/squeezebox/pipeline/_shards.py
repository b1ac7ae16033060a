"""A rank's weights where replicas share them: each keeps a part, and has a stage whole while it works at it.

Weights, gradients and the optimizer's state lie side by side in flat buffers, of which each of R replicas
keeps 1/R. A stage's weights are gathered when a rank comes to it, and its gradients are summed and scattered
when it leaves. In Breadth-First's order that is once a batch (arXiv:2211.05953), as a stage takes the whole
batch before the next one.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from squeezebox.memory import freed_returned
from squeezebox.pipeline._health import Health, await_until
from squeezebox.pipeline._weights import Flat, Weights
from squeezebox.schedules import Sharing
from squeezebox.schema import OptionError

# Those whose step of an element depends on others, which another replica may keep.
_ENTANGLED = ("Adafactor", "LBFGS", "Muon")


class _Region(NamedTuple):
    """Where a rank's part of a stage's tensors of one dtype lies in what it keeps."""

    dtype: torch.dtype
    first: int
    end: int

    def of(self, flat: Flat) -> Tensor:
        """It, not copied."""
        return next(part for part in flat.parts if part.dtype == self.dtype)[self.first : self.end]


@dataclass(frozen=True, slots=True, eq=False)
class _Stage:
    """A stage's parameters side by side, with memory only while they are gathered."""

    parameters: list[nn.Parameter]
    whole: Flat
    regions: list[_Region] = field(default_factory=list)


class Shards:
    """The parameters of a rank's stages, in versions as :class:`Weights` has them, shared with replicas.

    Args:
        stages: trained parameters of this rank's stages.
        names: the model's, by a parameter's id.
        value_of: has a parameter's first values; the first replica's count.
        group: of the replicas.
        health: notes what is waited for.
        patience: the longest of these, in seconds.
    """

    def __init__(
        self,
        stages: Mapping[int, Sequence[nn.Parameter]],
        names: Mapping[int, str],
        value_of: Callable[[Tensor], Tensor],
        group: dist.ProcessGroup,
        health: Health,
        patience: float,
    ) -> None:
        self._group, self._health, self._patience = group, health, patience
        self._freed_returned = contextlib.ExitStack()
        self._freed_returned.enter_context(freed_returned())
        self._slices: dict[int, nn.Parameter] = {}  # by a parameter's id; not all have elements here
        self._spans: dict[int, slice] = {}  # where they begin and end in the parameter
        self._names = names
        self._stages: dict[int, _Stage] = {}
        kept: list[nn.Parameter] = []
        ends: dict[torch.dtype, int] = {}
        for number, parameters in stages.items():
            self._stages[number] = stage = _Stage(list(parameters), Flat(parameters, group.size()))
            for parameter, view in zip(parameters, stage.whole.views, strict=True):
                view.copy_(value_of(parameter))
                parameter.data = view
            for part in stage.whole.parts:
                self._finish(dist.broadcast(part, group=group, group_src=0, async_op=True), "first weights")
                first = ends.get(part.dtype, 0)
                ends[part.dtype] = first + part.numel() // group.size()
                stage.regions.append(_Region(part.dtype, first, ends[part.dtype]))
                kept += self._parts_of(stage, part)
            _free(stage.whole)
        known = {id(own): names[parameter] for parameter, own in self._slices.items()}
        self.kept = Weights(kept, {id(each): known.get(id(each), "") for each in kept}, Tensor.detach)
        self._selected: tuple[int, int] | None = None  # version and stage
        self._gradients: Flat | None = None  # the selected stage's, whole
        self._into: Flat | None = None
        self.gathers = self.gathered_bytes = self.reductions = self.reduced_bytes = 0

    @property
    def versions(self) -> Mapping[int, Flat]:
        """What this rank keeps of each."""
        return self.kept.versions

    @property
    def newest(self) -> int:
        """How many updates the newest version has seen."""
        return self.kept.newest

    def shared(self) -> Sharing:
        """What has been gathered and scattered so far."""
        return Sharing(
            gathers=self.gathers,
            gathered_bytes=self.gathered_bytes,
            reductions=self.reductions,
            reduced_bytes=self.reduced_bytes,
        )

    def close(self) -> None:
        """Freed memory need not go back to the system any more."""
        self._freed_returned.close()

    def select(self, version: int, stage: int, *, backward: bool = False) -> None:
        """Have a stage's parameters whole in this version, and in backward room for their gradients."""
        if self._selected != (version, stage):
            self.leave()
            self._gather(self.kept.versions[version], self._stages[stage])
            self._selected = version, stage
        if backward and self._gradients is None:
            parameters = self._stages[stage].parameters
            self._gradients = Flat(parameters, self._group.size())
            for parameter, view in zip(parameters, self._gradients.views, strict=True):
                parameter.grad = view

    def accumulate_into(self, gradients: Flat) -> None:
        """Let means over replicas of this rank's part of the gradients be added up there."""
        self._into = gradients

    def leave(self) -> None:
        """Keep this rank's part of the stage that was selected, and scatter its gradients."""
        if self._selected is None:
            return
        stage, self._selected = self._stages[self._selected[1]], None
        _free(stage.whole)  # before what is scattered needs room
        if self._gradients is not None:
            self._scatter(stage, self._gradients)
            _free(self._gradients)  # though the process group may hold it for a moment
            self._gradients = None

    def hand_over(self, optimizer: torch.optim.Optimizer) -> None:
        """Let an optimizer of the whole model step what this rank keeps.

        Raises:
            OptionError: its steps of an element need others, or it has made steps already.
        """
        name = type(optimizer).__name__
        if name in _ENTANGLED:
            raise OptionError(
                f"{name} needs whole parameters, and with shard=True replicas keep parts of them. Take an "
                "optimizer that steps each element by itself, such as AdamW, or leave shard= out."
            )
        if any(self._slices.get(id(parameter)) is not None for parameter in optimizer.state):
            raise OptionError("shard=True is for a new optimizer, and this one has state. Make another one.")
        for group in optimizer.param_groups:
            slices = (self._slices.get(id(parameter)) for parameter in group["params"])
            group["params"] = [each for each in slices if each is not None]
        self.kept.hand_over(optimizer)

    def parameters(self) -> dict[str, nn.Parameter]:
        """All that replicas share, by their names."""
        return {self._names[id(each)]: each for stage in self._stages.values() for each in stage.parameters}

    def assembled(self, kept: Flat) -> dict[str, Tensor]:
        """Whole tensors out of all replicas' parts, each of them at one replica, by parameters' names."""
        self.leave()
        found, numbers = {}, itertools.count()
        for stage in self._stages.values():
            self._gather(kept, stage)
            for parameter, view in zip(stage.parameters, stage.whole.views, strict=True):
                if next(numbers) % self._group.size() == self._group.rank():
                    found[self._names[id(parameter)]] = view.clone()
            _free(stage.whole)
        return found

    def part_of(self, parameter: nn.Parameter, values: Tensor) -> Tensor:
        """This rank's part of values for all of a parameter; none if it keeps nothing of that."""
        dense = Flat([parameter])
        dense.views[0].copy_(values)
        return dense.parts[0][self._spans.get(id(parameter), slice(0))].clone()

    def of_all(self, value: Any) -> list[Any]:
        """Every replica's plain values."""
        values: list[Any] = [None] * self._group.size()
        dist.all_gather_object(values, value, group=self._group)
        return values

    def _parts_of(self, stage: _Stage, part: Tensor) -> Iterator[nn.Parameter]:
        """This rank's share of each parameter in one of a stage's flat tensors, and of what fills it up."""
        share = part.numel() // self._group.size()
        first, end = self._group.rank() * share, (self._group.rank() + 1) * share
        offset = 0
        for parameter, view in zip(stage.parameters, stage.whole.views, strict=True):
            if parameter.dtype == part.dtype:
                span = slice(max(first - offset, 0), max(min(end - offset, view.numel()), 0))
                own = part[offset : offset + view.numel()][span]
                offset += view.numel()
                if own.numel():
                    self._spans[id(parameter)] = span
                    self._slices[id(parameter)] = nn.Parameter(own.clone())
                    yield self._slices[id(parameter)]
        if offset < end:
            yield nn.Parameter(torch.zeros_like(part[max(offset, first) : end]))

    def _gather(self, kept: Flat, stage: _Stage) -> None:
        _room(stage.whole)
        for part, region in zip(stage.whole.parts, stage.regions, strict=True):
            own = region.of(kept)
            # PyTorch has renamed these two, and warns of the earlier names.
            gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
            self._finish(gather(part, own, group=self._group, async_op=True), "weights")
            self.gathered_bytes += part.nbytes - own.nbytes
        self.gathers += 1

    def _scatter(self, stage: _Stage, gradients: Flat) -> None:
        assert self._into is not None
        for part, region in zip(gradients.parts, stage.regions, strict=True):
            into = region.of(self._into)
            # Gloo's reduce-scatter sends as much as an all-reduce, and this the half of it.
            given = torch.empty_like(part)
            self._finish(dist.all_to_all_single(given, part, group=self._group, async_op=True), "gradients")
            first, *others = given.chunk(self._group.size())
            for other in others:
                first += other
            into += first.div_(self._group.size())
            given.untyped_storage().resize_(0)
            self.reduced_bytes += part.nbytes - into.nbytes
        self.reductions += 1
        for parameter in stage.parameters:
            parameter.grad = None

    def _finish(self, work: Any, what: str) -> None:
        self._health.waits(f"waits for the other replicas' {what}", dist.get_rank())
        if dist.get_backend(self._group) == "gloo":
            work.wait(timedelta(seconds=self._patience))
        else:
            await_until(work.is_completed, self._patience)
            work.wait()
        self._health.resumes()


def _free(whole: Flat) -> None:
    """Give a flat tensor's memory back. Views stay, and so does what autograd has noted of them."""
    for part in whole.parts:
        part.untyped_storage().resize_(0)


def _room(whole: Flat) -> None:
    """Take memory for it again."""
    for part in whole.parts:
        part.untyped_storage().resize_(part.nbytes)

"""A rank's weights where replicas share them: each keeps a part, and has a stage whole while it works at it.

Weights, gradients and the optimizer's state lie side by side in flat buffers, of which each of R replicas
keeps 1/R. A stage's weights are gathered when a rank comes to it, and its gradients are summed and scattered
when it leaves, all in room for the largest stage. In Breadth-First's order that is once a batch
(arXiv:2211.05953), as a stage takes the whole batch before the next one.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from squeezebox.pipeline._health import Health, await_until
from squeezebox.pipeline._weights import Flat, Weights, aligned, sizes
from squeezebox.schedules import Sharing
from squeezebox.schema import OptionError

# Of torch's, those whose step of an element depends on no others, which another replica may keep.
_ELEMENTWISE = (
    torch.optim.SGD, torch.optim.ASGD, torch.optim.Adadelta, torch.optim.Adam, torch.optim.AdamW,
    torch.optim.Adamax, torch.optim.NAdam, torch.optim.RAdam, torch.optim.RMSprop, torch.optim.Rprop,
)  # fmt: skip
_ENTANGLED = ("Adafactor", "LBFGS", "Muon")


def steps_elements(optimizer: torch.optim.Optimizer) -> bool:
    """Whether its step of an element is known to need no others, so that replicas may keep parts."""
    return isinstance(optimizer, _ELEMENTWISE)


def check_elements(optimizer: torch.optim.Optimizer, *, is_asked: bool) -> None:
    """Refuse an optimizer whose step of an element may need others.

    ``is_asked``: it is the caller who wants shards, and not a plan, so an unknown one is taken.

    Raises:
        OptionError: says what to do.
    """
    name = type(optimizer).__name__
    if name in _ENTANGLED or not (is_asked or steps_elements(optimizer)):
        unless = "" if name in _ENTANGLED else f" If {name} does so, give shard=True."
        raise OptionError(
            f"{name} may need whole parameters, and replicas that share them keep parts. Take an optimizer "
            f"that steps each element by itself, such as AdamW, or give shard=False.{unless}"
        )


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
    """A stage's parameters side by side, and the gradients of those, while the rank works at it."""

    parameters: list[nn.Parameter]
    whole: Flat
    gradients: Flat
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
        self._room, self._room_of_gradients = (_room_for(stages.values(), group.size()) for _ in range(2))
        self._slices: dict[int, nn.Parameter] = {}  # by a parameter's id; not all have elements here
        self._spans: dict[int, slice] = {}  # where they begin and end in the parameter
        self._names = names
        self._stages: dict[int, _Stage] = {}
        kept: list[nn.Parameter] = []
        ends: dict[torch.dtype, int] = {}
        for number, parameters in stages.items():
            self._stages[number] = stage = _Stage(
                parameters=list(parameters),
                whole=Flat(parameters, group.size(), self._room),
                gradients=Flat(parameters, group.size(), self._room_of_gradients),
            )
            for parameter, view in zip(parameters, stage.whole.views, strict=True):
                view.copy_(value_of(parameter))
                parameter.data = view
            for part in stage.whole.parts:
                self._finish(dist.broadcast(part, group=group, group_src=0, async_op=True), "first weights")
                first = ends.get(part.dtype, 0)
                ends[part.dtype] = first + part.numel() // group.size()
                stage.regions.append(_Region(part.dtype, first, ends[part.dtype]))
                kept += self._parts_of(stage, part)
        self._free()
        known = {id(own): names[parameter] for parameter, own in self._slices.items()}
        self.kept = Weights(kept, {id(each): known.get(id(each), "") for each in kept}, Tensor.detach)
        self._selected: tuple[int, int] | None = None  # version and stage
        self._has_gradients = False  # the selected stage
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

    def select(self, version: int, stage: int, *, backward: bool = False) -> None:
        """Have a stage's parameters whole in this version, and in backward room for their gradients."""
        if self._selected != (version, stage):
            self._change()
            self._gather(self.kept.versions[version], self._stages[stage])
            self._selected = version, stage
        if backward and not self._has_gradients:
            self._has_gradients, own = True, self._stages[stage]
            _fill(self._room_of_gradients)
            own.gradients.zero_()
            for parameter, view in zip(own.parameters, own.gradients.views, strict=True):
                parameter.grad = view

    def accumulate_into(self, gradients: Flat) -> None:
        """Let means over replicas of this rank's part of the gradients be added up there."""
        self._into = gradients

    def leave(self) -> None:
        """Keep this rank's part of the stage that was selected, and scatter its gradients."""
        self._change()
        self._free()

    def _change(self) -> None:
        if self._selected is None:
            return
        stage, self._selected = self._stages[self._selected[1]], None
        if self._has_gradients:
            self._scatter(stage)
            self._has_gradients = False

    def _free(self) -> None:
        """Give the room back. Views stay, and so does what autograd has noted of them."""
        for part in (*self._room.values(), *self._room_of_gradients.values()):
            part.untyped_storage().resize_(0)

    def hand_over(self, optimizer: torch.optim.Optimizer) -> None:
        """Let an optimizer of the whole model step what this rank keeps.

        Raises:
            OptionError: it has state already.
        """
        if any(self._slices.get(id(parameter)) is not None for parameter in optimizer.state):
            raise OptionError(
                f"with shard=True an optimizer must be new, and {type(optimizer).__name__} has state. Make "
                "another one, or give shard=False where that too begins with state, as Adagrad does."
            )
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
        self._free()
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
                offset += aligned(parameter)
                if own.numel():
                    self._spans[id(parameter)] = span
                    self._slices[id(parameter)] = nn.Parameter(own.clone())
                    yield self._slices[id(parameter)]
        if offset < end:
            yield nn.Parameter(torch.zeros_like(part[max(offset, first) : end]))

    def _gather(self, kept: Flat, stage: _Stage) -> None:
        _fill(self._room)
        for part, region in zip(stage.whole.parts, stage.regions, strict=True):
            own = region.of(kept)
            for work in self._gathering(part, own):
                self._finish(work, "weights")
            self.gathered_bytes += part.nbytes - own.nbytes
        self.gathers += 1

    def _gathering(self, part: Tensor, own: Tensor) -> list[Any]:
        if dist.get_backend(self._group) != "gloo":
            # PyTorch has renamed these two, and warns of the earlier names.
            gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
            return [gather(part, own, group=self._group, async_op=True)]
        # Gloo's own takes several times as long for some ten MiB, since it goes through memory of its own.
        parts, rank, works = part.chunk(self._group.size()), self._group.rank(), list[Any]()
        parts[rank].copy_(own)
        for other in (each for each in range(len(parts)) if each != rank):
            peer = dist.get_global_rank(self._group, other)
            both = (dist.isend, own), (dist.irecv, parts[other])
            for call, tensor in both if rank < other else both[::-1]:  # pair by pair, as all ranks do
                works.append(call(tensor, peer, group=self._group))
        return works

    def _scatter(self, stage: _Stage) -> None:
        assert self._into is not None
        for part, given, region in zip(stage.gradients.parts, stage.whole.parts, stage.regions, strict=True):
            into = region.of(self._into)
            # Gloo's reduce-scatter sends as much as an all-reduce, and this the half of it.
            self._finish(dist.all_to_all_single(given, part, group=self._group, async_op=True), "gradients")
            first, *others = given.chunk(self._group.size())
            for other in others:
                first += other
            into += first.div_(self._group.size())
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


def _room_for(stages: Collection[Sequence[nn.Parameter]], multiple: int) -> dict[torch.dtype, Tensor]:
    """A flat tensor of each dtype, as long as the largest stage's."""
    largest: dict[torch.dtype, int] = {}
    for parameters in stages:
        for dtype, size in sizes(parameters, multiple).items():
            largest[dtype] = max(largest.get(dtype, 0), size)
    device = next((each.device for parameters in stages for each in parameters), None)
    return {dtype: torch.zeros(size, dtype=dtype, device=device) for dtype, size in largest.items()}


def _fill(room: Mapping[torch.dtype, Tensor]) -> None:
    """Take memory for it, unless that is there."""
    for part in room.values():
        if not part.untyped_storage().nbytes():
            part.untyped_storage().resize_(part.nbytes)

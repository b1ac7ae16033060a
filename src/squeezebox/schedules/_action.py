"""What a pipeline's ranks do, in which order."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum

from squeezebox.schema import PlanError


class Kind(Enum):
    """What is done to a microbatch, or to a stage's weights."""

    FORWARD = "F"
    BACKWARD = "B"
    INPUT = "I"
    """The part of backward that the stage before waits for: the gradient of the stage's input."""
    WEIGHT = "W"
    """The rest of backward: the gradients of the stage's weights."""
    UPDATE = "U"
    """The optimizer's step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Action:
    """One thing that a rank does.

    ``microbatch`` counts on from batch to batch; of an update it is the number of the stage's updates before.
    ``version`` is the number of updates in the weights that are read; an update makes version
    ``microbatch + 1``.
    """

    kind: Kind
    stage: int
    microbatch: int
    version: int = 0

    def __str__(self) -> str:
        return f"{self.stage}{self.kind.value}{self.microbatch}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    """Every rank's actions in order.

    ``placement`` has the first rank of each stage, ``microbatches`` are those of one batch. ``orders`` end
    after ``batches``; ``turns(rank, first)`` goes on without end, from batch ``first`` in empty pipelines.
    ``replicas`` are the ranks of each stage, which take microbatches in turn, ``updates`` those that a stage
    makes in a batch; empty: one each.
    """

    name: str
    placement: tuple[int, ...]
    microbatches: int
    batches: int
    orders: tuple[tuple[Action, ...], ...]
    replicas: tuple[int, ...] = ()
    updates: tuple[int, ...] = ()
    turns: Callable[[int, int], Iterator[Action]] | None = field(default=None, compare=False, repr=False)

    def batch_of(self, action: Action) -> int:
        """The batch that an action is for."""
        is_update = action.kind is Kind.UPDATE
        return action.microbatch // (self.updates_of(action.stage) if is_update else self.microbatches)

    def updates_of(self, stage: int) -> int:
        """How many updates a stage makes in a batch."""
        return self.updates[stage] if self.updates else 1

    def ranks_of(self, stage: int) -> range:
        """The ranks that hold a stage."""
        first = self.placement[stage]
        return range(first, first + (self.replicas[stage] if self.replicas else 1))

    def stages_of(self, rank: int) -> list[int]:
        """The stages that a rank holds."""
        return [stage for stage in range(self.num_stages) if rank in self.ranks_of(stage)]

    def rank_of(self, stage: int, microbatch: int) -> int:
        """The rank that takes a microbatch at a stage, forwards and backwards."""
        ranks = self.ranks_of(stage)
        return ranks[microbatch % len(ranks)]

    def to_csv(self) -> str:
        """One batch's passes as torch.distributed.pipelining reads them ("compute_only"), a line a rank.

        Raises:
            PlanError: the schedule does not flush after each batch, which that runtime always does.
        """
        first = []
        for order in self.orders:
            passes = [action for action in order if action.kind is not Kind.UPDATE]
            late = [each for each in passes if each.version != each.microbatch // self.microbatches]
            if late:
                raise PlanError(
                    f"schedule '{self.name}' cannot be exported: {late[0]} reads the weights after "
                    f"{late[0].version} updates, and torch.distributed.pipelining flushes after each batch. "
                    "Export a schedule that flushes too, such as one_f_one_b()."
                )
            first.append(",".join(str(each) for each in passes if each.microbatch < self.microbatches))
        return "\n".join(first) + "\n"

    @property
    def num_ranks(self) -> int:
        """How many ranks there are."""
        return len(self.orders)

    @property
    def num_stages(self) -> int:
        """How many stages the model is cut into."""
        return len(self.placement)

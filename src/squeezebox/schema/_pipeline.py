"""A model cut into blocks, what they cost, and which ranks hold which of them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from squeezebox.schema._errors import FormatError
from squeezebox.schema._files import checked, load_json, plain_fields, save_json

_VERSION = 5
_AGAIN = "'squeezebox pipeline plan' or squeezebox.plan_pipeline(...)[0].save(path)"


@dataclass(frozen=True, kw_only=True, slots=True)
class Holding:
    """One way for a block to hold what a microbatch's forward saves, as measured on this machine.

    ``policy`` is "keep", "compress" or "recompute". ``saved_bytes`` stay from forward to backward, its output
    included and what it was given not; ``working_bytes`` come on top of what is there after its forward,
    while its forward or its backward runs. Where backward is taken in two parts, ``pending_bytes`` stay on
    top of the saved ones from the first, which gives gradients of inputs, to the second. The seconds are a
    microbatch's.
    """

    policy: str
    saved_bytes: int
    working_bytes: int
    forward_seconds: float
    backward_seconds: float
    pending_bytes: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """A piece of the model that no pipeline cuts further.

    ``output_bytes`` is what a microbatch hands to the next block; ``parameter_bytes`` are trained, and
    ``state_bytes`` the optimizer's state of them; ``frozen_bytes`` are parameters that are not trained.
    """

    name: str
    parameter_bytes: int
    state_bytes: int
    output_bytes: int
    holdings: tuple[Holding, ...]
    frozen_bytes: int = 0

    def holding(self, policy: str) -> Holding | None:
        """The way called ``policy``, if there is one."""
        return next((each for each in self.holdings if each.policy == policy), None)


@dataclass(frozen=True, kw_only=True, slots=True)
class Link:
    """What carries tensors between ranks: bytes a second, and seconds a message takes at least."""

    bytes_per_second: float
    latency_seconds: float = 0.0

    def seconds(self, nbytes: int) -> float:
        """How long a message takes."""
        return self.latency_seconds + nbytes / self.bytes_per_second


@dataclass(frozen=True, kw_only=True, slots=True)
class PipelineProfile:
    """A model's blocks in their order, for microbatches of ``microbatch`` samples."""

    microbatch: int
    blocks: tuple[Block, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class StagePlan:
    """A stage: blocks ``first`` up to ``end``, and how they hold what they save.

    The seconds are a microbatch's; the peak is of the stage alone, in a batch in full swing. Where a rank
    has several stages, it holds less than their sum: they are not full at the same time. A stage that
    compresses has the ``bounds`` of its tensors' errors, by their keys in a session of the stage.
    ``replicas`` are the ranks of a pipeline that hold it, and take microbatches in turn.
    """

    first: int
    end: int
    policy: str
    forward_seconds: float
    backward_seconds: float
    peak_bytes: int
    bounds: Mapping[str, float] = field(default_factory=dict)
    replicas: int = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class InputForm:
    """One sample of a model's input: its shape, without the batch's dimension, and torch's dtype by name.

    ``name`` is the keyword by which the model takes it, "" if it takes it by place.
    """

    shape: tuple[int, ...]
    dtype: str
    name: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class PipelinePlan:
    """Which blocks make which stage, and how a batch goes through them.

    Stage s is at rank ``s % ranks`` of each of ``replicas`` equal pipelines, or in zb-v stages go to the last
    rank and back, so a microbatch passes a rank ``len(stages) // ranks`` times. Or stages have replicas of
    their own, on ranks that follow each other, and there is one pipeline. A batch is ``replicas *
    microbatches`` microbatches of ``microbatch`` samples each, ``inputs`` are the forms of these.
    ``schedule`` is a name in ``squeezebox.schedules.PUBLISHED``; ``seconds`` is a batch's,
    ``rank_peak_bytes`` are each rank's. ``noise`` is what the bounds of all blocks allow together.
    ``fingerprint`` and ``blocks`` (their names) are the model's; ``model`` and ``loss`` say, as
    MODULE:CALLABLE, where it came from, if that is known.
    Where replicas ``shard``, each keeps a part of weights, gradients and the optimizer's state.
    Where devices are unequal, ``devices`` are those of the pipeline's ranks by name, and ``processes`` the
    ranks in torch.distributed; else both are empty, and a rank's process has its number.
    """

    schedule: str
    ranks: int
    replicas: int
    microbatch: int
    microbatches: int
    stages: tuple[StagePlan, ...]
    seconds: float
    inputs: tuple[InputForm, ...] = ()
    noise: float = 0.0
    rank_peak_bytes: tuple[int, ...] = ()
    fingerprint: str = ""
    blocks: tuple[str, ...] = ()
    model: str = ""
    loss: str = ""
    devices: tuple[str, ...] = ()
    processes: tuple[int, ...] = ()
    shard: bool = False

    @property
    def stage_replicas(self) -> tuple[int, ...]:
        """The ranks of each stage, where one has several; else empty."""
        found = tuple(stage.replicas for stage in self.stages)
        return found if max(found, default=1) > 1 else ()

    def ranks_of(self, stage: int) -> range:
        """The ranks of each pipeline that hold a stage."""
        replicas, (loop, first) = self.stage_replicas, divmod(stage, self.ranks)
        if replicas:
            first = sum(replicas[:stage])
        elif self.schedule == "zb-v" and loop % 2:
            first = self.ranks - 1 - first
        return range(first, first + self.stages[stage].replicas)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as written by :meth:`save`."""
        return {"version": _VERSION, **plain_fields(self)}

    @classmethod
    def from_dict(cls, values: Any, where: str = "") -> PipelinePlan:
        """The plan of such values; FormatError names the field that is wrong, which lies at ``where``."""
        version = values.get("version") if isinstance(values, dict) else None
        if version != _VERSION:
            raise FormatError(f"its version is {version!r}, and this Squeezebox reads {_VERSION}")
        return cls(**checked(cls, values, where, besides=["version"]))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan whole or not at all; OutputError if the path cannot be written."""
        save_json(path, self.to_dict())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> PipelinePlan:
        """What :meth:`save` wrote; FormatError if the file is missing, damaged, or of another version."""
        return load_json(path, "pipeline plan", _AGAIN, cls.from_dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class StageMemory:
    """What a stage holds at its peak, in a batch in full swing.

    ``weights_bytes`` are all versions of the parameters, ``activation_bytes`` what all microbatches in flight
    have been given and have saved, ``buffer_bytes`` one more activation and two gradients that are received
    (one more than are pending, where backward is in two parts), and one gradient on its way out;
    ``working_bytes`` come on top at the stage's most demanding block, less what its later blocks have given
    back by then. Where replicas keep a part each, ``gathered_bytes`` are the stage's weights and gradients,
    whole while the rank works at it, in room for the largest of its stages.
    """

    weights_bytes: int
    gradient_bytes: int
    state_bytes: int
    activation_bytes: int
    buffer_bytes: int
    working_bytes: int
    gathered_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        """All of it."""
        held = self.weights_bytes + self.gradient_bytes + self.state_bytes
        return held + self.activation_bytes + self.buffer_bytes + self.working_bytes + self.gathered_bytes

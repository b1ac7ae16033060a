"""What of a rank goes into a checkpoint by the names of parameters, and comes back under any split."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from squeezebox.pipeline._checkpoint import Checkpoint, packed, unpacked
from squeezebox.pipeline._data import Reader, random_state, restore_random_state
from squeezebox.pipeline._links import Wires
from squeezebox.pipeline._setup import Place
from squeezebox.pipeline._stage import Stage
from squeezebox.pipeline._updates import Updates
from squeezebox.pipeline._weights import Flat, Weights
from squeezebox.schema import FormatError, PipelinePlan, PipelineWarning

_FORMAT = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class State:
    """All of a rank that training changes."""

    model: nn.Module
    plan: PipelinePlan
    place: Place
    stages: Mapping[int, Stage]
    weights: Weights
    updates: Updates
    reader: Reader
    wires: Wires

    def saved(self, batch: int) -> dict[str, Any]:
        """What goes into a checkpoint, with nothing under way, in nested dicts.

        ``model`` and ``optim`` are as torch.distributed.checkpoint.state_dict has them; ``versions`` are
        earlier weights, and ``ranks`` what is a rank's alone.
        """
        about = {"format": _FORMAT, "split": self._split(), "optimizer": self.updates.about()}
        own = {"random": random_states(), "links": self.wires.state()}
        newest = self.weights.newest
        earlier = {  # by the batch, where each has an update
            str(batch - (newest - version)): self._named(flat)
            for version, flat in self.weights.versions.items()
            if version != newest
        }
        return {
            "about": packed(json.dumps(about)),
            "model": self.persistent(),
            "buffers": self._other_buffers(),
            "optim": self.updates.state(),
            "versions": earlier,
            "last_update": self._named(self.updates.last_update),
            "ranks": {str(self.place.number): packed(own)},
            "readers": {str(self.place.replica): packed(self.reader.state())} if self.place.rank == 0 else {},
        }

    def persistent(self) -> dict[str, Tensor]:
        """This rank's part of the model's ``state_dict()``, not copied."""
        own = {id(each) for stage in self.stages.values() for each in (*stage.parameters(), *stage.buffers())}
        named = self.model.state_dict(keep_vars=True)
        return {name: tensor.detach() for name, tensor in named.items() if id(tensor) in own}

    def restore(self, directory: Path, batch: int, restart: Callable[[int], range]) -> None:
        """Go on from a complete checkpoint.

        Args:
            directory: of checkpoints.
            batch: the batches that it has seen.
            restart: prepares a batch, and returns the versions of the weights, from the oldest one that will
                be read to the newest.

        Raises:
            FormatError: it is of another model or optimizer, or damaged.
        """
        checkpoint = Checkpoint(directory, batch)
        split = self._checked(checkpoint)["split"]
        if split == self._split():
            checkpoint = Checkpoint(directory, batch, self.place.number)
        lost = [f"version {each} of the weights" for each in self._read(checkpoint, batch, restart(batch))]
        if split == self._split():
            own = unpacked(checkpoint.nested("ranks", str(self.place.number)))
            restore_random_states(own["random"])
            self.wires.restore(own["links"])
        else:
            self.wires.restore({})
            lost.append("ranks' random states")
        if self.place.rank == 0 and split["replicas"] == self.plan.replicas:
            self.reader.restore(unpacked(checkpoint.nested("readers", str(self.place.replica))))
        elif split["replicas"] != self.plan.replicas:
            lost.append("the place in the data")
        if lost:
            warnings.warn(
                f"{checkpoint.path} was saved by another split, schedule or number of ranks: training goes "
                f"on without {', '.join(lost)}. Weights and the optimizer's state are those that were saved.",
                PipelineWarning,
                stacklevel=3,
            )

    def _checked(self, checkpoint: Checkpoint) -> dict[str, Any]:
        """What a checkpoint says of itself, if it is of this model and optimizer."""
        about: dict[str, Any] = json.loads(unpacked(checkpoint.nested("about")))
        if about["format"] != _FORMAT:
            raise FormatError(
                f"{checkpoint.path} has format {about['format']}, and this Squeezebox reads {_FORMAT}. "
                "Upgrade it."
            )
        saved = checkpoint.forms("model.")
        own = {
            name: (tuple(each.shape), each.dtype)
            for name, each in self.model.state_dict(keep_vars=True).items()
            if isinstance(each, Tensor)
        }
        for name in dict.fromkeys([*own, *saved]):
            if saved.get(name) != own.get(name):
                raise FormatError(
                    f"{checkpoint.path} is of another model: it has {saved.get(name, 'nothing')} for {name}, "
                    f"and this one {own.get(name, 'nothing')}. Resume with the model that was saved."
                )
        if about["optimizer"] != self.updates.about():
            raise FormatError(
                f"{checkpoint.path} is of the optimizer {about['optimizer']}, and this one is "
                f"{self.updates.about()}. Resume with one like that."
            )
        return about

    def _read(self, checkpoint: Checkpoint, batch: int, wanted: range) -> list[int]:
        """Weights, buffers and the optimizer's state; returns versions that are not there."""
        names = self.weights.names

        def room(prefix: str) -> Flat | None:
            is_there = checkpoint.forms(prefix).keys() >= {*names}
            return Flat(self.weights.parameters) if is_there else None

        newest, update = Flat(self.weights.parameters), room("last_update.")
        saved = {version: batch - (wanted[-1] - version) for version in wanted[:-1]}
        earlier = {version: room(f"versions.{saved[version]}.") for version in wanted[:-1]}
        buffers = self._other_buffers()
        there = checkpoint.forms("buffers.")
        checkpoint.read(
            {f"model.{name}": each for name, each in self.persistent().items()}
            | {f"model.{name}": each for name, each in self._named(newest).items()}
            | {f"buffers.{name}": each for name, each in buffers.items() if name in there}
            | {f"last_update.{name}": each for name, each in self._named(update).items()}
            | {
                f"versions.{saved[version]}.{name}": each
                for version, flat in earlier.items()
                for name, each in self._named(flat).items()
            }
        )
        states = checkpoint.nested("optim", "state", only=names)
        self.updates.restore(states, checkpoint.nested("optim", "param_groups"), update)
        versions = {version: flat or newest.copy() for version, flat in earlier.items()}
        self.weights.restore(versions | {wanted[-1]: newest})
        return [version for version, flat in earlier.items() if flat is None]

    def _split(self) -> dict[str, Any]:
        """What must be equal for a rank's own state to be another's."""
        plan = self.plan
        return {
            "schedule": plan.schedule,
            "ranks": plan.ranks,
            "replicas": plan.replicas,
            "microbatch": plan.microbatch,
            "microbatches": plan.microbatches,
            "stages": [[stage.first, stage.end] for stage in plan.stages],
            **({"stage_replicas": [*plan.stage_replicas]} if plan.stage_replicas else {}),
        }

    def _named(self, flat: Flat | None) -> dict[str, Tensor]:
        return {} if flat is None else dict(zip(self.weights.names, flat.views, strict=True))

    def _other_buffers(self) -> dict[str, Tensor]:
        """Those of the stages that the model's ``state_dict()`` leaves out."""
        known = {id(each) for each in self.model.state_dict(keep_vars=True).values()}
        names = {id(each): name for name, each in self.model.named_buffers()}
        return {
            names.get(id(each), f"stage {number}: {name}"): each
            for number, stage in self.stages.items()
            for name, each in stage.named_buffers()
            if id(each) not in known
        }


def random_states() -> dict[str, Any]:
    """Of the host's generators, and of the current device's."""
    device = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None
    return {**random_state(), "device": device}


def restore_random_states(states: Mapping[str, Any]) -> None:
    """Go on where :func:`random_states` was called."""
    restore_random_state(states)
    if states["device"] is not None:
        torch.cuda.set_rng_state(states["device"])

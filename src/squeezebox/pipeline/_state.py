"""What of a rank goes into a checkpoint by the names of parameters, and comes back under any split."""

from __future__ import annotations

import itertools
import json
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from squeezebox.pipeline._checkpoint import Checkpoint, packed, require_whole, unpacked
from squeezebox.pipeline._data import Reader, random_state, restore_random_state
from squeezebox.pipeline._links import Wires
from squeezebox.pipeline._setup import Place
from squeezebox.pipeline._shards import Shards
from squeezebox.pipeline._stage import Stage
from squeezebox.pipeline._updates import Updates
from squeezebox.pipeline._weights import Flat, Weights
from squeezebox.schema import FormatError, PipelinePlan, PipelineWarning

_FORMAT = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class State:
    """All of a rank that training changes, and what no stage has, ``spare``, where the first one is."""

    model: nn.Module
    plan: PipelinePlan
    place: Place
    stages: Mapping[int, Stage]
    spare: Sequence[Tensor]
    weights: Weights
    shards: Shards | None
    updates: Updates
    reader: Reader
    wires: Wires

    def saved(self, batch: int) -> dict[str, Any]:
        """What goes into a checkpoint, with nothing under way, in nested dicts.

        ``model`` and ``optim`` are as torch.distributed.checkpoint.state_dict has them; ``versions`` are
        earlier weights, and ``ranks`` what is a rank's alone.
        """
        about = {"format": _FORMAT, "split": self._split(), "optimizer": self.updates.about()}
        about |= {"shard": True} if self.shards else {}
        optim = self.updates.state()
        own = {"random": random_states(), "links": self.wires.state()}
        newest = self.weights.newest
        earlier = {  # by the batch, where each has an update
            str(batch - (newest - version)): self._named(flat)
            for version, flat in self.weights.versions.items()
            if version != newest
        }
        return {
            "about": packed(json.dumps(about)),
            "model": self.persistent()
            if self.shards is None
            else self._assembled(self.shards, optim["state"]),
            "buffers": self._other_buffers(),
            "optim": optim,
            "versions": earlier,
            "last_update": self._named(self.updates.last_update),
            "ranks": {str(self.place.number): packed(own)},
            "readers": {str(self.place.replica): packed(self.reader.state())} if self.place.rank == 0 else {},
        }

    def persistent(self, stages: Collection[int] | None = None) -> dict[str, Tensor]:
        """This rank's part of the model's ``state_dict()``, or that of some stages, not copied."""
        stages = self.stages if stages is None else stages
        held = [
            (*stage.parameters(), *stage.buffers()) for each, stage in self.stages.items() if each in stages
        ]
        own = {id(each) for tensors in [*held, self.spare if 0 in stages else ()] for each in tensors}
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
        about = self._checked(checkpoint)
        split = about["split"]
        whole = checkpoint
        if split == self._split():
            checkpoint = Checkpoint(directory, batch, self.place.number)
        self._read_buffers(checkpoint)
        wanted = restart(batch)
        if self.shards is not None:
            lost = []
            self._read_shards(whole, self.shards, wanted[-1])
        else:
            weights = whole if "shard" in about else checkpoint
            lost = [f"version {each} of the weights" for each in self._read(weights, batch, wanted)]
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

    def refusal(self, directory: Path, batch: int) -> str:
        """Why this rank does not go on from a complete checkpoint; "" if it can."""
        try:
            self._checked(Checkpoint(directory, batch))
            count = self.place.ranks * self.place.replicas
            require_whole(directory, batch, lambda part: part % count == self.place.number)
        except FormatError as error:
            return str(error)
        return ""

    def _checked(self, checkpoint: Checkpoint) -> dict[str, Any]:
        """What a checkpoint says of itself, if it is of this model and optimizer."""
        saved_about = checkpoint.nested("about")
        if not isinstance(saved_about, Tensor):
            raise FormatError(
                f"{checkpoint.path} was not saved by a runner: it does not say by which split and optimizer. "
                "Name another one, or load its weights into the model before you make the runner."
            )
        about: dict[str, Any] = json.loads(unpacked(saved_about))
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
        """Weights and the optimizer's state; returns versions that are not there."""
        names = self.weights.names

        def room(prefix: str) -> Flat | None:
            is_there = checkpoint.forms(prefix).keys() >= {*names}
            return Flat(self.weights.parameters) if is_there else None

        newest, update = Flat(self.weights.parameters), room("last_update.")
        saved = {version: batch - (wanted[-1] - version) for version in wanted[:-1]}
        earlier = {version: room(f"versions.{saved[version]}.") for version in wanted[:-1]}
        checkpoint.read(
            {f"model.{name}": each for name, each in self._named(newest).items()}
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

    def _read_buffers(self, checkpoint: Checkpoint) -> None:
        """Buffers, and what is not trained."""
        there = checkpoint.forms("buffers.")
        checkpoint.read(
            {f"model.{name}": each for name, each in self._untrained().items()}
            | {f"buffers.{name}": each for name, each in self._other_buffers().items() if name in there}
        )

    def _untrained(self) -> dict[str, Tensor]:
        named = self.model.state_dict(keep_vars=True)
        spare = {*map(id, self.spare)}
        return {
            name: each
            for name, each in self.persistent().items()
            if not named[name].requires_grad or id(named[name]) in spare
        }

    def _assembled(self, shards: Shards, states: dict[str, Any]) -> dict[str, Tensor]:
        """The model's tensors out of all replicas' parts; the same is done to the optimizer's states.

        Each replica has some of the parameters whole, so that none needs room for all.
        """
        model = shards.assembled(self.weights.versions[self.weights.newest])
        names = {id(parameter): name for name, parameter in shards.parameters().items()}
        for name, tensor in self.model.state_dict(keep_vars=True).items():
            if names.get(id(tensor)) in model:
                model[name] = model[names[id(tensor)]]  # a parameter may have several names
        model |= self._untrained()
        of_parts = {
            name: {key for key, value in state.items() if isinstance(value, Tensor) and value.dim()}
            for name, state in states.items()
        }
        single = {
            name: {key: value for key, value in state.items() if key not in of_parts[name]}
            for name, state in states.items()
        }
        parted = {*itertools.chain(*of_parts.values())}
        told = shards.of_all((single, parted))
        whole = {name: dict(state) for each, _ in told for name, state in each.items()}
        for key in sorted({*itertools.chain(*(keys for _, keys in told))}):
            flat = Flat(self.weights.parameters)
            for name, view in zip(self.weights.names, flat.views, strict=True):
                if key in states.get(name, {}):
                    view.copy_(states[name][key])
            for name, tensor in shards.assembled(flat).items():
                whole[name][key] = tensor
        states.clear()
        states.update({name: state for name, state in whole.items() if name in model})
        return model

    def _read_shards(self, checkpoint: Checkpoint, shards: Shards, version: int) -> None:
        """This rank's part of weights and of the optimizer's state, from one parameter after the other."""
        newest, states = Flat(self.weights.parameters), {}
        views = self._named(newest)
        for name, parameter in shards.parameters().items():
            if name not in views:
                continue
            values = torch.empty_like(parameter, device="cpu", memory_format=torch.contiguous_format)
            checkpoint.read({f"model.{name}": values})
            views[name].copy_(shards.part_of(parameter, values))
            saved = checkpoint.nested("optim", "state", only=[name]).get(name, {})
            states[name] = {
                key: shards.part_of(parameter, value) if isinstance(value, Tensor) and value.dim() else value
                for key, value in saved.items()
            }
        self.updates.restore(states, checkpoint.nested("optim", "param_groups"), None)
        shards.leave()
        self.weights.restore({version: newest})

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
            **({"processes": own} if (own := [*plan.processes]) != [*range(len(own))] else {}),
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

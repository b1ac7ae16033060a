"""The channels of a model that may go, from its graph."""

from __future__ import annotations

import itertools
import warnings
from typing import Any

import torch

from squeezebox.capture import compiled_part
from squeezebox.pruning._channels import Channels, Placements
from squeezebox.pruning._graph import Dependencies
from squeezebox.schema import UnsupportedModelError, in_one_line
from squeezebox.steps import restored


def traced(model: torch.nn.Module, inputs: tuple[Any, ...]) -> Placements:
    """Follow the channels from inputs to outputs.

    Raises:
        UnsupportedModelError: the model cannot be followed, and why.
    """
    part = compiled_part(model)
    if part is not None:
        raise UnsupportedModelError(
            f"'{part}' is compiled for the sizes that it has; prune the eager model, and compile it then."
        )
    if type(model).__name__ in ("DistributedDataParallel", "FullyShardedDataParallel", "DataParallel"):
        raise UnsupportedModelError(
            f"{type(model).__name__} has made its buckets for the sizes that parameters have; prune the "
            "module within before you wrap it."
        )
    try:
        with restored(model), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the exporter, about versions to come
            program = torch.export.export(model, inputs, strict=False)
    except Exception as error:  # noqa: BLE001 - whatever the exporter meets in the model's code
        raise UnsupportedModelError(
            f"the model's channels cannot be followed, as torch.export fails on it: "
            f"{in_one_line(error)}. Prune the part of it that exports."
        ) from error
    signature = program.graph_signature
    first = dict[int, str]()  # tied parameters have several names
    tensors = dict(
        itertools.chain(
            *(part(remove_duplicate=False) for part in (model.named_parameters, model.named_buffers))
        )
    )
    for name, tensor in tensors.items():
        first.setdefault(id(tensor), name)
    given = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
    names = {place: first[id(tensors[name])] for place, name in given.items() if name in tensors}
    dependencies = Dependencies(names, {name: tensor.shape for name, tensor in tensors.items()})
    dependencies.follow(list(program.graph.nodes))
    return dependencies.placements


def free_channels(placements: Placements) -> dict[Channels, list[tuple[str, int]]]:
    """Sets of channels that may be narrowed, and where they are.

    Raises:
        UnsupportedModelError: there are none.
    """
    free = placements.free()
    if not free:
        raise UnsupportedModelError(
            "no channels of this model can go: all of them reach its output, a normalisation over channels, "
            "or an operator whose use of them is not known. Convolutions, linear layers and batch "
            "normalisation with elementwise operators between them can be narrowed."
        )
    return free

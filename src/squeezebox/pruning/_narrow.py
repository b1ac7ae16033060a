"""Channels masked, or physically gone: parameters, buffers, gradients, optimizer state, and layers' sizes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from squeezebox.pruning._channels import Channels, Placements

Kept = Mapping[Channels, Tensor]
"""Numbers of the channels that stay, in order, by root."""
_SIZES = {
    nn.Linear: (("out_features", 0), ("in_features", 1)),
    nn.modules.conv._ConvNd: (("out_channels", 0), ("in_channels", 1)),
    nn.modules.conv._ConvTransposeNd: (("in_channels", 0), ("out_channels", 1)),
    nn.modules.batchnorm._NormBase: (("num_features", 0),),
    nn.Embedding: (("embedding_dim", 1),),
}

_OTHER = {torch.float32: torch.float64}


class Narrowing:
    """What of each parameter and buffer stays."""

    def __init__(self, model: nn.Module, placements: Placements, kept: Kept) -> None:
        self._model, self._placements, self.kept = model, placements, kept
        self._tensors: dict[str, Tensor] = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        self.indices: dict[str, dict[int, Tensor]] = {}  # by name and dimension
        for (name, dim), axis in placements.axes.items():
            if any(segment.channels.root() in kept for segment in axis or ()):
                self.indices.setdefault(name, {})[dim] = _elements(axis or (), kept)

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Those that get narrower."""
        return {name: self._tensors[name] for name in self.indices}

    def narrowed(self, name: str, tensor: Tensor) -> Tensor:
        """What stays of a tensor of a parameter's shape."""
        for dim, index in self.indices[name].items():
            tensor = tensor.index_select(dim, index.to(tensor.device))
        return tensor.clone(memory_format=torch.preserve_format)

    @contextlib.contextmanager
    def masked(self) -> Iterator[None]:
        """Channels that go are zero for a while, wherever they are."""
        with torch.no_grad():
            before = {name: tensor.detach().clone() for name, tensor in self.tensors.items()}
            try:
                for name, tensor in self.tensors.items():
                    for dim, index in self.indices[name].items():
                        gone = torch.ones(tensor.shape[dim], dtype=torch.bool)
                        gone[index] = False
                        tensor.index_fill_(dim, gone.nonzero().flatten().to(tensor.device), 0)
                yield
            finally:
                for name, tensor in self.tensors.items():
                    tensor.copy_(before[name])

    def apply(self) -> Callable[[], None]:
        """Narrow parameters and buffers in place; returns what gives them back."""
        before = [(tensor, tensor.detach(), tensor.grad) for tensor in self.tensors.values()]
        sizes = _sizes(self._model)
        for name, tensor in self.tensors.items():
            put(tensor, self.narrowed(name, tensor.detach()))
        set_sizes(self._model, self.tensors.values())

        def undo() -> None:
            for tensor, values, gradient in before:
                put(tensor, values)
                tensor.grad = gradient
            for module, name, size in sizes:
                setattr(module, name, size)

        return undo

    def narrow_state(self, optimizer: torch.optim.Optimizer) -> None:
        """What of a parameter's shape its optimizer keeps for it."""
        for name, tensor in self.tensors.items():
            state = optimizer.state.get(tensor, {})
            for key, value in state.items():
                if isinstance(value, Tensor) and value.shape == self._placements.shapes[name]:
                    state[key] = self.narrowed(name, value)


def save_with(model: nn.Module, names: Iterable[str]) -> None:
    """Buffers that are left out of checkpoints belong there once they are narrow: nothing else has them."""
    for name in names:
        owner, _, own = name.rpartition(".")
        model.get_submodule(owner)._non_persistent_buffers_set.discard(own)


def put(tensor: Tensor, values: Tensor) -> None:
    """Other values of another shape in a tensor that others refer to.

    The graph of the last loss may still hold the node that accumulates this parameter's gradient, by its old
    shape; torch makes a new one only where the dtype changes, so that is changed, and back.
    """
    tensor.grad = None
    if tensor.requires_grad:
        tensor.data = values.new_empty(0, dtype=_OTHER.get(values.dtype, torch.float32))
    tensor.data = values


def _sizes(model: nn.Module) -> list[tuple[nn.Module, str, Any]]:
    """What :func:`set_sizes` may change."""
    names = {"groups", *(name for sizes in _SIZES.values() for name, _ in sizes)}
    layers = [module for module in model.modules() if isinstance(module, tuple(_SIZES))]
    return [(layer, name, vars(layer)[name]) for layer in layers for name in names & vars(layer).keys()]


def set_sizes(model: nn.Module, narrowed: Iterable[Tensor]) -> None:
    """What layers keep of the shapes of those weights and buffers."""
    wanted = {id(tensor) for tensor in narrowed}
    for module in model.modules():
        own = (*module.parameters(recurse=False), *module.buffers(recurse=False))
        if any(id(tensor) in wanted for tensor in own):
            for kind, sizes in _SIZES.items():
                if isinstance(module, kind):
                    _resize(module, getattr(module, "weight", None), sizes)


def _resize(module: nn.Module, weight: Tensor | None, sizes: Iterable[tuple[str, int]]) -> None:
    depthwise = isinstance(module, nn.modules.conv._ConvNd) and module.groups > 1
    for name, dim in sizes:
        size = _features(module) if weight is None else weight.shape[0 if depthwise else dim]
        if size is not None:
            setattr(module, name, size)
    if depthwise and isinstance(weight, Tensor) and weight.shape[1] == 1:
        module.groups = weight.shape[0]  # type: ignore[assignment]


def _features(module: nn.Module) -> int | None:
    """Of a normalisation without weights."""
    mean: Any = getattr(module, "running_mean", None)
    return None if mean is None else len(mean)


def _elements(axis: Iterable[Any], kept: Kept) -> Tensor:
    """Numbers of the elements that stay along a dimension."""
    parts, start = [], 0
    for segment in axis:
        stay = kept.get(segment.channels.root())
        stay = torch.arange(segment.channels.count) if stay is None else stay
        parts.append((start + stay[:, None] * segment.inner + torch.arange(segment.inner)).flatten())
        start += segment.size
    return torch.cat(parts)

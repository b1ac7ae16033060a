"""The values that a model on the meta device begins with: each rank makes or reads those that it holds."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from squeezebox.pipeline._construction import Construction, reset
from squeezebox.pipeline._setup import device_of, own_device
from squeezebox.pipeline._weights import is_stand_in, stand_in
from squeezebox.schema import FormatError, OptionError, UnsupportedModelError


class Initial:
    """Where the values come from that a model's parameters and buffers begin with.

    A model on the meta device is moved to ``device``: its parameters become stand-ins that take no memory,
    and :meth:`of` has what they stand for. Any other model stays where it is, and has its values itself, but
    for parameters that ``weights`` has.

    Args:
        model: on one device, which may be the meta device.
        device: of a model on the meta device (default: this process's CUDA device, or the CPU).
        construction: of a model on the meta device (default: ``reset_parameters()`` of its modules).
        weights: a safetensors file, or a folder of them, with all parameters by their names.

    Raises:
        UnsupportedModelError: nothing says what a parameter or buffer begins with.
        FormatError: ``weights`` cannot be read, or lacks a parameter.
        OptionError: the model is on another device than ``device``.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        device: torch.device | None = None,
        construction: Construction | None = None,
        weights: Path | None = None,
    ) -> None:
        tensors = [*model.parameters(), *model.buffers()]
        self._stands_for: dict[int, Tensor] = {}  # by a stand-in's id
        self._before: list[tuple[Tensor, Tensor]] = []
        self._read = {} if weights is None else _read_from(weights, model)
        self.is_needed = any(tensor.is_meta for tensor in tensors)
        if not self.is_needed:
            if device not in (None, device_of(model)):
                raise OptionError(
                    f"the model is on {device_of(model)}, and device={device} is for one on the meta device. "
                    "Leave it out, or move the model."
                )
            for buffer in model.buffers():
                buffer.data.copy_(self.of(buffer))
            return
        is_read = all(id(tensor) in self._read for tensor in tensors if tensor.is_meta)
        self._construction = construction or (Construction() if is_read else reset(model))
        self._require_values(model)
        device = device or own_device()
        for parameter in model.parameters():
            self._moved(parameter, stand_in(parameter, device))
            self._stands_for[id(parameter)] = self._before[-1][1]
        for buffer in model.buffers():
            self._moved(buffer, self.of(buffer).to(device, buffer.dtype))

    def of(self, tensor: Tensor) -> Tensor:
        """What one of the model's parameters or buffers begins with; may be on another device."""
        if id(tensor) in self._read:
            return self._read[id(tensor)]()
        source = self._stands_for.get(id(tensor), tensor)
        return self._construction.value(source) if source.is_meta else source.detach()

    def fill(self, parameters: Iterable[Tensor]) -> None:
        """Give parameters their values, in place of stand-ins."""
        for parameter in parameters:
            if id(parameter) in self._stands_for or id(parameter) in self._read:
                parameter.data = self.of(parameter).to(parameter.data)

    @contextlib.contextmanager
    def filled(self, module: nn.Module) -> Iterator[None]:
        """A context in which a part of the model has its parameters' values, and no stand-ins."""
        before = [(each, each.data) for each in module.parameters() if id(each) in self._stands_for]
        self.fill(module.parameters())
        try:
            yield
        finally:
            for parameter, there in before:
                parameter.data = there

    def require(self, tensors: Iterable[Tensor], names: Mapping[int, str]) -> None:
        """Refuse parameters that an earlier runner has given up.

        Raises:
            OptionError: names one of them.
        """
        for tensor in tensors:
            known = id(tensor) in self._read or id(tensor) in self._stands_for
            if not known and id(tensor) in names and is_stand_in(tensor):
                raise OptionError(
                    f"{names[id(tensor)]} has no values: an earlier runner of this model has given up what "
                    "its rank did not hold. Make the model again."
                )

    def close(self) -> None:
        """Move the model back to the meta device, if it was there."""
        for tensor, before in self._before:
            _swap(tensor, before)

    def _moved(self, tensor: Tensor, there: Tensor) -> None:
        """Let a tensor be another one, as whatever holds it holds the object."""
        before = there.detach().requires_grad_(tensor.requires_grad)
        _swap(tensor, before)
        self._before.append((tensor, before))

    def _require_values(self, model: nn.Module) -> None:
        for name, tensor in _named(model):
            known = id(tensor) in self._read or self._construction.fills(tensor)
            if tensor.is_meta and not known:
                raise UnsupportedModelError(
                    f"{name} is on the meta device, and nothing says what it begins with: its module has no "
                    "reset_parameters() that writes it. Construct the model in `with Construction() as "
                    "construction:` and pass that, or give parameters by weights=."
                )


def _named(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters and buffers with all of their names."""
    return itertools.chain(
        model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False)
    )


def _swap(one: Tensor, other: Tensor) -> None:
    """As torch.utils.swap_tensors does, which refuses tensors with weak references, such as an LSTM's."""
    torch._C._swap_tensor_impl(one, other)


def _read_from(weights: Path, model: nn.Module) -> dict[int, Callable[[], Tensor]]:
    """What reads a tensor, by the tensor's id; one that several names have may be there by any of them.

    Raises:
        FormatError: a parameter is not there, has another shape, or no file can be read.
    """
    paths = sorted(weights.glob("*.safetensors")) if weights.is_dir() else [weights]
    found = {name: (path, shape) for path in paths for name, shape in _shapes(path)}
    readers: dict[int, Callable[[], Tensor]] = {}
    for name, tensor in _named(model):
        if name in found:
            path, shape = found[name]
            if shape != tuple(tensor.shape):
                raise FormatError(
                    f"{name} has shape {shape} in {path}, and {tuple(tensor.shape)} in the model. Pass the "
                    "model that the file is of."
                )
            readers[id(tensor)] = functools.partial(_tensor, path, name)
    missing = [name for name, each in model.named_parameters() if id(each) not in readers]
    if missing:
        raise FormatError(
            f"{len(missing)} of the model's parameters, such as {missing[0]}, are not among the "
            f"{len(found)} tensors in {weights}. Give all files of this model."
        )
    return readers


def _open(path: Path) -> Any:
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError as error:
        raise OptionError("weights= reads safetensors files: pip install safetensors.") from error
    try:
        return safe_open(path, framework="pt")
    except (OSError, SafetensorError) as error:
        raise FormatError(
            f"{path} is no safetensors file that can be read: {error}. Name another one."
        ) from error


def _shapes(path: Path) -> Iterable[tuple[str, tuple[int, ...]]]:
    with _open(path) as file:
        return [(name, tuple(file.get_slice(name).get_shape())) for name in file.keys()]  # noqa: SIM118


def _tensor(path: Path, name: str) -> Tensor:
    """From a file that is open for this alone, so that no other pages of it stay in memory."""
    with _open(path) as file:
        tensor: Tensor = file.get_tensor(name)
        return tensor

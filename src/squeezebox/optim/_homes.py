"""Where an optimizer's state is between two updates."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch

from squeezebox.memory import Absent, FileTensor, StoredTensor, TensorFile
from squeezebox.optim._coded import CodedTensor, coded
from squeezebox.optim._samples import Sample, UpdateNoise

_MOVED_BYTES = 1 << 12  # smaller tensors of a state, such as its count of steps, stay as they are


class Homes:
    """Memory, a file, or codes of 16 or 8 bits.

    Args:
        optimizer: whose state is meant.
        file: for the state of parameters of these identities.
        in_file: these.
        bits: of the codes, for those of the others that have some.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        file: TensorFile | None,
        in_file: Collection[int],
        bits: Mapping[int, int],
    ) -> None:
        self._optimizer, self._file = optimizer, file
        self._in_file, self._bits = in_file, bits
        self._samples: dict[int, Sample] = {}
        self._keys: dict[int, int] = {}  # of random numbers: the parameters' order
        self.noise = UpdateNoise()

    def __contains__(self, parameter: torch.Tensor) -> bool:
        """Whether its state is elsewhere, or packed."""
        return id(parameter) in self._in_file or id(parameter) in self._bits

    def packs(self, parameter: torch.Tensor) -> bool:
        """Whether its state is held in codes."""
        return id(parameter) in self._bits

    def new(self, parameter: torch.Tensor) -> torch.Tensor:
        """Room for what the first update makes, in memory or in the file."""
        if id(parameter) in self._in_file and self._file is not None:
            return FileTensor(parameter, self._file)
        shape, strides = parameter.shape, parameter.stride()  # a split one's elements are not wanted
        return torch.empty_strided(shape, strides, dtype=parameter.dtype, device=parameter.device)

    def new_codes(self, parameter: torch.Tensor, names: list[str]) -> dict[str, CodedTensor]:
        """The same, packed."""
        key = self._keys.setdefault(id(parameter), len(self._keys))
        return coded(parameter, names, self._bits[id(parameter)], key)

    def sample(self, parameter: torch.Tensor) -> Sample:
        """By which the error of its updates is measured."""
        if id(parameter) not in self._samples:
            self._samples[id(parameter)] = Sample(parameter)
        return self._samples[id(parameter)]

    def put_away(self, parameter: torch.Tensor) -> None:
        """Take all of a parameter's state home, as an update or a loading has left it."""
        state = self._optimizer.state[parameter]
        moved = {key: value for key, value in state.items() if is_movable(value)}
        if id(parameter) in self._in_file and self._file is not None:
            for key, value in moved.items():
                state[key] = FileTensor(value, self._file)
                state[key].store(value)
        elif self.packs(parameter) and moved:
            self.sample(parameter).begin(parameter, state)
            for key, codes in self.new_codes(parameter, [*moved]).items():
                codes.store(moved[key])
                state[key] = codes

    def bring_back(self, parameter: torch.Tensor) -> None:
        """All of it to memory."""
        state = self._optimizer.state.get(parameter, {})
        for key, value in state.items():
            if isinstance(value, StoredTensor):
                state[key] = value.load()


def is_movable(value: object) -> bool:
    """Whether it is a dense tensor in memory without a graph, and not a few numbers."""
    if not isinstance(value, torch.Tensor) or isinstance(value, Absent) or value.requires_grad:
        return False
    return value.layout is torch.strided and value.nbytes >= _MOVED_BYTES

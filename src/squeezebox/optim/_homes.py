"""Where an optimizer's state is between two updates: in memory, in a file, in 16 or in 8 bits."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch

from squeezebox.codecs import StateCodes
from squeezebox.memory import Absent, FileTensor, StoredTensor, TensorFile, flat_in_memory
from squeezebox.optim._groups import step_apart

# Averages of squares, or largest sizes: never negative.
_SQUARES = ("exp_avg_sq", "max_exp_avg_sq", "square_avg", "sum", "exp_inf")
_UNIT = "exp_avg_sq"  # by whose root Adam and its kin divide an average


class CodedTensor(StoredTensor):
    """A tensor of optimizer state, packed as :class:`~squeezebox.codecs.StateCodes`.

    Args:
        like: dense; its shape and layout are taken. It is zero before :meth:`store`.
        codes: of as many elements.
        unit: the squares in whose roots' units it is packed.
    """

    def __init__(self, like: torch.Tensor, codes: StateCodes, unit: CodedTensor | None = None) -> None:
        self.codes, self.unit = codes, unit
        self._in_units: list[weakref.ref[CodedTensor]] = []
        if unit is not None:
            unit._in_units.append(weakref.ref(self))  # noqa: SLF001  (one of its own)

    def parts(self) -> Iterable[torch.Tensor]:
        """The codes."""
        return self.codes.parts

    def store(self, value: torch.Tensor) -> None:
        """Take these elements; what is in units of them keeps its own."""
        others = [each for each in (found() for found in self._in_units) if each is not None]
        values = [each.load() for each in others]
        self.codes.pack(flat_in_memory(value, self).float(), 0, self._squares())
        for other, own in zip(others, values, strict=True):
            other.store(own)

    def load(self) -> torch.Tensor:
        """The elements, in memory of their own."""
        flat = self._flat()
        return flat.to(self.dtype).as_strided(self.shape, self.stride())

    def _flat(self) -> torch.Tensor:
        out = torch.empty(self.numel(), dtype=torch.float32, device=self.device)
        return self.codes.unpack(0, self.numel(), out, self._squares())

    def _squares(self) -> torch.Tensor | None:
        return self.unit._flat() if self.unit is not None else None  # noqa: SLF001  (one of its own)


def coded(parameter: torch.Tensor, names: list[str], bits: int, key: int) -> dict[str, CodedTensor]:
    """Codes for an optimizer's tensors of these names, all of the parameter's shape."""
    found: dict[str, CodedTensor] = {}
    for number, name in enumerate(_unit_first(names)):
        codes = StateCodes(parameter, bits, squares=name in _SQUARES, key=8 * key + number)
        found[name] = CodedTensor(parameter, codes, found.get(_UNIT) if codes.has_units else None)
    return found


def unpacked(
    state: dict[str, CodedTensor], start: int, stop: int, dtype: torch.dtype, rooms: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Flat elements of each tensor, in ``rooms``, which are made for the first piece and serve the next."""
    found: dict[str, torch.Tensor] = {}
    for name in _unit_first(state):
        each = state[name]
        if name not in rooms:
            rooms[name] = torch.empty(stop - start, dtype=torch.float32, device=each.device)
        out = rooms[name][: stop - start]
        unit = found.get(_UNIT) if each.unit is not None else None
        found[name] = each.codes.unpack(start, stop, out, unit)
    return {name: found[name].to(dtype) for name in state}


def pack(state: dict[str, CodedTensor], start: int, values: dict[str, torch.Tensor]) -> None:
    """Take flat elements of each tensor; ``values`` are used up."""
    unit: torch.Tensor | None = None
    for name in _unit_first(state):
        each, value = state[name], values[name].float()
        each.codes.pack(value, start, unit if each.unit is not None else None)
        if name == _UNIT:
            unit = each.codes.unpack(start, start + len(value), value)


def _unit_first(names: Iterable[str]) -> list[str]:
    return sorted(names, key=lambda name: name != _UNIT)


_SAMPLED = 256  # elements of a parameter
_KEPT = 0.9  # of the sums before, in each step's


class UpdateNoise:
    """Squared error of updates over their squared norm, over the last ten steps or so."""

    def __init__(self) -> None:
        self._error = self._size = self._past_error = self._past_size = 0.0

    def add(self, error: float, size: float) -> None:
        """Of one parameter in this step."""
        self._error += error
        self._size += size

    def end_step(self) -> None:
        """All parameters are updated."""
        self._past_error = _KEPT * self._past_error + self._error
        self._past_size = _KEPT * self._past_size + self._size
        self._error = self._size = 0.0

    @property
    def value(self) -> float | None:
        """None before the first step, or where nothing moved."""
        return self._past_error / self._past_size if self._past_size > 0.0 else None


class Sample:
    """Some elements of a parameter, which are also updated from exact state of their own."""

    def __init__(self, parameter: torch.Tensor) -> None:
        self._numel = parameter.numel()
        self._every = max(1, self._numel // _SAMPLED)
        self._state: dict[str, Any] = {}
        self._values: list[torch.Tensor] = []
        self._gradients: list[torch.Tensor] = []
        self._updated: list[torch.Tensor] = []

    def begin(self, parameter: torch.Tensor, state: Mapping[str, Any]) -> None:
        """Go on from a state that is still exact."""
        self._state = {key: self._own(value, parameter) for key, value in state.items()}

    def _own(self, value: Any, parameter: torch.Tensor) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if value.shape != parameter.shape:
            return value.clone()
        return flat_in_memory(value, parameter)[:: self._every].clone()

    def take(self, start: int, values: torch.Tensor, gradient: torch.Tensor) -> None:
        """Note those among a piece's elements, which begin at ``start``, before their update."""
        if start == 0:  # an update before may have failed
            self._values, self._gradients, self._updated = [], [], []
        self._values.append(self._of(start, values))
        self._gradients.append(self._of(start, gradient))

    def see(self, start: int, values: torch.Tensor) -> None:
        """Note the same after the update."""
        self._updated.append(self._of(start, values))

    def _of(self, start: int, values: torch.Tensor) -> torch.Tensor:
        return values[-start % self._every :: self._every].clone()

    def compare(self, optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> tuple[float, float]:
        """Squared error and squared norm of the update, of all elements."""
        before = torch.cat(self._values)
        exact = before.clone()
        exact.grad = torch.cat(self._gradients)
        updated = torch.cat(self._updated)
        self._values, self._gradients, self._updated = [], [], []
        self._state = step_apart(optimizer, exact, group, self._state)
        error = (updated - exact).double().square().sum()
        moved = (exact - before).double().square().sum()
        share = self._numel / len(before)
        return share * float(error), share * float(moved)


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
        state = self._optimizer.state.get(parameter, {})
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

"""Optimizer state in 16 or 8 bits: unpacked for a piece's update and packed again."""

from __future__ import annotations

import weakref
from collections.abc import Iterable

import torch

from squeezebox.codecs import StateCodes
from squeezebox.memory import StoredTensor, flat_in_memory

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

"""How a flat gradient becomes one message, and a flat tensor again: one row for each method.

All of them are followed by error feedback: what a message loses is added to the next gradient.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from squeezebox import codecs
from squeezebox.gradients._wanted import PIECE, Sizes, Wanted, parts_of, pieces_of


@dataclass(frozen=True, kw_only=True, slots=True)
class Coder(ABC):
    """A flat floating-point tensor to a message (uint8) and back.

    Args:
        name: as in the table of methods.
        steered: whether a ``level`` sets its loss, which noise or a ratio is then reached by.
    """

    name: str
    steered: bool = True

    @abstractmethod
    def encode(self, wanted: Wanted, level: float, step: int) -> Tensor:
        """The message of gradients without NaN and infinity.

        Args:
            wanted: gradients with what is owed of them.
            level: how much may be lost, in the coder's own unit; more of it takes fewer bytes.
            step: number of the pass, the same on all ranks.
        """

    @abstractmethod
    def decode(self, message: Tensor, sizes: Sizes, dtype: torch.dtype) -> Iterator[Tensor]:
        """The tensor of a message, in pieces one after the other; the next one may overwrite it."""

    @abstractmethod
    def start(self, noise: float | None, ratio: float | None) -> float:
        """The level to begin with, for noise that is allowed or a ratio of bytes that is wanted."""

    def highest(self, sizes: Sizes) -> float:
        """The level above which no fewer bytes go, of parameters of these sizes: one element is left."""
        return float(sum(sizes))


@dataclass(frozen=True, kw_only=True, slots=True)
class Bounded(Coder):
    """Every element within ``level`` times the root mean square of its parameter's gradient.

    Parameters differ in scale, so each is measured by its own: a message has those (float32). Pieces that
    stay in a processor's cache follow. Of a parameter whose elements are all within the bound, the largest
    goes as it is, or one of few elements, such as a scale, would never be sent: a message begins with how
    many these are (int64), their places in the group (int64) and their values (float64).
    """

    def encode(self, wanted: Wanted, level: float, step: int) -> Tensor:
        units = _units(wanted)
        scales = units.to(wanted.dtype).unbind()
        codec, begun, bodies = codecs.get(self.name), 0, _head(wanted, units, level)
        for piece, own in wanted.pieces():
            torch._foreach_div_(parts_of(own, piece), [scales[place] for place, _ in piece])
            data = codecs.dumps(codec.pack(own, level, codecs.Hints(lag=0)))
            if len(data) >= own.nbytes:
                data = b""
                wanted.read(begun, own)
            bodies.append(_aligned(codecs.to_message(data, own)))
            begun += own.numel()
        return torch.cat(bodies)

    def decode(self, message: Tensor, sizes: Sizes, dtype: torch.dtype) -> Iterator[Tensor]:
        message = message.clone()
        count = int(message[:8].view(torch.int64))
        places, values, units = message[8:].split([8 * count, 8 * count, message.numel() - 8 - 16 * count])
        places, values = places.view(torch.int64), values.view(torch.float64)
        scales = units[: 4 * len(sizes)].view(torch.float32).to(dtype).unbind()
        at = 8 + 16 * count + -(-4 * len(sizes) // 8) * 8
        room, begun = torch.empty(min(PIECE, sum(sizes)), dtype=dtype, device="cpu"), 0
        for piece in pieces_of(sizes):
            out = room[: sum(count for _, count in piece)]
            nbytes = int(message[at : at + 8].view(torch.int64))
            codecs.from_message(message[at:], out)
            if nbytes:  # or they came as they are
                torch._foreach_mul_(parts_of(out, piece), [scales[place] for place, _ in piece])
            here = (places >= begun) & (places < begun + out.numel())
            out[places[here] - begun] = values[here].to(dtype)
            begun += out.numel()
            at += -(-(8 + (nbytes or out.nbytes)) // 8) * 8
            yield out

    def start(self, noise: float | None, ratio: float | None) -> float:
        """Errors spread evenly over a step have a third of the bound's square (docs/theory.md)."""
        return math.sqrt(3.0 * noise) if noise is not None else min(max((ratio or 1.0) / 25.0, 0.05), 2.5)

    def highest(self, sizes: Sizes) -> float:
        """No element is more root mean squares than the square root of their number."""
        return math.sqrt(max(sizes))


@dataclass(frozen=True, kw_only=True, slots=True)
class Largest(Coder):
    """The ``1 / level`` largest elements, as values and places (Aji and Heafield, 2017, arXiv:1704.05021)."""

    def encode(self, wanted: Wanted, level: float, step: int) -> Tensor:
        whole = wanted.whole()
        places = codecs.largest(whole.abs(), _count(whole.numel(), level)).indices
        values = whole[places]
        return torch.cat([values.view(torch.uint8), places.int().view(torch.uint8)])

    def decode(self, message: Tensor, sizes: Sizes, dtype: torch.dtype) -> Iterator[Tensor]:
        out = torch.zeros(sum(sizes), dtype=dtype, device="cpu")
        count = message.numel() // (out.element_size() + 4)
        values, places = message[: count * out.element_size()], message[count * out.element_size() :]
        out[places.clone().view(torch.int32).long()] = values.clone().view(dtype)
        yield out

    def start(self, noise: float | None, ratio: float | None) -> float:
        return 2.0 * (ratio or 1.0)  # a value takes its place along


@dataclass(frozen=True, kw_only=True, slots=True)
class Random(Coder):
    """``1 / level`` of the elements, the same random ones on all ranks (arXiv:1809.07599)."""

    def encode(self, wanted: Wanted, level: float, step: int) -> Tensor:
        head, whole = torch.tensor([step], dtype=torch.int64, device="cpu"), wanted.whole()
        values = whole[_chosen(step, whole.numel(), _count(whole.numel(), level))]
        return torch.cat([head.view(torch.uint8), values.view(torch.uint8)])

    def decode(self, message: Tensor, sizes: Sizes, dtype: torch.dtype) -> Iterator[Tensor]:
        step = int(message[:8].clone().view(torch.int64))
        values = message[8:].clone().view(dtype)
        out = torch.zeros(sum(sizes), dtype=dtype, device="cpu")
        out[_chosen(step, out.numel(), values.numel())] = values
        yield out

    def start(self, noise: float | None, ratio: float | None) -> float:
        return ratio or 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Signs(Coder):
    """A bit an element: the mean of its parameter's positive or negative ones (Seide et al., 2014)."""

    def encode(self, wanted: Wanted, level: float, step: int) -> Tensor:
        whole, sizes, means = wanted.whole(), list(wanted.sizes), []
        positive = whole > 0
        for part, above in zip(whole.split(sizes), positive.split(sizes), strict=True):
            up, count = float(part.clamp(min=0).sum()), int(above.sum())
            below = part.numel() - count
            means += [up / max(count, 1), (float(part.sum()) - up) / max(below, 1)]
        bits = torch.from_numpy(np.packbits(positive.numpy()))
        return torch.cat([torch.tensor(means, dtype=torch.float32, device="cpu").view(torch.uint8), bits])

    def decode(self, message: Tensor, sizes: Sizes, dtype: torch.dtype) -> Iterator[Tensor]:
        out = torch.empty(sum(sizes), dtype=dtype, device="cpu")
        taken = 8 * len(sizes)
        means = message[:taken].clone().view(torch.float32).view(-1, 2).tolist()
        bits = torch.from_numpy(np.unpackbits(message[taken:].numpy(), count=out.numel())).bool()
        parts = zip(out.split(list(sizes)), bits.split(list(sizes)), means, strict=True)
        for part, above, (up, down) in parts:
            part.fill_(down)
            part.masked_fill_(above, up)
        yield out

    def start(self, noise: float | None, ratio: float | None) -> float:
        return 1.0


CODERS = {
    coder.name: coder
    for coder in (
        Bounded(name="entropy"),
        Bounded(name="planes"),
        Largest(name="top-k"),
        Random(name="random-k"),
        Signs(name="1-bit", steered=False),
    )
}


def _units(wanted: Wanted) -> Tensor:
    """Each parameter's root mean square in float32; 1 for one of zeros, or beyond float32."""
    counts = torch.tensor(wanted.sizes, dtype=torch.float64, device="cpu").clamp(min=1)
    units = (wanted.squares / counts).sqrt().float()
    return torch.where((units > 1e-30) & (units < 1e30), units, 1.0)


def _head(wanted: Wanted, units: Tensor, level: float) -> list[Tensor]:
    """What a message begins with; below a level of 1 no parameter is all within the bound."""
    peaks = zip(wanted.peaks(), units.tolist(), strict=True) if level >= 1.0 else ()
    alone = [(place, value) for (place, value), unit in peaks if 0.0 < abs(value) <= level * unit]
    places = torch.tensor([len(alone), *(place for place, _ in alone)], device="cpu")
    values = torch.tensor([value for _, value in alone], dtype=torch.float64, device="cpu")
    return [_aligned(each.view(torch.uint8)) for each in (places, values, units)]


def _aligned(data: Tensor) -> Tensor:
    """With zeros up to a multiple of 8 bytes."""
    return torch.cat([data, data.new_zeros(-data.numel() % 8)])


def _count(numel: int, level: float) -> int:
    return min(numel, max(1, round(numel / level)))


def _chosen(step: int, numel: int, count: int) -> Tensor:
    return torch.randperm(numel, generator=torch.Generator().manual_seed(step))[:count]

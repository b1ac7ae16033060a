"""How an error in one saved tensor grows on its way to those that can be recomputed from it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from squeezebox import codecs
from squeezebox.profiling._ledgers import now


class Row(Protocol):
    """What is read of a saved tensor's row."""

    key: str
    bound: float


class Derivation(Protocol):
    """How a tensor can be recomputed."""

    @property
    def sources(self) -> tuple[str, ...]:
        """Keys of the tensors to start from."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Gain:
    """A tensor recomputed from a packed one, ``source``.

    Its squared error is that which its own packing has at a bound whose square is ``square`` times the
    source's. Where its sign must stay, that takes ``sign_bytes`` and ``sign_seconds`` besides.
    """

    source: str
    square: float
    sign_bytes: int
    sign_seconds: float


_TRIED = 0.1  # share of the rms


class GainProfiler:
    """Looks on at one step in which every tensor is packed, and recomputes those that come from one other."""

    def __init__(self) -> None:
        self.gains: dict[str, Gain] = {}
        self._rows: dict[str, Row] = {}
        self._derive: dict[str, Callable[[], Derivation | None]] = {}

    def saving(self, row: Row, tensor: torch.Tensor, derive: Callable[[], Derivation | None]) -> None:
        """Packing begins; for capture's Onlooker."""
        self._rows[row.key], self._derive[row.key] = row, derive

    def offered(
        self,
        row: Row,
        codec: str,
        flat: torch.Tensor,
        scale: object | None,
        highest: float,
        trial: Callable[..., codecs.Packed],
        again: Callable[[], torch.Tensor],
    ) -> None:
        """Its values may be packed: recompute it, and compare. For capture's Onlooker."""
        found = self._derive[row.key]()
        source = self._rows.get(found.sources[0]) if found is not None and len(found.sources) == 1 else None
        bound = _TRIED * (1.0 if scale is not None else _rms(flat))
        if source is None or not source.bound > 0.0 or not 0.0 < bound < math.inf:
            return
        own = _error(codecs.get(codec).unpack(trial(codec, bound)), flat) / bound**2
        if own > 0.0:
            square = _error(again(), flat) / source.bound**2 / own
            nbytes, seconds = _sign(flat)
            self.gains[row.key] = Gain(
                source=source.key, square=square, sign_bytes=nbytes, sign_seconds=seconds
            )


def _error(found: torch.Tensor, exact: torch.Tensor) -> float:
    return codecs.energy(found - exact) / exact.numel()


def _rms(flat: torch.Tensor) -> float:
    return math.sqrt(codecs.energy(flat) / max(flat.numel(), 1))


def _sign(flat: torch.Tensor) -> tuple[int, float]:
    """Bytes of the signs, and seconds to pack and unpack them."""
    sign, begun = codecs.get("sign"), now(flat.device)
    packed = sign.pack(flat)
    sign.unpack(packed)
    return packed.nbytes, now(flat.device) - begun

"""Frozen weights in 8 or 4 bits, unpacked for each operator that reads one."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from squeezebox import codecs
from squeezebox.memory import StoredTensor
from squeezebox.schema import CodecError


class PackedTensor(StoredTensor):
    """A tensor in a codec's form: every operator unpacks it, and one that works in place packs it again.

    Args:
        like: its shape and layout are taken. There are no elements before :meth:`store`.
        codec: which packs it.
    """

    def __init__(self, like: torch.Tensor, codec: codecs.Codec) -> None:
        self._codec = codec
        self._packed: codecs.Packed | None = None

    def parts(self) -> Iterable[torch.Tensor]:
        """The codes, and what their groups have."""
        return () if self._packed is None else self._packed.payload

    def store(self, value: torch.Tensor) -> None:
        """Take these elements, rounded; CodecError if some are not finite."""
        if not bool(value.isfinite().all()):
            raise CodecError(
                "NaN or infinity cannot be put into a frozen weight that is packed; make the plan without "
                "weight_noise, which leaves weights exact."
            )
        self._packed = self._codec.pack(value)

    def load(self) -> torch.Tensor:
        """The rounded elements, in memory of their own."""
        assert self._packed is not None
        return self._codec.unpack(self._packed)


def codec_of(bits: int) -> codecs.Codec:
    """What packs a frozen weight in 8 or 4 bits an element: levels between each group's least and largest."""
    return codecs.get(f"minmax{bits}")

"""`narrow`: integers in the fewest whole bytes that hold their range."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from squeezebox.codecs._codec import (
    INTEGERS,
    SIGNED,
    Codec,
    expect_parts,
    make_packed,
    require_own,
)
from squeezebox.codecs._hints import NO_HINTS, Hints
from squeezebox.codecs._layout import buffer_for, flatten, restore
from squeezebox.codecs._packed import Packed
from squeezebox.schema import CodecError, FormatError


@dataclass(frozen=True, kw_only=True, slots=True)
class Narrow(Codec):
    """Exact for integers: ``x - offset`` as int8, int16, int32 or int64, whichever just holds it."""

    def pack(self, tensor: Tensor, bound: float | None = None, hints: Hints = NO_HINTS) -> Packed:
        if tensor.dtype not in INTEGERS:
            raise CodecError(f"codec 'narrow' packs integer tensors, not {tensor.dtype}; use 'keep'.")
        flat = flatten(tensor)
        low, high = (int(edge) for edge in flat.aminmax()) if flat.numel() else (0, 0)
        for dtype in SIGNED:
            limits = torch.iinfo(dtype)
            if high - low <= limits.max - limits.min:
                break
        offset = 0 if dtype == torch.int64 else low - limits.min
        codes = flat.clone() if offset == 0 else flat.long() - offset
        return make_packed(self, tensor, 0.0, (codes.to(dtype),), {"offset": offset})

    def unpack(self, packed: Packed, out: Tensor | None = None) -> Tensor:
        require_own(self, packed)
        flat = buffer_for(packed, out)
        flat.copy_(packed.payload[0].long() + int(packed.meta["offset"]))
        return restore(flat, packed)

    def check(self, packed: Packed) -> None:
        if len(packed.payload) != 1 or packed.payload[0].dtype not in SIGNED:
            raise FormatError("packed by 'narrow': expected one part of signed integers; damaged.")
        expect_parts(packed, (packed.payload[0].dtype, packed.numel))

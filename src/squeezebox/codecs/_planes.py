"""Variable size within an error bound, at the speed of a copy: `planes`, `planes-sign`."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from squeezebox.codecs._codec import (
    Codec,
    make_packed,
    require_bound,
    require_float,
    require_own,
    require_scale,
)
from squeezebox.codecs._hints import NO_HINTS, Hints
from squeezebox.codecs._layout import buffer_for, flatten, restore
from squeezebox.codecs._packed import Packed
from squeezebox.codecs._reference._planes import BLOCK, RAW, data_bytes
from squeezebox.schema import FormatError


@dataclass(frozen=True, kw_only=True, slots=True)
class Planes(Codec):
    """``|x - unpack(pack(x, bound))| <= bound`` for every element, without entropy coding.

    256 elements in memory order share a number of bits, which their range needs. What no code below 2^11
    holds within the bound, NaN and infinity among it, is kept exactly, 256 elements at a time. Zeros stay
    zero. With ``keep_sign`` no other value becomes zero or changes its sign.
    """

    keep_sign: bool

    def pack(self, tensor: Tensor, bound: float | None = None, hints: Hints = NO_HINTS) -> Packed:
        require_float(self.name, tensor)
        scale, inner = hints.scale, hints.inner
        limit = require_bound(self.name, bound)
        flat = flatten(tensor)
        if scale is not None:
            require_scale(self.name, scale, inner)
        heads, data = torch.ops.squeezebox.pack_planes(flat, limit, self.keep_sign, scale, inner)
        payload = (heads, data) if scale is None else (heads, data, scale)
        reached = limit if scale is None else limit * float(scale.max())
        return make_packed(self, tensor, reached, payload, {"inner": inner, "unit": limit})

    def unpack(self, packed: Packed, out: Tensor | None = None) -> Tensor:
        require_own(self, packed)
        flat = buffer_for(packed, out)
        heads, data, *rest = packed.payload
        unit, inner = float(packed.meta["unit"]), int(packed.meta["inner"])
        scale = rest[0] if rest else None
        torch.ops.squeezebox.unpack_planes(heads, data, unit, self.keep_sign, scale, inner, flat)
        return restore(flat, packed)

    def check(self, packed: Packed) -> None:
        found = [(part.dtype, part.numel()) for part in packed.payload]
        rows = -(-packed.numel // BLOCK)
        if len(found) not in (2, 3) or found[0] != (torch.int16, rows) or found[1][0] != torch.uint8:
            raise FormatError(f"packed by '{self.name}': no {rows} heads and bytes in {found}; damaged.")
        if len(found) == 3 and (
            found[2][0] != torch.float32 or found[2][1] == 0 or packed.dtype != torch.float32
        ):
            raise FormatError(f"packed by '{self.name}': the last part is no scale, {found}; damaged.")
        heads = packed.payload[0]
        widths = heads.int() & RAW
        size = int(data_bytes(heads, packed.dtype.itemsize).sum())
        if bool(((widths > 12) & (widths < RAW)).any()) or size != found[1][1]:
            raise FormatError(f"packed by '{self.name}': its blocks are not {found[1][1]} bytes; damaged.")

"""`keep`: the elements as they are."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from squeezebox.codecs._codec import Codec, expect_parts, make_packed, require_own
from squeezebox.codecs._hints import NO_HINTS, Hints
from squeezebox.codecs._layout import buffer_for, flatten, restore
from squeezebox.codecs._packed import Packed


@dataclass(frozen=True, kw_only=True, slots=True)
class Keep(Codec):
    """Exact for every dtype: a private copy in memory order, safe from later in-place changes."""

    def pack(self, tensor: Tensor, bound: float | None = None, hints: Hints = NO_HINTS) -> Packed:
        return make_packed(self, tensor, 0.0, (flatten(tensor).clone(),))

    def unpack(self, packed: Packed, out: Tensor | None = None) -> Tensor:
        require_own(self, packed)
        flat = buffer_for(packed, out)
        flat.copy_(packed.payload[0])
        return restore(flat, packed)

    def check(self, packed: Packed) -> None:
        expect_parts(packed, (packed.dtype, packed.numel))

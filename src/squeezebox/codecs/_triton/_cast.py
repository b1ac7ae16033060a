"""Float32 to the dtype of a tensor, halves to even everywhere: Triton's interpreter cuts bfloat16 off."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def rounded(value, DTYPE: tl.constexpr):
    """``value`` in DTYPE."""
    if DTYPE == tl.bfloat16:
        bits = value.to(tl.int32, bitcast=True)
        near = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
        value = tl.where(value == value, near.to(tl.float32, bitcast=True), value)
    return value.to(DTYPE)

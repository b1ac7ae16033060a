"""Triton kernels for CUDA devices, one for each operator; triton is imported with this package.

In: flat tensors on one device. Out: codes equal to the reference's to the bit.
May touch: triton, torch. With TRITON_INTERPRET=1 the same kernels run on a CPU, for tests.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from squeezebox.codecs._triton import _block_kernels, _group_kernels, _plane_kernels

KERNELS: dict[str, Callable[..., Any]] = {
    "pack_zero": _group_kernels.pack_zero,
    "unpack_zero": _group_kernels.unpack_zero,
    "pack_minmax": _group_kernels.pack_minmax,
    "unpack_minmax": _group_kernels.unpack_minmax,
    "pack_nonzero": _group_kernels.pack_nonzero,
    "pack_positive": _group_kernels.pack_positive,
    "pack_between": _group_kernels.pack_between,
    "unpack_bits": _group_kernels.unpack_bits,
    "pack_blocks": _block_kernels.pack_blocks,
    "unpack_blocks": _block_kernels.unpack_blocks,
    "pack_planes": _plane_kernels.pack_planes,
    "unpack_planes": _plane_kernels.unpack_planes,
    "pack_codes": _group_kernels.pack_codes,
    "unpack_codes": _group_kernels.unpack_codes,
    "pack_offsets": _group_kernels.pack_offsets,
    "unpack_offsets": _group_kernels.unpack_offsets,
}

"""Compiled CPU loops, one for each operator worth it; numba is imported when the first one runs.

In: flat CPU tensors. Out: codes equal to the reference's to the bit.
May touch: numba, numpy, torch, the worker threads.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from squeezebox.codecs._cpu import _flag_kernels, _group_kernels, _planes, _quantise, _states

KERNELS: dict[str, Callable[..., Any]] = {
    "pack_zero": _group_kernels.pack_zero,
    "unpack_zero": _group_kernels.unpack_zero,
    "pack_minmax": _group_kernels.pack_minmax,
    "unpack_minmax": _group_kernels.unpack_minmax,
    "pack_nonzero": _flag_kernels.pack_nonzero,
    "pack_positive": _flag_kernels.pack_positive,
    "pack_between": _flag_kernels.pack_between,
    "unpack_bits": _flag_kernels.unpack_bits,
    "pack_codes": _flag_kernels.pack_codes,
    "unpack_codes": _flag_kernels.unpack_codes,
    "pack_offsets": _flag_kernels.pack_offsets,
    "unpack_offsets": _flag_kernels.unpack_offsets,
    "pack_chunks": _quantise.pack_chunks,
    "unpack_chunks": _quantise.unpack_chunks,
    "pack_planes": _planes.pack_planes,
    "unpack_planes": _planes.unpack_planes,
    "pack_squares": _states.pack_squares,
    "unpack_squares": _states.unpack_squares,
    "pack_signed": _states.pack_signed,
    "unpack_signed": _states.unpack_signed,
    "pack_short": _states.pack_short,
    "unpack_short": _states.unpack_short,
}

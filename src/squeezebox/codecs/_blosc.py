"""Blosc2, imported on first use: bytes in, fewer bytes out."""

from __future__ import annotations

from functools import lru_cache
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from squeezebox.schema import CodecError, FormatError

# Blosc2's header, which comes on top of data that it stores unchanged.
HEADER_BYTES = 32


@lru_cache(maxsize=1)
def _library() -> ModuleType:
    try:
        import blosc2
    except ImportError as missing:
        raise CodecError(
            "the 'entropy' and 'lossless' codecs need Blosc2, which is not installed; pip install blosc2."
        ) from missing
    blosc2.set_releasegil(True)
    module: ModuleType = blosc2
    return module


def compress(data: NDArray[Any]) -> bytes:
    """One Blosc2 chunk: bit shuffle for codes of one byte, byte shuffle for wider items, then zstd 1."""
    blosc2 = _library()
    shuffle = blosc2.Filter.BITSHUFFLE if data.dtype.kind == "i" else blosc2.Filter.SHUFFLE
    packed: bytes = blosc2.compress2(
        data,
        codec=blosc2.Codec.ZSTD,
        clevel=1,
        filters=[blosc2.Filter.NOFILTER] * 5 + [shuffle],
        typesize=data.itemsize,
        blocksize=max(data.nbytes, 32),
        nthreads=1,
    )
    return packed


def decompress(packed: NDArray[np.uint8], out: NDArray[Any]) -> None:
    """Fill ``out`` from one chunk; FormatError if the chunk says it holds another size."""
    blosc2 = _library()
    if packed.nbytes < HEADER_BYTES:
        raise FormatError(f"a compressed chunk has only {packed.nbytes} bytes; truncated.")
    size, held, _ = blosc2.get_cbuffer_sizes(packed)
    if size != out.nbytes or held != packed.nbytes:
        raise FormatError(
            f"a compressed chunk claims {held} bytes for {size}, but {packed.nbytes} for {out.nbytes} "
            "were expected; damaged."
        )
    try:
        blosc2.decompress2(packed, dst=out, nthreads=1)
    except (RuntimeError, ValueError) as failure:
        raise FormatError(f"Blosc2 cannot decode a chunk of {packed.nbytes} bytes; damaged.") from failure

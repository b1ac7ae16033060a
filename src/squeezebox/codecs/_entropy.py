"""Variable size within an absolute error bound: `entropy`, `entropy-sign`; and `lossless`."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from squeezebox.codecs import _chunks
from squeezebox.codecs._codec import (
    FARTHEST,
    NO_HINTS,
    Codec,
    Hints,
    Packed,
    buffer_for,
    flatten,
    make_packed,
    require_bound,
    require_float,
    require_own,
    require_scale,
    restore,
)
from squeezebox.schema import FormatError, OptionError

# Elements of the trial that chooses a lag.
SAMPLE = 1 << 16


def _check(packed: Packed) -> None:
    rows = -(-packed.numel // _chunks.CHUNK)
    found = [(part.dtype, part.numel()) for part in packed.payload]
    if len(found) not in (2, 3) or found[0][0] != torch.uint8:
        raise FormatError(f"packed by '{packed.codec}': expected two parts of bytes, found {found}; damaged.")
    scaled = len(found) == 3
    if scaled and (found[2][0] != torch.float32 or found[2][1] == 0 or packed.dtype != torch.float32):
        raise FormatError(f"packed by '{packed.codec}': the third part is no scale, {found}; damaged.")
    if found[1] != (torch.uint8, rows * _chunks.ROW.itemsize):
        raise FormatError(f"packed by '{packed.codec}': expected {rows} table rows, found {found}; damaged.")


def _numbers(packed: Packed) -> tuple[int, int, int]:
    """lag, inner and dither."""
    meta = packed.meta
    return int(meta["lag"]), int(meta.get("inner", 1)), int(meta.get("dither", 0))


@dataclass(frozen=True, kw_only=True, slots=True)
class Entropy(Codec):
    """``|x - unpack(pack(x, bound))| <= bound`` for every element, in as few bits as the data allows.

    Steps leave room for what rounding can do, or decoded values are checked one by one (docs/formats.md);
    a chunk of 256 Ki elements that no code can hold within the bound, or that has NaN or infinity, is kept
    exactly. Zeros stay zero.
    With ``keep_sign`` a step is split at zero instead of centred on it, so no other value becomes zero.
    """

    keep_sign: bool

    def pack(self, tensor: Tensor, bound: float | None = None, hints: Hints = NO_HINTS) -> Packed:
        """Pack; only float32 tensors take a scale or dither, and a lag of -1 tries a few on a sample.

        The dither is subtractive (Gray and Stockham, 1993, IEEE Trans. Inform. Theory 39), constant within a
        run so that neighbours' codes stay alike. A chunk of `entropy` that has an exact zero goes without.
        """
        require_float(self.name, tensor)
        lag, scale, inner, dither, room = hints.lag, hints.scale, hints.inner, hints.dither, hints.room
        limit = require_bound(self.name, bound)
        if not (-1 <= lag < FARTHEST and 0 <= dither < FARTHEST):
            raise OptionError(
                f"codec '{self.name}' needs lag >= 0, or -1 to choose it, and dither >= 0; got {lag} "
                f"and {dither}."
            )
        if scale is not None:
            if tensor.dtype != torch.float32:
                raise OptionError(f"codec '{self.name}' takes a scale for float32 only, not {tensor.dtype}.")
            require_scale(self.name, scale, inner)
            scale = scale.detach().clone()  # the packed object's own
        flat = flatten(tensor)
        if lag == -1:
            lag = self._choose_lag(tensor, flat, limit if scale is None else limit * float(scale.median()))
        options = (self.keep_sign, lag, scale, inner, dither, room)
        blob, table = torch.ops.squeezebox.pack_chunks(flat, limit, *options)
        parts = _chunks.blob_of(blob, table, room), table
        meta = {"lag": lag, "inner": inner, "dither": dither}
        if scale is None:
            return make_packed(self, tensor, limit, parts, meta)
        return make_packed(self, tensor, limit * float(scale.max()), (*parts, scale), meta)

    def _choose_lag(self, tensor: Tensor, flat: Tensor, bound: float) -> int:
        """0, 1, or the size of the dim next in memory order, whichever packs a sample smallest."""
        steps = sorted(step for step, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1)
        start = max(0, flat.numel() // 2 - SAMPLE // 2)
        sample = flat[start : start + SAMPLE]
        lags = {0, 1, *(step for step in steps[1:2] if step < SAMPLE // 4)}

        def size(lag: int) -> int:
            blob, _ = torch.ops.squeezebox.pack_chunks(sample, bound, self.keep_sign, lag, None, 1, 0)
            return int(blob.numel())

        return min(sorted(lags), key=size)

    def unpack(self, packed: Packed, out: Tensor | None = None) -> Tensor:
        require_own(self, packed)
        flat = buffer_for(packed, out)
        blob, table = packed.payload[:2]
        scale = packed.payload[2] if len(packed.payload) > 2 else None
        lag, inner, dither = _numbers(packed)
        torch.ops.squeezebox.unpack_chunks(blob, table, self.keep_sign, lag, scale, inner, dither, flat)
        return restore(flat, packed)

    def check(self, packed: Packed) -> None:
        _check(packed)


@dataclass(frozen=True, kw_only=True, slots=True)
class Lossless(Codec):
    """Exact for every dtype, NaN payloads included: byte shuffle and zstd."""

    def pack(self, tensor: Tensor, bound: float | None = None, hints: Hints = NO_HINTS) -> Packed:
        blob, table = _chunks.pack_exact(flatten(tensor), hints.room)
        return make_packed(self, tensor, 0.0, (_chunks.blob_of(blob, table, hints.room), table))

    def unpack(self, packed: Packed, out: Tensor | None = None) -> Tensor:
        require_own(self, packed)
        flat = buffer_for(packed, out)
        blob, table = packed.payload
        coding = _chunks.Coding(keep_sign=False, lag=0)
        _chunks.unpack_chunks(_chunks.REFERENCE, blob, table, coding, flat)
        return restore(flat, packed)

    def check(self, packed: Packed) -> None:
        _check(packed)
        if len(packed.payload) != 2:
            raise FormatError(f"packed by '{self.name}': {len(packed.payload)} parts instead of 2; damaged.")

"""A flat tensor as a run of compressed chunks and a table that says how each one is stored.

One table row of 16 bytes a chunk of 256 Ki elements: kind (u1), width of the codes in bits (u1), whether
they are dithered (u2), compressed size (u4), step or constant (f8); little endian.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from math import isnan
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from squeezebox.codecs import _coders, _workers
from squeezebox.codecs._reference import _huffman as _huffman_loops
from squeezebox.codecs._reference import _quantise
from squeezebox.schema import FormatError

CHUNK = 1 << 18
# What is remembered of a tensor's steps; its chunks take no more than these in turn.
FEW_STEPS = 8
# Elements that a loop over repeating channels should have at least.
LONG_LOOP = 4096
ROW = np.dtype([("kind", "u1"), ("width", "u1"), ("dithered", "<u2"), ("nbytes", "<u4"), ("value", "<f8")])
Row = tuple[int, int, int, int, float]
NBYTES = 3  # place of a chunk's size in its row
ZERO, CONSTANT, CODES, RAW, HUFFMAN = range(5)
# Bytes a code below which a chunk is so regular that Blosc2 may find longer runs than Huffman's groups.
RUNS = 0.05
CODE_LIMITS = {8: 127, 16: 32767, 32: 1 << 30}
# Half a unit in the last place, relative.
ROUNDING = {
    torch.float32: 2.0**-24,
    torch.bfloat16: 2.0**-9,
    torch.float16: 2.0**-12,
    torch.float64: 2.0**-53,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Kernels:
    """The loops over elements; ``_reference/`` says what each must compute."""

    narrow: Callable[[Tensor, int, int, Tensor, int, bool, int], Tensor | None]
    widen: Callable[[Tensor, int, int, Tensor, int, bool, Tensor], None]
    difference: Callable[[Tensor, int], Tensor]
    accumulate: Callable[[Tensor, int], Tensor]
    extent: Callable[[Tensor], tuple[float, float]]
    quantise: Callable[[Tensor, float, float, bool, int], Tensor | None]
    dequantise: Callable[[Tensor, float, bool, Tensor], None]
    huffman: _coders.Loops


REFERENCE = Kernels(
    narrow=_quantise.narrow,
    widen=_quantise.widen,
    difference=_quantise.difference,
    accumulate=_quantise.accumulate,
    extent=_quantise.extent,
    quantise=_quantise.quantise,
    dequantise=_quantise.dequantise,
    huffman=_huffman_loops,
)


@dataclass(frozen=True, slots=True)
class Steps:
    """Float32 step and its inverse for each channel; ``inner`` neighbours share one."""

    inner: int
    steps: Tensor
    inverses: Tensor
    normal: bool  # so far from the range's ends that codes and values round as they should


@dataclass(frozen=True, kw_only=True, slots=True)
class Coding:
    """How the chunks of one tensor are coded.

    ``scale`` holds one factor of the step for each channel, of which ``inner`` neighbours share one;
    ``dither`` neighbours share a phase of their steps (0: all do).
    """

    keep_sign: bool
    lag: int
    scale: Tensor | None = None
    inner: int = 1
    dither: int = 0
    _known: dict[float, Steps] = field(default_factory=dict, init=False, repr=False, compare=False)

    def steps(self, step: float) -> Steps:
        """Each channel's step; all chunks of a tensor ask for the same few."""
        known = self._known.get(step)
        if known is None:
            single = torch.full((1,), step, dtype=torch.float32, device="cpu")
            steps = single if self.scale is None else self.scale * float(np.float32(step))
            inner = CHUNK if self.scale is None else self.inner
            if inner == 1:  # the channels over and over: long loops over a few of them
                steps = steps.repeat(-(-LONG_LOOP // steps.numel()))
            if len(self._known) >= FEW_STEPS:  # damaged, or made to fill memory
                self._known.clear()
            normal = bool((steps > 1e-30).all() & (steps < 1e30).all())
            known = self._known[step] = Steps(inner, steps, 1.0 / steps, normal)
        return known


@dataclass(frozen=True, kw_only=True, slots=True)
class Chunk:
    """One stored chunk: its table row and its bytes."""

    kind: int
    width: int = 0
    dithered: bool = False
    value: float = 0.0
    data: bytes = b""

    @property
    def row(self) -> Row:
        """The table row."""
        return self.kind, self.width, int(self.dithered), len(self.data), self.value


def _steps(bound: float, peak: float, dtype: torch.dtype, keep_sign: bool) -> Iterator[tuple[float, float]]:
    """(step, limit) to try in turn: just below twice the bound, then half and a quarter of that."""
    kind = np.float64 if dtype == torch.float64 else np.float32
    limit = min(bound, 1e38) * (1 - 2.0**-20)
    # Rounding to the dtype, and four roundings on the way: what may move a decoded value of size ``peak``.
    slack = (ROUNDING[dtype] + 4 * ROUNDING[torch.float64 if kind is np.float64 else torch.float32]) * peak
    for step in (2 * (limit - slack), limit, limit / 2):
        if keep_sign:  # no wider than what gives all elements one code
            step = min(step, peak / (1 - _quantise.SHIFT) * (1 + 2.0**-20))
        step = min(step, torch.finfo(dtype).max)
        # Float32 has normal inverses of these.
        if 1e-36 < step < 1e38:
            yield float(kind(step)), float(kind(limit))


def _width(peak: float, step: float) -> int | None:
    """The smallest code width that holds ``peak / step`` with room for rounding."""
    largest = peak / step * (1 + 2.0**-18) + 1
    return next((width for width, most in CODE_LIMITS.items() if largest <= most), None)


def _bytes(flat: Tensor) -> NDArray[Any]:
    return flat.cpu().view(torch.uint8).numpy().view(f"V{flat.element_size()}")


def _raw(flat: Tensor) -> Chunk:
    return Chunk(kind=RAW, data=_coders.compress_bytes(_bytes(flat)))


def encode(kernels: Kernels, flat: Tensor, start: int, bound: float, coding: Coding) -> Chunk:
    """One chunk, every decoded element within ``bound``; exact where no code can promise that."""
    if flat.dtype == torch.float32:
        widths = (8,) if coding.scale is None else (8, 16)
        for width, dither in itertools.product(widths, sorted({coding.dither, 0}, reverse=True)):
            chunk = _narrow(kernels, flat, start, bound, coding, width, dither)
            if chunk is not None:
                return chunk
    return _raw(flat) if coding.scale is not None else _checked(kernels, flat, bound, coding)


def _narrow(
    kernels: Kernels, flat: Tensor, start: int, bound: float, coding: Coding, width: int, dither: int
) -> Chunk | None:
    """One float32 chunk in codes of this width, if they can hold it: a single pass."""
    # Narrower by all that rounding can move a code of this width: no element needs a check of its own.
    step = float(np.float32(2 * min(bound, 1e38) * (1 - 2.0 ** (width - 21))))
    steps = coding.steps(step)
    if not steps.normal:
        return None
    codes = kernels.narrow(flat, start, steps.inner, steps.inverses, dither, coding.keep_sign, width)
    if codes is None:
        return None
    values = codes.cpu().numpy()
    # The two ends are a quick test, which most chunks fail.
    if values[0] == values[-1] and bool((values == values[0]).all()):
        # Without the sign kept, a dithered code 0 stands for another value in each run.
        if values[0] == 0 and (coding.keep_sign or not dither):
            return Chunk(kind=ZERO)
        if coding.scale is None and not dither:  # the table holds a constant in no bytes
            return None
    kind, data = _shrink(kernels, codes, coding.lag)
    return Chunk(kind=kind, width=width, dithered=dither > 0, value=step, data=data)


def _checked(kernels: Kernels, flat: Tensor, bound: float, coding: Coding) -> Chunk:
    """One chunk of any dtype and range: every element is compared with what it will be decoded to."""
    low, high = kernels.extent(flat)
    if isnan(low):
        return _raw(flat)
    if low == high:
        return Chunk(kind=CONSTANT, value=low) if low else Chunk(kind=ZERO)
    peak = max(-low, high)
    for step, limit in _steps(bound, peak, flat.dtype, coding.keep_sign):
        width = _width(peak, step)
        codes = kernels.quantise(flat, step, limit, coding.keep_sign, width) if width else None
        if codes is not None and width:
            kind, data = _shrink(kernels, codes, coding.lag)
            return Chunk(kind=kind, width=width, value=step, data=data)
    return _raw(flat)


def _folded(codes: NDArray[Any]) -> NDArray[Any]:
    """0, -1, 1, -2, ... as 0, 1, 2, 3, ...: small differences leave the high bits alone."""
    return (codes << 1) ^ (codes >> (8 * codes.itemsize - 1))


def _unfold(codes: NDArray[Any]) -> None:
    """The inverse of ``_folded``, in place."""
    unsigned = codes.view(f"u{codes.itemsize}")
    unsigned[:] = (unsigned >> 1) ^ -(unsigned & 1)


def _shrink(kernels: Kernels, codes: Tensor, lag: int) -> tuple[int, bytes]:
    """The codes' differences by Huffman, or by Blosc2: wide ones, few, and those with long runs."""
    changes = kernels.difference(codes, lag).cpu().numpy()
    coded = _coders.compress_codes(kernels.huffman, changes) if changes.dtype == np.int8 else None
    if coded is not None and len(coded) > RUNS * changes.size:
        return HUFFMAN, coded
    data = _coders.compress_bytes(_folded(changes) if lag else changes)
    return (CODES, data) if coded is None or len(data) <= len(coded) else (HUFFMAN, coded)


def decode(
    kernels: Kernels, row: Row, data: NDArray[np.uint8], start: int, coding: Coding, out: Tensor
) -> None:
    """The inverse of ``encode``, into ``out``."""
    kind, width, dithered, _, value = row
    if kind in (CONSTANT, CODES, HUFFMAN) and not _representable(value, out.dtype):
        raise FormatError(f"chunk of kind {kind} with value {value}, which is no {out.dtype}; damaged.")
    if kind in (ZERO, CONSTANT):
        out.fill_(value if kind == CONSTANT else 0)
    elif kind == RAW:
        raw = torch.empty(out.numel() * out.element_size(), dtype=torch.uint8, device="cpu")
        _coders.decompress_bytes(data, raw.numpy())
        out.copy_(raw.view(out.dtype))
    elif (kind == CODES and width in CODE_LIMITS) or (kind == HUFFMAN and width == 8):
        codes = torch.from_numpy(_workers.scratch("codes", out.numel(), f"int{width}"))
        codes = _expand(kernels, data, kind, coding.lag, codes).to(out.device)
        if out.dtype == torch.float32:
            known = coding.steps(value)
            steps, dither = known.steps.to(out.device), coding.dither if dithered else 0
            kernels.widen(codes, start, known.inner, steps, dither, coding.keep_sign, out)
        else:
            kernels.dequantise(codes, value, coding.keep_sign, out)
    else:
        raise FormatError(f"chunk of unknown kind {kind} and width {width}; damaged.")


def _representable(value: float, dtype: torch.dtype) -> bool:
    return dtype.is_floating_point and abs(value) <= torch.finfo(dtype).max


def _expand(kernels: Kernels, data: NDArray[np.uint8], kind: int, lag: int, codes: Tensor) -> Tensor:
    """The inverse of ``_shrink``, in ``codes`` where the kernels can."""
    if kind == HUFFMAN:
        _coders.decompress_codes(kernels.huffman, data, codes.numpy())
    else:
        _coders.decompress_bytes(data, codes.numpy())
        if lag:
            _unfold(codes.numpy())
    return kernels.accumulate(codes, lag)


def _join(chunks: list[Chunk], room: Tensor | None) -> tuple[Tensor, Tensor]:
    """(blob, table); the blob is empty where its bytes have gone to the room."""
    table = np.array([chunk.row for chunk in chunks], dtype=ROW)
    nbytes = sum(len(chunk.data) for chunk in chunks)
    fits = room is not None and nbytes <= room.numel()
    blob = torch.empty(0 if fits else nbytes, dtype=torch.uint8, device="cpu")
    target, end = (room if room is not None and fits else blob).numpy(), 0
    for chunk in chunks:
        start, end = end, end + len(chunk.data)
        target[start:end] = np.frombuffer(chunk.data, dtype=np.uint8)
    return blob, torch.from_numpy(table.view(np.uint8))


def blob_of(blob: Tensor, table: Tensor, room: Tensor | None) -> Tensor:
    """The chunks' bytes, wherever ``pack_chunks`` put them."""
    nbytes = sum(row[NBYTES] for row in table.numpy().view(ROW).tolist())
    return blob if room is None or blob.numel() == nbytes else room[:nbytes]


def pack_chunks(
    kernels: Kernels, flat: Tensor, bound: float, coding: Coding, room: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(blob, table) of a flat float tensor, every decoded element within ``bound``.

    With a scale the bound is in units of the element's channel's scale. Where the blob fits the ``room``
    (flat bytes of the host), it goes there, and the one that is returned is empty.
    """
    pieces = torch.split(flat, CHUNK) if flat.numel() else ()

    def work(index: int) -> Chunk:
        return encode(kernels, pieces[index], index * CHUNK, bound, coding)

    return _join(_workers.run(work, len(pieces)), room)


def unpack_chunks(kernels: Kernels, blob: Tensor, table: Tensor, coding: Coding, out: Tensor) -> None:
    """The inverse of ``pack_chunks``, into ``out``."""
    rows = table.numpy().view(ROW).tolist()
    ends = [0, *itertools.accumulate(row[NBYTES] for row in rows)]
    pieces = torch.split(out, CHUNK) if out.numel() else ()
    if len(rows) != len(pieces) or ends[-1] != blob.numel():
        raise FormatError(
            f"{len(rows)} chunks over {blob.numel()} bytes do not fit {out.numel()} elements; damaged."
        )
    data = blob.contiguous().numpy()

    def work(index: int) -> None:
        piece = data[ends[index] : ends[index + 1]]
        decode(kernels, rows[index], piece, index * CHUNK, coding, pieces[index])

    _workers.run(work, len(pieces))


def operators(kernels: Kernels) -> tuple[Callable[..., tuple[Tensor, Tensor]], Callable[..., None]]:
    """The operators ``pack_chunks`` and ``unpack_chunks`` with these loops, as their schemas call them."""

    def pack(
        flat: Tensor,
        bound: float,
        keep_sign: bool,
        lag: int,
        scale: Tensor | None,
        inner: int,
        dither: int,
        room: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        coding = Coding(keep_sign=keep_sign, lag=lag, scale=scale, inner=inner, dither=dither)
        return pack_chunks(kernels, flat, bound, coding, room)

    def unpack(
        blob: Tensor,
        table: Tensor,
        keep_sign: bool,
        lag: int,
        scale: Tensor | None,
        inner: int,
        dither: int,
        out: Tensor,
    ) -> None:
        coding = Coding(keep_sign=keep_sign, lag=lag, scale=scale, inner=inner, dither=dither)
        unpack_chunks(kernels, blob, table, coding, out)

    return pack, unpack


def pack_exact(flat: Tensor, room: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """(blob, table) of any flat tensor, kept to the bit; ``room`` as in ``pack_chunks``."""
    pieces = torch.split(flat, CHUNK) if flat.numel() else ()
    return _join(_workers.run(lambda index: _raw(pieces[index]), len(pieces)), room)

"""Packed to bytes and back, and a tensor as one message, packed within a share of its root mean square.

What bytes claim is checked before anything is decoded; docs/formats.md has the layout. A message, which two
ranks hand to each other, is a count (int64) and that number of bytes of ``dumps``; the count is 0 where the
tensor itself follows.
"""

from __future__ import annotations

import json
import math
import struct
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from squeezebox.codecs._codec import FARTHEST, FLOATS, INTEGERS, Codec, Hints, Packed, is_dense
from squeezebox.codecs._registry import get
from squeezebox.schema import CodecError, FormatError, OptionError

MOST_DIMS = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class Range:
    """A scalar from ``low`` to ``high``: a float if ``real`` (NaN too if ``strange``), else an integer."""

    low: float
    high: float
    real: bool = False
    strange: bool = False
    needed: bool = True

    def holds(self, value: int | float) -> bool:
        """Whether the scalar is one of these."""
        if isinstance(value, float) != self.real:
            return False
        return self.low <= value <= self.high or (self.strange and math.isnan(value))


@dataclass(frozen=True, kw_only=True, slots=True)
class Claims:
    """The dtypes that a codec packs (None: any) and its scalars."""

    dtypes: tuple[torch.dtype, ...] | None = FLOATS
    scalars: Mapping[str, Range] = field(default_factory=dict)


_FINITE = Range(low=-torch.finfo(torch.float64).max, high=torch.finfo(torch.float64).max, real=True)
_ANY = Range(low=-math.inf, high=math.inf, real=True, strange=True)
_DISTANCE = Range(low=0, high=FARTHEST - 1)
_CHANNELS = {"inner": Range(low=1, high=FARTHEST - 1), "dither": _DISTANCE}
# An early release wrote the lag alone.
_CHUNKS = {"lag": _DISTANCE} | {name: replace(each, needed=False) for name, each in _CHANNELS.items()}
_EXPONENT = {"exponent": Range(low=-1000, high=1000)}
_SIDE = Range(low=1, high=(1 << 31) - 1)
_PADDING = Range(low=0, high=(1 << 31) - 1)
_KERNEL = Range(low=1, high=256)
_WINDOW = {"width": _SIDE} | {
    f"{name}_{axis}": each
    for name, each in (("kernel", _KERNEL), ("stride", _SIDE), ("padding", _PADDING), ("dilation", _SIDE))
    for axis in "yx"
}
_OFFSET = Range(low=-(1 << 63), high=(1 << 63) - 1)
_UNIT = Range(low=0, high=_FINITE.high, real=True)
_SLOT = Range(low=0, high=FARTHEST, needed=False)

CLAIMS: Mapping[str, Claims] = {
    "keep": Claims(dtypes=None),
    "lossless": Claims(dtypes=None),
    "mask": Claims(dtypes=(*FLOATS, *INTEGERS, torch.bool), scalars={"zero": _FINITE, "one": _FINITE}),
    "sign": Claims(scalars={"zero": _FINITE, "one": _FINITE}),
    "interval": Claims(scalars={"zero": _ANY, "one": _ANY}),
    "narrow": Claims(dtypes=INTEGERS, scalars={"offset": _OFFSET}),
    "pool-index": Claims(dtypes=(torch.int64,), scalars=_WINDOW),
    "bf16": Claims(scalars=_EXPONENT),
    "fp8-e4m3": Claims(scalars=_EXPONENT),
    "fp8-e5m2": Claims(scalars=_EXPONENT),
    "blocks": Claims(scalars={"unit": _UNIT, "slot": _SLOT, **_CHANNELS}),
    "entropy": Claims(scalars=_CHUNKS),
    "entropy-sign": Claims(scalars=_CHUNKS),
    "planes": Claims(scalars={"unit": _UNIT, "inner": _CHANNELS["inner"]}),
    "planes-sign": Claims(scalars={"unit": _UNIT, "inner": _CHANNELS["inner"]}),
    **{
        f"{family}{bits}{kind}": Claims()
        for family in ("zero", "minmax")
        for bits in (8, 4, 3, 2)
        for kind in ("", "-stochastic")
    },
}


def check_claims(packed: Packed) -> None:
    """Raise FormatError unless dtype and scalars are what the codec writes; your own check themselves."""
    if math.isnan(packed.bound) or packed.bound < 0 or packed.version < 1:
        raise FormatError(
            f"packed by version {packed.version} within a bound of {packed.bound!r}: cannot be; damaged."
        )
    claims = CLAIMS.get(packed.codec)
    if claims is None:
        return
    if claims.dtypes is not None and packed.dtype not in claims.dtypes:
        raise FormatError(f"packed by '{packed.codec}': it has no {packed.dtype}; damaged.")
    wrong = list(_out_of_range(packed, claims.scalars))
    if wrong:
        raise FormatError(f"packed by '{packed.codec}': {', '.join(wrong)}; damaged.")


def _out_of_range(packed: Packed, ranges: Mapping[str, Range]) -> Iterable[str]:
    for name in packed.meta.keys() - ranges.keys():
        yield f"{name} means nothing"
    for name, each in ranges.items():
        value = packed.meta.get(name)
        if value is None and each.needed:
            yield f"no {name}"
        elif value is not None and not each.holds(value):
            yield f"{name} is {value!r}, not from {each.low:g} to {each.high:g}"


def check_geometry(packed: Packed, max_bytes: int) -> None:
    """Raise FormatError unless the shape is one that a tensor of at most ``max_bytes`` can have."""
    reach = math.prod(max(size, 1) for size in packed.shape)
    if len(packed.shape) > MOST_DIMS or reach >= FARTHEST:
        raise FormatError(f"a shape of {len(packed.shape)} dims that reaches over {reach} elements; damaged.")
    nbytes = packed.numel * packed.dtype.itemsize
    if nbytes > max_bytes:
        raise FormatError(
            f"packed bytes claim to hold {nbytes} bytes, above the {max_bytes} allowed; damaged, or give "
            "loads a larger max_bytes if you trust them."
        )


MAGIC = b"SQZB"
VERSION = 1
# magic, format version, header length, CRC-32 of header and payload
PREFIX = struct.Struct("<4sHIxxI")
# The largest tensor that a message may claim to hold: this, or this multiple of its own bytes.
LEAST_LIMIT, MOST_RATIO = 64 << 20, 1024
DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float32,
        torch.float64,
        torch.float16,
        torch.bfloat16,
        torch.float8_e4m3fn,
        torch.float8_e5m2,
        torch.complex64,
        torch.complex128,
        torch.uint8,
        torch.int8,
        torch.int16,
        torch.int32,
        torch.int64,
        torch.bool,
    )
}


def _name(dtype: torch.dtype) -> str:
    name = str(dtype).removeprefix("torch.")
    if name not in DTYPES:
        raise FormatError(f"no packed bytes for dtype {dtype}; known are {', '.join(DTYPES)}.")
    return name


def dumps(packed: Packed) -> bytes:
    """The packed tensor as self-describing bytes; its device is not kept."""
    parts = [part.detach().cpu().contiguous() for part in packed.payload]
    header = {
        "codec": packed.codec,
        "codec_version": packed.version,
        "dtype": _name(packed.dtype),
        "shape": packed.shape,
        "stride": packed.stride,
        "bound": float(packed.bound).hex(),
        "meta": {name: _number(value) for name, value in packed.meta.items()},
        "payload": [[_name(part.dtype), part.numel()] for part in parts],
    }
    text = json.dumps(header, separators=(",", ":"), allow_nan=False).encode()
    body = text + b"".join(part.view(torch.uint8).numpy().tobytes() for part in parts)
    return PREFIX.pack(MAGIC, VERSION, len(text), zlib.crc32(body)) + body


def _number(value: int | float) -> int | str:
    return value if isinstance(value, int) else value.hex()


def loads(data: bytes, max_bytes: int | None = None) -> Packed:
    """The packed tensor, on the CPU; unpacking what this accepts gives a tensor or a FormatError.

    Args:
        data: what :func:`dumps` gave.
        max_bytes: of the tensor that the bytes claim to hold. The default is 64 MiB, or 1024 times the bytes
            given if that is more; a tensor of equal elements may need it larger. :meth:`Codec.unpack` takes
            no more for the tensor, and up to 64 bytes an element while it works.

    Raises:
        FormatError: the bytes are not Squeezebox's, truncated, damaged, of a newer version, or claim a tensor
            above ``max_bytes``.
        OptionError: ``max_bytes`` is negative.
    """
    limit = max(LEAST_LIMIT, MOST_RATIO * len(data)) if max_bytes is None else max_bytes
    if limit < 0:
        raise OptionError(f"loads needs max_bytes >= 0, got {max_bytes}.")
    header, body = _open(data)
    try:
        packed = _read(header, body)
        codec = get(packed.codec)
        check_geometry(packed, limit)
        check_claims(packed)
        codec.check(packed)
    except OptionError as unknown:
        raise FormatError(f"packed by an unknown codec: {unknown}") from unknown
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as broken:
        if isinstance(broken, FormatError):
            raise
        raise FormatError(f"the header of packed bytes makes no sense ({broken!r}); damaged.") from broken
    return packed


def _open(data: bytes) -> tuple[dict[str, Any], bytes]:
    """The header and the payload bytes, once magic, version, length and checksum hold."""
    if len(data) < PREFIX.size or data[:4] != MAGIC:
        raise FormatError(f"{len(data)} bytes that do not start with {MAGIC!r}: not a packed tensor.")
    _, version, length, checksum = PREFIX.unpack_from(data)
    if version > VERSION:
        raise FormatError(
            f"packed in format version {version}, this release reads up to {VERSION}; upgrade squeezebox."
        )
    body = data[PREFIX.size :]
    if len(body) < length or zlib.crc32(body) != checksum:
        raise FormatError(f"packed bytes ({len(data)}) fail their checksum: truncated or damaged.")
    try:
        header = json.loads(body[:length])
    except (ValueError, RecursionError) as broken:
        raise FormatError("the header of packed bytes cannot be read; damaged.") from broken
    return header, body[length:]


def _sizes(values: Any) -> tuple[int, ...]:
    if not all(type(value) is int and 0 <= value < 1 << 48 for value in values):
        raise FormatError(f"sizes {values!r} are not counts; damaged.")
    return tuple(values)


def _read(header: dict[str, Any], body: bytes) -> Packed:
    shape, stride = _sizes(header["shape"]), _sizes(header["stride"])
    if len(shape) != len(stride) or not (0 in shape or is_dense(shape, stride)):
        raise FormatError(f"strides {stride} do not fit shape {shape}; damaged.")
    if type(header["codec_version"]) is not int or header["codec_version"] > get(header["codec"]).version:
        raise FormatError(
            f"packed by version {header['codec_version']} of codec '{header['codec']}', newer than this "
            "release reads; upgrade squeezebox."
        )
    return Packed(
        codec=header["codec"],
        version=header["codec_version"],
        shape=shape,
        stride=stride,
        dtype=DTYPES[header["dtype"]],
        device=torch.device("cpu"),
        bound=float.fromhex(header["bound"]),
        payload=tuple(_parts(header["payload"], body)),
        meta={
            str(name): value if type(value) is int else float.fromhex(value)
            for name, value in header["meta"].items()
        },
    )


def _parts(rows: list[list[Any]], body: bytes) -> list[torch.Tensor]:
    parts, start = [], 0
    for name, count in rows:
        dtype = DTYPES[name]
        end = start + _sizes([count])[0] * dtype.itemsize
        if end > len(body):
            raise FormatError(f"payload of {len(body)} bytes ends before its {end}; truncated.")
        raw = torch.frombuffer(bytearray(body[start:end]), dtype=torch.uint8) if end > start else None
        parts.append(torch.empty(0, dtype=dtype, device="cpu") if raw is None else raw.view(dtype))
        start = end
    if start != len(body):
        raise FormatError(f"payload of {len(body)} bytes goes on after its {start}; damaged.")
    return parts


COUNT = 8  # bytes of the count


def root_mean_square(tensor: Tensor) -> float:
    """Of all elements, summed in float64; NaN or infinite where one of them is, 0 of an empty tensor."""
    norm = float(torch.linalg.vector_norm(tensor, dtype=torch.float64))
    return norm / math.sqrt(max(tensor.numel(), 1))


def pack_share(codec: Codec, tensor: Tensor, share: float, lag: int = -1) -> tuple[Packed, bytes] | None:
    """Pack within ``share`` times the root mean square; the packed tensor and its bytes.

    None where the tensor has NaN or infinity, where a codec of fixed size cannot hold it within that bound,
    or where it would take no fewer bytes than the tensor.
    """
    bound = share * root_mean_square(tensor)
    if not math.isfinite(bound):
        return None
    try:
        packed = codec.pack(tensor, bound, Hints(lag=lag))
    except CodecError:
        if not codec.fixed_size:
            raise
        return None
    data = dumps(packed)
    return (packed, data) if len(data) < tensor.nbytes else None


def to_message(data: bytes, tensor: Tensor) -> Tensor:
    """The message of packed bytes, or of the contiguous tensor if there are none; flat, uint8."""
    message = torch.empty(COUNT + (len(data) or tensor.nbytes), dtype=torch.uint8, device="cpu")
    message[:COUNT].view(torch.int64).fill_(len(data))
    body = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else tensor.view(-1).view(torch.uint8)
    message[COUNT:].copy_(body)
    return message


def from_message(message: Tensor, out: Tensor) -> None:
    """The tensor of a message, into a contiguous one; bytes after it are not read.

    Raises:
        FormatError: the message is damaged.
    """
    nbytes = int(message[:COUNT].view(torch.int64))
    flat = out.view(-1)
    if not nbytes:
        flat.copy_(message[COUNT : COUNT + flat.nbytes].view(out.dtype))
        return
    packed = loads(message[COUNT : COUNT + nbytes].numpy().tobytes(), max_bytes=flat.nbytes)
    get(packed.codec).unpack(packed, flat)

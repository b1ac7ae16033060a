"""Packed to bytes and back, checked before anything is decoded; docs/formats.md has the layout."""

from __future__ import annotations

import json
import struct
import zlib
from typing import Any

import torch

from squeezebox.codecs._layout import is_dense
from squeezebox.codecs._packed import Packed
from squeezebox.codecs._ranges import check_claims, check_geometry
from squeezebox.codecs._registry import get
from squeezebox.schema import FormatError, OptionError

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

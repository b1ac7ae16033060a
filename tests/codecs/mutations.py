"""Packed bytes of every codec, damaged in header and payload, with a checksum that fits."""

import json
import random
import zlib
from typing import Any

import torch

from squeezebox import codecs
from squeezebox.codecs import _wire
from squeezebox.schema import FormatError

# The largest tensor that a mutation may claim.
MOST = 1 << 21
_NUMBERS = (
    0,
    1,
    -1,
    2,
    3,
    255,
    256,
    257,
    1 << 20,
    1 << 31,
    1 << 47,
    1 << 48,
    1 << 62,
    1 << 63,
    1 << 64,
    10**400,
)
_REALS = ("0x0p+0", "inf", "-inf", "nan", "0x1p+1000", "-0x1p-1074", "0x1p+3", "x", "0x1p+99999")
_OTHERS = (
    None,
    "",
    "zero4",
    [],
    {},
    [1],
    0.5,
    True,
    "float64",
    "int64",
    "bool",
    "complex128",
    [["uint8", 1 << 40]],
)


def seeds() -> list[bytes]:
    """Small tensors packed by every codec, with and without its options."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(2, 3, 20, 30, generator=generator)
    index = torch.nn.functional.max_pool2d(x, 2, return_indices=True)[1]
    shapes = (x, x[:1].to(torch.float64), x.relu().to(torch.bfloat16), x[0].to(torch.float16), x[:0])
    packed = []
    for name in codecs.available():
        codec = codecs.get(name)
        if name == "pool-index":
            packed += [codec.pack(each, kernel_size=2, input_shape=x.shape) for each in (index, index[:0])]
        elif name == "narrow":
            packed += [codec.pack(index), codec.pack(index.int())]
        elif name == "mask":
            packed += [codec.pack(x > 0), codec.pack((x > 0).double() * 3)]
        else:
            bound = 0.3 if name.startswith(("blocks", "entropy", "planes")) else None
            packed += [codec.pack(each, bound) for each in shapes]
    long = torch.randn(300_000, generator=generator)
    scale = torch.rand(5, generator=generator) + 0.1
    for name in ("entropy", "entropy-sign", "blocks", "planes", "planes-sign"):
        codec = codecs.get(name)
        packed += [
            codec.pack(long[:9000] * 9, 0.3, codecs.Hints(lag=1, dither=100)),
            codec.pack(long[:9000] * 0, 0.3),
        ]
        packed += [codec.pack(long[:9000], 0.3, codecs.Hints(scale=scale, inner=7))]
    packed += [codecs.get("entropy").pack(long, 0.5), codecs.get("lossless").pack(index)]
    return [codecs.dumps(each) for each in packed]


def mutated(data: bytes, source: random.Random) -> bytes:
    """The bytes with one to three changes and a checksum that fits."""
    magic, version, length, _ = _wire.PREFIX.unpack_from(data)
    text = data[_wire.PREFIX.size : _wire.PREFIX.size + length]
    payload = bytearray(data[_wire.PREFIX.size + length :])
    for _ in range(source.randint(1, 3)):
        kind = source.randrange(8)
        if kind < 4 and payload:
            _damage(payload, source, lengths=kind == 0)
        elif kind == 4 and text:
            flipped = bytearray(text)
            _damage(flipped, source, lengths=True)
            text = bytes(flipped)
        else:
            text = _rewritten(text, source)
    body = text + bytes(payload)
    return _wire.PREFIX.pack(magic, version, len(text), zlib.crc32(body)) + body


def _damage(data: bytearray, source: random.Random, lengths: bool) -> None:
    """Bytes flipped, overwritten, cut off or repeated; the first ones and the last more often."""
    place = source.choice((source.randrange(len(data)), source.randrange(min(64, len(data))), len(data) - 1))
    what = source.randrange(4 if lengths else 2)
    if what == 0:
        data[place] ^= 1 << source.randrange(8)
    elif what == 1:
        noise = source.choice((b"\xff" * 4, b"\0" * 4, source.randbytes(4)))
        data[place : place + 4] = noise[: len(data) - place]
    elif what == 2:
        del data[place:]
        data += b"\0" * source.randrange(2)
    else:
        data[place:place] = data[place : place + 16]


def _rewritten(text: bytes, source: random.Random) -> bytes:
    """The header with one value changed, somewhere in it."""
    try:
        header = json.loads(text)
        places = list(_places(header))
    except (ValueError, RecursionError):
        return text
    if not places:
        return text
    holder, key = source.choice(places)
    holder[key] = _value(holder[key], source)
    if source.randrange(8) == 0 and isinstance(holder, dict):
        del holder[key]
    return json.dumps(header).encode()


def _places(node: Any) -> Any:
    keys = node if isinstance(node, dict) else range(len(node)) if isinstance(node, list) else ()
    for key in keys:
        yield node, key
        yield from _places(node[key])


def _value(old: Any, source: random.Random) -> Any:
    if isinstance(old, list) and source.randrange(2):
        return source.choice((old[:-1], old + old[-1:], old[::-1], [0, *old]))
    if type(old) is int and source.randrange(2):
        return source.choice((old + 1, old - 1, -old, old * 2, old * 256))
    if isinstance(old, str) and old in codecs.available() and source.randrange(2):
        return source.choice(codecs.available())
    if isinstance(old, str) and old in _wire.DTYPES and source.randrange(2):
        return source.choice(list(_wire.DTYPES))
    return source.choice(source.choice((_NUMBERS, _REALS, _OTHERS)))


def decoded(data: bytes) -> bool:
    """Whether these bytes decode; if not, by nothing but a FormatError."""
    try:
        packed = codecs.loads(data, max_bytes=MOST)
        back = codecs.get(packed.codec).unpack(packed)
    except FormatError:
        return False
    assert back.shape == packed.shape and back.dtype == packed.dtype and back.nbytes <= MOST
    return True

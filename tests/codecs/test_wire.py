"""Packed bytes: what is refused, and that bytes of earlier versions decode for ever."""

import hashlib
import json
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from squeezebox import codecs
from squeezebox.codecs import _wire
from squeezebox.codecs._chunks import ROW
from squeezebox.schema import FormatError

FROZEN = Path(__file__).parent.parent / "frozen" / "codecs-1"


def packed_bytes(name: str = "zero4") -> bytes:
    x = torch.randn(5000, generator=torch.Generator().manual_seed(0))
    return codecs.dumps(codecs.get(name).pack(x, 0.1 if "entropy" in name else None))


def rewritten(data: bytes, change: Callable[[dict[str, Any]], object]) -> bytes:
    """The same bytes with another header and a checksum that fits it."""
    magic, version, length, _ = _wire.PREFIX.unpack_from(data)
    header = json.loads(data[_wire.PREFIX.size : _wire.PREFIX.size + length])
    change(header)
    text = json.dumps(header).encode()
    body = text + data[_wire.PREFIX.size + length :]
    return _wire.PREFIX.pack(magic, version, len(text), zlib.crc32(body)) + body


@pytest.mark.parametrize("name", ("zero4", "entropy", "keep"))
def test_truncated_or_flipped_bytes_are_refused(name: str) -> None:
    data = packed_bytes(name)
    for cut in (0, 3, 15, 16, 40, len(data) - 1):
        with pytest.raises(FormatError):
            codecs.loads(data[:cut])
    for position in range(0, len(data), 97):
        flipped = bytearray(data)
        flipped[position] ^= 16
        with pytest.raises(FormatError):
            codecs.loads(bytes(flipped))
    with pytest.raises(FormatError):
        codecs.loads(data + b"x")


def test_newer_versions_are_refused_by_name() -> None:
    data = packed_bytes()
    with pytest.raises(FormatError, match="upgrade"):
        codecs.loads(data[:4] + struct.pack("<H", 2) + data[6:])
    with pytest.raises(FormatError, match="upgrade"):
        codecs.loads(rewritten(data, lambda header: header.update(codec_version=2)))


CHANGES: tuple[dict[str, Any], ...] = (
    {"codec": "zip"},
    {"codec": None},
    {"codec": "minmax4"},
    {"dtype": "complex1"},
    {"dtype": "float64"},
    {"shape": [6000]},
    {"shape": [-1]},
    {"shape": [5000, 2]},
    {"shape": "5000"},
    {"stride": [2]},
    {"stride": []},
    {"bound": 3},
    {"bound": "x"},
    {"meta": []},
    {"payload": []},
    {"payload": [["uint8", 10**12]]},
    {"payload": [["uint8", 2]]},
    {"payload": 7},
)


@pytest.mark.parametrize("change", CHANGES, ids=str)
def test_headers_that_lie_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(FormatError):
        codecs.loads(rewritten(packed_bytes(), lambda header: header.update(change)))


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=64), st.integers(0, 3000), st.sampled_from(("entropy", "huffman", "lossless")))
def test_damage_below_the_checksum_never_crashes(noise: bytes, at: int, kind: str) -> None:
    x = torch.randn(5000, generator=torch.Generator().manual_seed(0))
    codec = codecs.get("entropy" if kind == "huffman" else kind)
    packed = codec.pack(x, 0.1, lag=int(kind == "huffman"))
    blob = packed.payload[0]
    at = min(at, blob.numel() - len(noise))
    blob[at : at + len(noise)] = torch.tensor(list(noise), dtype=torch.uint8)
    try:
        back = codec.unpack(packed)
    except FormatError:
        return
    assert back.shape == x.shape


@pytest.mark.parametrize("dtype", (torch.float32, torch.float16))
@pytest.mark.parametrize("value", (1e300, float("nan"), float("-inf")))
@pytest.mark.parametrize("x", (torch.ones(300), torch.randn(300), torch.randn(9000)), ids=len)
def test_steps_and_constants_beyond_the_dtype_are_refused(x: Any, value: float, dtype: torch.dtype) -> None:
    packed = codecs.get("entropy").pack(x.to(dtype), 0.1)
    packed.payload[1].numpy().view(ROW)["value"] = value
    with pytest.raises(FormatError, match="damaged"):
        codecs.get("entropy").unpack(codecs.loads(codecs.dumps(packed)))


@pytest.mark.parametrize("meta", ({"lag": 2**70}, {"lag": 0, "inner": 2**70}, {"lag": -1}))
def test_distances_beyond_memory_are_refused(meta: dict[str, int]) -> None:
    with pytest.raises(FormatError, match="damaged"):
        codecs.loads(rewritten(packed_bytes("entropy"), lambda header: header.update(meta=meta)))


def test_packed_by_another_codec_is_refused() -> None:
    packed = codecs.get("zero4").pack(torch.ones(3))
    with pytest.raises(FormatError, match="minmax4"):
        codecs.get("minmax4").unpack(packed)


@pytest.mark.parametrize("path", sorted(FROZEN.glob("*.sqz")), ids=lambda path: path.stem)
def test_bytes_of_version_1_decode_as_they_did(path: Path) -> None:
    packed = codecs.loads(path.read_bytes())
    back = codecs.get(packed.codec).unpack(packed)
    flat = back.as_strided((back.numel(),), (1,)).view(torch.uint8)
    expected = json.loads((FROZEN / "decoded.json").read_text())[path.stem]
    facts = {
        "sha256": hashlib.sha256(flat.numpy().tobytes()).hexdigest(),
        "shape": list(back.shape),
        "stride": list(back.stride()),
        "dtype": str(back.dtype),
    }
    assert facts == expected


def test_every_codec_has_frozen_bytes() -> None:
    held = {codecs.loads(path.read_bytes()).codec for path in FROZEN.glob("*.sqz")}
    assert held == set(codecs.available())

"""Packed bytes: what is refused, and that bytes of earlier versions decode for ever."""

import hashlib
import json
import random
import struct
import zlib
from collections.abc import Callable
from functools import lru_cache
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
from tests.codecs import mutations

_seeds = lru_cache(mutations.seeds)
FROZEN = Path(__file__).parent.parent / "frozen" / "codecs-1"


def packed_bytes(name: str = "zero4") -> bytes:
    x = torch.randn(5000, generator=torch.Generator().manual_seed(0))
    bound = 0.1 if name.startswith(("blocks", "entropy", "planes")) else None
    return codecs.dumps(codecs.get(name).pack(x, bound))


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
    packed = codec.pack(x, 0.1, codecs.Hints(lag=int(kind == "huffman")))
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


def test_bytes_that_claim_much_more_than_they_are_are_refused() -> None:
    index = torch.nn.functional.max_pool2d(torch.randn(1, 1, 8, 8), 2, return_indices=True)[1]
    pooled = codecs.dumps(codecs.get("pool-index").pack(index, kernel_size=2, input_shape=(8, 8)))
    zeros = codecs.dumps(codecs.get("entropy").pack(torch.zeros(1 << 19), 0.1))
    assert codecs.loads(zeros).numel == 1 << 19
    with pytest.raises(FormatError, match="2097152 bytes, above the 2097151 allowed.*max_bytes"):
        codecs.loads(zeros, max_bytes=(1 << 21) - 1)
    rows, chunk = 1 << 17, 1 << 18
    table = codecs.loads(zeros).payload[1][: ROW.itemsize].repeat(rows)
    claimed = rewritten(zeros[: len(zeros) - 2 * ROW.itemsize], lambda header: None)
    magic, version, length, _ = _wire.PREFIX.unpack_from(claimed)
    header = json.loads(claimed[_wire.PREFIX.size : _wire.PREFIX.size + length])
    header |= {"shape": [rows * chunk], "payload": [["uint8", 0], ["uint8", table.numel()]]}
    text = json.dumps(header).encode()
    body = text + table.numpy().tobytes()
    with pytest.raises(FormatError, match="137438953472 bytes"):
        codecs.loads(_wire.PREFIX.pack(magic, version, len(text), zlib.crc32(body)) + body)
    for shape in ([0, 1, 16384, 16384], [1, 0, 1 << 40, 1 << 40]):
        change = {"shape": shape, "stride": [1] * 4, "payload": [["uint8", 0]]}
        empty = rewritten(pooled[: -codecs.loads(pooled).nbytes], lambda header, c=change: header.update(c))
        try:
            packed = codecs.loads(empty)
        except FormatError:
            assert shape[2] > 1 << 20
        else:
            assert codecs.get("pool-index").unpack(packed).shape == torch.Size(shape)


@pytest.mark.parametrize("depth", (10, 200_000))
def test_headers_that_nest_are_refused(depth: int) -> None:
    text = b"[" * depth + b"]" * depth
    with pytest.raises(FormatError):
        codecs.loads(_wire.PREFIX.pack(b"SQZB", 1, len(text), zlib.crc32(text)) + text)


def test_every_codec_has_its_ranges() -> None:
    assert set(_wire.CLAIMS) == set(codecs.available())


def test_mutations_decode_or_are_refused() -> None:
    source, whole = random.Random(0), mutations.seeds()
    assert all(mutations.decoded(each) for each in whole)
    results = [mutations.decoded(mutations.mutated(source.choice(whole), source)) for _ in range(4000)]
    assert 200 < sum(results) < 3800


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 11))
def test_many_mutations_decode_or_are_refused(seed: int) -> None:
    source, whole = random.Random(seed), mutations.seeds()
    for _ in range(20_000):
        mutations.decoded(mutations.mutated(source.choice(whole), source))


@given(data=st.data())
def test_drawn_mutations_decode_or_are_refused(data: st.DataObject) -> None:
    source = data.draw(st.randoms(use_true_random=False))
    mutations.decoded(mutations.mutated(source.choice(_seeds()), source))


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

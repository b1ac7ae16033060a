"""The torch operators `squeezebox::*`: schema, shapes for tracing, and one kernel a backend.

`CompositeExplicitAutograd` holds the plain-torch reference, which serves every device without its own
kernel; `CPU` holds the compiled loops where numba is installed, `CUDA` the Triton kernels where triton is.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from squeezebox.codecs import _chunks, _kernels
from squeezebox.codecs._reference import _blocks, _groups, _planes, _states

LIBRARY = torch.library.Library("squeezebox", "FRAGMENT")  # noqa: TOR901


def _bytes(numel: Any, bits: int) -> Any:
    return (numel + 255) // 256 * (32 * bits)


def _fake_codes(flat: Tensor, bits: int) -> Tensor:
    return flat.new_empty(_bytes(flat.numel(), bits), dtype=torch.uint8)


def _fake_scales(flat: Tensor, count: int) -> Tensor:
    groups = (flat.numel() + 255) // 256
    return flat.new_empty(count * groups, dtype=_groups.compute_dtype(flat.dtype))


def _fake_groups(count: int) -> Callable[..., tuple[Tensor, Tensor]]:
    def fake(flat: Tensor, bits: int, stochastic: bool, seed: int) -> tuple[Tensor, Tensor]:
        return _fake_codes(flat, bits), _fake_scales(flat, count)

    return fake


def _fake_flag(flat: Tensor) -> Tensor:
    return flat.new_empty((), dtype=torch.bool)


def _fake_chunks(flat: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    context = torch.library.get_ctx()
    sizes = context.new_dynamic_size(), context.new_dynamic_size()
    blob, table = (torch.empty(size, dtype=torch.uint8, device="cpu") for size in sizes)
    return blob, table


def _fake_planes(flat: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    heads = flat.new_empty((flat.numel() + 255) // 256, dtype=torch.int16)
    return heads, flat.new_empty(torch.library.get_ctx().new_dynamic_size(), dtype=torch.uint8)


def _nothing(*_: object) -> None:
    return None


_STATES = ("_squares", "_signed", "_short")
_PACK_CHUNKS, _UNPACK_CHUNKS = _chunks.operators(_chunks.REFERENCE)

# name, schema, reference, shapes for tracing
OPERATORS: tuple[tuple[str, str, Callable[..., Any], Callable[..., Any]], ...] = (
    (
        "pack_zero",
        "(Tensor flat, int bits, bool stochastic, int seed) -> (Tensor, Tensor)",
        _groups.pack_zero,
        _fake_groups(1),
    ),
    (
        "unpack_zero",
        "(Tensor codes, Tensor scales, int bits, bool stochastic, Tensor(a!) out) -> ()",
        _groups.unpack_zero,
        _nothing,
    ),
    (
        "pack_minmax",
        "(Tensor flat, int bits, bool stochastic, int seed) -> (Tensor, Tensor)",
        _groups.pack_minmax,
        _fake_groups(2),
    ),
    (
        "unpack_minmax",
        "(Tensor codes, Tensor scales, int bits, Tensor(a!) out) -> ()",
        _groups.unpack_minmax,
        _nothing,
    ),
    (
        "pack_nonzero",
        "(Tensor flat, float value, bool negative) -> (Tensor, Tensor)",
        _groups.pack_nonzero,
        lambda flat, value, negative: (_fake_codes(flat, 1), _fake_flag(flat)),
    ),
    ("pack_positive", "(Tensor flat) -> Tensor", _groups.pack_positive, lambda flat: _fake_codes(flat, 1)),
    (
        "pack_between",
        "(Tensor flat, float lower, float upper, bool inclusive) -> Tensor",
        _groups.pack_between,
        lambda flat, lower, upper, inclusive: _fake_codes(flat, 1),
    ),
    (
        "unpack_bits",
        "(Tensor packed, float zero, float one, Tensor(a!) out) -> ()",
        _groups.unpack_bits,
        _nothing,
    ),
    (
        "pack_codes",
        "(Tensor codes, int bits) -> Tensor",
        _groups.pack_codes,
        _fake_codes,
    ),
    (
        "unpack_codes",
        "(Tensor packed, int bits, int numel) -> Tensor",
        lambda packed, bits, numel: _groups.unpack_codes(packed, bits, numel).contiguous(),
        lambda packed, bits, numel: packed.new_empty(numel),
    ),
    (
        "pack_blocks",
        "(Tensor flat, float bound, Tensor? scale, int inner, int dither, Tensor(a!) arena,"
        " Tensor(b!) spill, Tensor(c!) counters, int slot) -> Tensor",
        _blocks.pack_blocks,
        lambda flat, *_: flat.new_empty((flat.numel() + 1023) // 1024 * 2, dtype=torch.int32),
    ),
    (
        "unpack_blocks",
        "(Tensor arena, Tensor spill, Tensor table, float bound, Tensor? scale, int inner, int dither,"
        " Tensor(a!) out)"
        " -> ()",
        _blocks.unpack_blocks,
        _nothing,
    ),
    (
        "pack_planes",
        "(Tensor flat, float bound, bool keep_sign, Tensor? scale, int inner) -> (Tensor, Tensor)",
        _planes.pack_planes,
        _fake_planes,
    ),
    (
        "unpack_planes",
        "(Tensor heads, Tensor packed, float bound, bool keep_sign, Tensor? scale, int inner,"
        " Tensor(a!) out) -> ()",
        _planes.unpack_planes,
        _nothing,
    ),
    (
        "pack_offsets",
        "(Tensor indices, Tensor base, Tensor places, int inner) -> (Tensor, Tensor)",
        _groups.pack_offsets,
        lambda indices, base, places, inner: (
            indices.new_empty(indices.numel(), dtype=torch.uint8),
            _fake_flag(indices),
        ),
    ),
    (
        "unpack_offsets",
        "(Tensor codes, Tensor base, Tensor places, int inner, Tensor(a!) out) -> ()",
        _groups.unpack_offsets,
        _nothing,
    ),
    (
        "pack_chunks",
        "(Tensor flat, float bound, bool keep_sign, int lag, Tensor? scale, int inner, int dither,"
        " Tensor(a!)? room=None) -> (Tensor, Tensor)",
        _PACK_CHUNKS,
        _fake_chunks,
    ),
    (
        "unpack_chunks",
        "(Tensor blob, Tensor table, bool keep_sign, int lag, Tensor? scale, int inner, int dither,"
        " Tensor(a!) out) -> ()",
        _UNPACK_CHUNKS,
        _nothing,
    ),
    (
        "pack_squares",
        "(Tensor flat, int key, int start, Tensor(a!) codes, Tensor(b!) heads) -> ()",
        _states.pack_squares,
        _nothing,
    ),
    (
        "unpack_squares",
        "(Tensor codes, Tensor heads, Tensor(a!) out) -> ()",
        _states.unpack_squares,
        _nothing,
    ),
    (
        "pack_signed",
        "(Tensor flat, Tensor? squares, int key, int start, Tensor(a!) codes, Tensor(b!) steps) -> ()",
        _states.pack_signed,
        _nothing,
    ),
    (
        "unpack_signed",
        "(Tensor codes, Tensor steps, Tensor? squares, Tensor(a!) out) -> ()",
        _states.unpack_signed,
        _nothing,
    ),
    (
        "pack_short",
        "(Tensor flat, int key, int start, Tensor(a!) codes) -> ()",
        _states.pack_short,
        _nothing,
    ),
    ("unpack_short", "(Tensor codes, Tensor(a!) out) -> ()", _states.unpack_short, _nothing),
)


def _register() -> None:
    for name, schema, reference, fake in OPERATORS:
        LIBRARY.define(name + schema)
        LIBRARY.impl(name, reference, "CompositeExplicitAutograd")
        torch.library.register_fake(f"squeezebox::{name}", fake, lib=LIBRARY)
    if find_spec("numba") is not None:
        from squeezebox.codecs import _cpu

        for name, kernel in _cpu.KERNELS.items():
            LIBRARY.impl(name, _compiled_first(kernel, _family(name)), "CPU")
    if find_spec("triton") is not None:
        for name, *_ in OPERATORS:
            if not name.endswith(("chunks", *_STATES)):
                LIBRARY.impl(name, _in_triton(name), "CUDA")


def _family(name: str) -> str:
    """Of kernels that are compiled together."""
    if name.endswith(_STATES):
        return "states"
    if name.endswith("_blocks"):
        return "blocks"
    return "groups" if name.endswith(("_zero", "_minmax")) else "values"


def _compiled_first(kernel: Callable[..., Any], family: str) -> Callable[..., Any]:
    """The kernel, all whose dtypes' kernels are compiled before the first call: together, and alone."""
    known: set[torch.dtype] = set()

    def call(*arguments: Any) -> Any:
        for each in arguments:
            if isinstance(each, Tensor) and each.dtype not in known:
                _kernels.require(each.dtype, family)
                known.add(each.dtype)
        return kernel(*arguments)

    return call


def _in_triton(name: str) -> Callable[..., Any]:
    def call(*arguments: Any) -> Any:
        from squeezebox.codecs import _triton  # by the first call on a device: its import takes long

        return _triton.KERNELS[name](*arguments)

    return call


_register()

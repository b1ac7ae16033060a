"""The operators `squeezebox::add_normals` and `scale_normals`: noise that no tensor holds.

Plain torch serves every device; on a CPU compiled loops do where numba is installed, to the same bits.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec

import torch
from torch import Tensor

from squeezebox import codecs
from squeezebox.layers._normals import normals

_LIBRARY = torch.library.Library("squeezebox", "FRAGMENT")  # noqa: TOR901
_KEY = "int seed, int draw, int sample, int module"
_BLOCK = 1024
_LEAST = 64  # blocks of a thread's part: fewer are not worth waking it


def add_reference(values: Tensor, mean: Tensor, seed: int, draw: int, sample: int, module: int) -> None:
    """``values`` <- ``mean`` + ``values`` * normals, with one rounding more to a dtype of 16 bits."""
    noise = normals(values.numel(), seed, draw, sample, module, values.device).view(values.shape)
    wide = torch.promote_types(values.dtype, torch.float32)
    values.copy_(mean.to(wide) + values.to(wide) * noise)


def scale_reference(values: Tensor, seed: int, draw: int, sample: int, module: int) -> None:
    """``values`` <- ``values`` * normals."""
    noise = normals(values.numel(), seed, draw, sample, module, values.device).view(values.shape)
    values.copy_(values.to(torch.promote_types(values.dtype, torch.float32)) * noise)


def _add(values: Tensor, mean: Tensor, seed: int, draw: int, sample: int, module: int) -> None:
    from squeezebox.layers import _normal_loops  # loads numba

    wide = torch.promote_types(values.dtype, torch.float32)
    flat, middle = values.to(wide).view(-1), mean.to(wide).reshape(-1).numpy()
    array, key = flat.numpy(), _normal_loops.key(seed, draw, sample, module)

    def work(first: int, last: int) -> None:
        _normal_loops.add(array[first:last], middle[first:last], first, *key)

    _in_parts(work, flat.numel())
    _give(flat, values)


def _scale(values: Tensor, seed: int, draw: int, sample: int, module: int) -> None:
    from squeezebox.layers import _normal_loops

    flat = values.to(torch.promote_types(values.dtype, torch.float32)).view(-1)
    array, key = flat.numpy(), _normal_loops.key(seed, draw, sample, module)

    def work(first: int, last: int) -> None:
        _normal_loops.scale(array[first:last], first, *key)

    _in_parts(work, flat.numel())
    _give(flat, values)


def _give(flat: Tensor, values: Tensor) -> None:
    """What was computed in float32, to values of 16 bits; others were worked in place."""
    if flat.dtype != values.dtype:
        values.view(-1).copy_(flat)


def _in_parts(work: Callable[[int, int], None], numel: int) -> None:
    """``work(first, last)`` over the elements, whole blocks a thread."""
    parts = codecs.spans(-(-numel // _BLOCK), _LEAST)

    def one(index: int) -> None:
        first, last = parts[index]
        work(first * _BLOCK, min(last * _BLOCK, numel))

    codecs.in_threads(one, len(parts))


def _register() -> None:
    _LIBRARY.define(f"add_normals(Tensor(a!) values, Tensor mean, {_KEY}) -> ()")
    _LIBRARY.define(f"scale_normals(Tensor(a!) values, {_KEY}) -> ()")
    compiled = find_spec("numba") is not None
    for name, reference, kernel in (
        ("add_normals", add_reference, _add),
        ("scale_normals", scale_reference, _scale),
    ):
        _LIBRARY.impl(name, reference, "CompositeExplicitAutograd")
        torch.library.register_fake(f"squeezebox::{name}", lambda *_: None, lib=_LIBRARY)
        if compiled:
            _LIBRARY.impl(name, kernel, "CPU")


_register()

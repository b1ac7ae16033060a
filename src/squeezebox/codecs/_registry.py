"""The codecs by name: one row each."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from itertools import product

import torch

from squeezebox.codecs import _ops  # noqa: F401  (registers the operators the codecs call)
from squeezebox.codecs._blocks import Blocks, Planes
from squeezebox.codecs._codec import FLOATS, Codec
from squeezebox.codecs._elementwise import Cast, Keep, Narrow
from squeezebox.codecs._entropy import Entropy, Lossless
from squeezebox.codecs._flags import Interval, Mask, PoolIndex, Sign
from squeezebox.codecs._groups import MINMAX, ZERO, Groups
from squeezebox.codecs._kernels import require
from squeezebox.schema import OptionError

_LOADING = 1 << 18  # elements, enough for several threads


def _exact() -> Iterator[Codec]:
    yield Keep(name="keep", exact=True, preserves_sign=True, fixed_size=True)
    yield Mask(name="mask", exact=True, preserves_sign=True, fixed_size=True)
    yield Narrow(name="narrow", exact=True, preserves_sign=True, fixed_size=False)
    yield PoolIndex(name="pool-index", exact=True, preserves_sign=True, fixed_size=True)
    yield Lossless(name="lossless", exact=True, preserves_sign=True, fixed_size=False)


def _flags() -> Iterator[Codec]:
    yield Sign(name="sign", exact=False, preserves_sign=False, fixed_size=True)
    yield Interval(name="interval", exact=False, preserves_sign=False, fixed_size=True)


def _groups() -> Iterator[Codec]:
    families = (("zero", ZERO, True), ("minmax", MINMAX, False))
    for bits, (family, levels, signs) in product((8, 4, 3, 2), families):
        for suffix, stochastic in (("", False), ("-stochastic", True)):
            yield Groups(
                name=f"{family}{bits}{suffix}",
                exact=False,
                preserves_sign=signs and not stochastic,
                fixed_size=True,
                levels=levels,
                bits=bits,
                stochastic=stochastic,
            )


def _casts() -> Iterator[Codec]:
    rows = (
        ("bf16", torch.bfloat16, False),
        ("fp8-e4m3", torch.float8_e4m3fn, True),
        ("fp8-e5m2", torch.float8_e5m2, True),
    )
    for name, target, scaled in rows:
        yield Cast(
            name=name, exact=False, preserves_sign=False, fixed_size=True, target=target, scaled=scaled
        )


def _variable() -> Iterator[Codec]:
    yield Blocks(name="blocks", exact=False, preserves_sign=True, fixed_size=False)
    for name, keeps in (("planes", False), ("planes-sign", True)):
        yield Planes(name=name, exact=False, preserves_sign=keeps, fixed_size=False, keep_sign=keeps)
    for name, keeps in (("entropy", False), ("entropy-sign", True)):
        yield Entropy(
            name=name,
            exact=False,
            preserves_sign=keeps,
            fixed_size=False,
            keep_sign=keeps,
        )


@lru_cache(maxsize=1)
def _table() -> dict[str, Codec]:
    rows = (_exact, _flags, _groups, _casts, _variable)
    return {codec.name: codec for family in rows for codec in family()}


def available() -> tuple[str, ...]:
    """Names of all codecs."""
    return tuple(_table())


def register(codec: Codec) -> None:
    """Make a codec of your own known by its name in this process, to sessions, :func:`get` and :func:`loads`.

    Raises:
        OptionError: another codec has this name.
    """
    known = _table().setdefault(codec.name, codec)
    if known != codec:
        raise OptionError(
            f"there is a codec '{codec.name}' already, {type(known).__name__}; give yours another name."
        )


def load_kernels(dtype: torch.dtype) -> None:
    """Have what packing this dtype on a CPU takes of a process's memory: kernels, and threads with heaps."""
    require(dtype)
    values = torch.linspace(-1.0, 1.0, _LOADING, device="cpu").to(dtype if dtype in FLOATS else torch.float32)
    get("entropy").pack(values, 0.1)
    get("mask").pack(values > 0)


def get(name: str) -> Codec:
    """The codec of this name; OptionError, listing the names, if there is none."""
    codec = _table().get(name)
    if codec is None:
        raise OptionError(f"no codec '{name}'; there are {', '.join(available())}.")
    return codec

"""What packed bytes may claim: for each codec its dtypes, and the range of each of its scalars."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

import torch

from squeezebox.codecs._codec import FLOATS, INTEGERS
from squeezebox.codecs._packed import Packed
from squeezebox.schema import FormatError

# No distance between elements reaches so far.
FARTHEST = 1 << 48
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

"""The contract every codec signs, and the checks they share."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from squeezebox.codecs._hints import NO_HINTS, Hints
from squeezebox.codecs._layout import layout_of
from squeezebox.codecs._packed import Packed
from squeezebox.schema import CodecError, FormatError, OptionError

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
SIGNED = (torch.int8, torch.int16, torch.int32, torch.int64)
INTEGERS = (*SIGNED, torch.uint8)


@dataclass(frozen=True, kw_only=True, slots=True)
class Codec(ABC):
    """Tensor to packed bytes and back: ``|x - unpack(pack(x))| <= packed.bound``, elementwise.

    Zeros come back as zeros. ``exact``: to the bit. ``preserves_sign``: positives stay positive and
    negatives negative. ``fixed_size``: the packed size follows from the shape alone.
    """

    name: str
    exact: bool
    preserves_sign: bool
    fixed_size: bool
    version: int = 1

    @abstractmethod
    def pack(self, tensor: Tensor, bound: float | None = None, hints: Hints = NO_HINTS) -> Packed:
        """Pack a tensor.

        Args:
            tensor: any shape and strides.
            bound: largest absolute error allowed for any element; None where the codec needs none.
            hints: what helps, if anything is known.

        Raises:
            CodecError: the format cannot hold this tensor within this bound.
            OptionError: an argument is out of range.
        """

    @abstractmethod
    def unpack(self, packed: Packed, out: Tensor | None = None) -> Tensor:
        """Give the tensor back in its dtype, shape, strides and device.

        Args:
            packed: what ``pack`` of the same codec returned.
            out: flat buffer of the right dtype and at least ``packed.numel`` elements; the result is a
                view of it.

        Raises:
            FormatError: packed by another codec, or its parts do not fit together.
        """

    @abstractmethod
    def check(self, packed: Packed) -> None:
        """Raise FormatError unless the payload's sizes agree with the shape, so decoding is safe."""


def kind_of(dtype: torch.dtype) -> str:
    """``"float"``, ``"integer"`` or ``"bool"``, by the codecs for it; ``"other"`` where only 'keep' is."""
    if dtype == torch.bool:
        return "bool"
    return "float" if dtype in FLOATS else "integer" if dtype in INTEGERS else "other"


def require_float(codec: str, tensor: Tensor) -> None:
    """Raise CodecError unless the dtype is one the lossy codecs hold."""
    if tensor.dtype not in FLOATS:
        raise CodecError(
            f"codec '{codec}' packs float32, bfloat16, float16 and float64, not {tensor.dtype}; "
            "use 'narrow' for integers, 'mask' for booleans or 'keep' for anything."
        )


def require_bound(codec: str, bound: float | None) -> float:
    """The bound as a finite float >= 0, or OptionError."""
    if bound is None or not math.isfinite(bound) or bound < 0:
        raise OptionError(f"codec '{codec}' needs a finite bound >= 0, got {bound!r}.")
    return float(bound)


def refuse_scale(codec: str, hints: Hints) -> None:
    """OptionError if the bound is in units of a scale."""
    if hints.scale is not None:
        raise OptionError(f"codec '{codec}' takes no scale; use 'entropy', 'planes' or 'blocks'.")


def require_scale(codec: str, scale: Tensor, inner: int) -> None:
    """OptionError unless there is one positive finite float32 factor a channel."""
    if scale.dtype != torch.float32 or scale.dim() != 1:
        raise OptionError(f"codec '{codec}' takes a 1-D float32 scale, got {scale.dim()}-D {scale.dtype}.")
    low, high = scale.aminmax() if scale.numel() else (scale.new_zeros(()), scale.new_zeros(()))
    if inner < 1 or not 0.0 < float(low) <= float(high) < math.inf:  # NaN is neither
        raise OptionError(f"codec '{codec}' needs inner >= 1 (got {inner}) and positive finite scales.")


def within(codec: str, reached: float, bound: float | None) -> float:
    """``reached`` if it satisfies the bound asked for, else CodecError with both numbers."""
    if bound is not None and not reached <= require_bound(codec, bound):
        raise CodecError(
            f"codec '{codec}' reaches an error bound of {reached:.6g} on this tensor, above the "
            f"{bound:.6g} asked for; give it more bits or use an 'entropy' codec."
        )
    return reached


def make_packed(
    codec: Codec,
    tensor: Tensor,
    bound: float,
    payload: tuple[Tensor, ...],
    meta: Mapping[str, int | float] | None = None,
) -> Packed:
    """A Packed that remembers the tensor's geometry; strides as ``flatten`` reads them."""
    return Packed(
        codec=codec.name,
        version=codec.version,
        shape=tuple(tensor.shape),
        stride=layout_of(tensor),
        dtype=tensor.dtype,
        device=tensor.device,
        bound=bound,
        payload=payload,
        meta=dict(meta or {}),
    )


def require_own(codec: Codec, packed: Packed) -> None:
    """Raise FormatError unless this codec, in this version or an older one, packed it."""
    if packed.codec != codec.name or packed.version > codec.version:
        raise FormatError(
            f"packed by '{packed.codec}' version {packed.version}, but asked to be unpacked by "
            f"'{codec.name}' version {codec.version}; use codecs.get(packed.codec) of a recent release."
        )


def expect_parts(packed: Packed, *parts: tuple[torch.dtype, int]) -> None:
    """Raise FormatError unless the payload has exactly these (dtype, length) parts."""
    found = tuple((part.dtype, part.numel()) for part in packed.payload)
    if found != parts:
        raise FormatError(f"packed by '{packed.codec}': expected parts {parts}, found {found}; damaged.")

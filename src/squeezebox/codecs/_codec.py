"""The contract every codec signs: what goes in and comes out, memory order, and the checks they share."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from squeezebox.schema import CodecError, FormatError, OptionError

if TYPE_CHECKING:
    from squeezebox.codecs._blocks import Arena


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Packed:
    """One packed tensor: everything needed to decode it, and the error it guarantees.

    ``|x - unpack(packed)| <= bound`` for every element (0.0: exact to the bit; infinity: only what the
    codec names is kept, such as the sign). ``meta`` holds the codec's scalars; docs/formats.md lists them.
    """

    codec: str
    version: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    bound: float
    payload: tuple[torch.Tensor, ...]
    meta: Mapping[str, int | float] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Bytes really held: codes, scales and tables."""
        return sum(part.numel() * part.element_size() for part in self.payload)

    @property
    def numel(self) -> int:
        """Elements of the tensor that was packed."""
        count = 1
        for size in self.shape:
            count *= size
        return count


@dataclass(frozen=True, kw_only=True, slots=True)
class Hints:
    """What helps to pack a tensor. All but a scale may be ignored.

    ``scale`` (float32, one positive number a channel): the bound is in its units. ``inner`` elements next to
    each other in memory share a channel, and the channels repeat: the number of pixels of an NCHW map, 1 for
    channels_last. A codec that cannot do so refuses a scale, unless it is exact.

    ``lag`` is the distance, in elements of memory order, to the one that resembles each (0: none, -1: choose
    by a trial). ``dither`` > 0 moves the steps by another phase every ``dither`` elements, so that equal
    values do not have equal errors; 0: all share one. ``seed`` is that of stochastic rounding. ``room`` are
    flat bytes of the host in which the result is made where it fits, ``arena`` is where blocks go.
    """

    lag: int = -1
    scale: Tensor | None = None
    inner: int = 1
    dither: int = 0
    seed: int = 0
    room: Tensor | None = None
    arena: Arena | None = None


NO_HINTS = Hints()


def is_dense(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether these strides visit ``numel`` neighbouring elements once each (any order of dims)."""
    expected = 1
    for step, size in sorted((st, sz) for sz, st in zip(shape, stride, strict=True) if sz != 1):
        if step != expected:
            return False
        expected *= size
    return True


def contiguous_stride(shape: Sequence[int]) -> tuple[int, ...]:
    """Row-major strides of a shape."""
    stride: list[int] = []
    step = 1
    for size in reversed(shape):
        stride.append(step)
        step *= max(size, 1)
    return tuple(reversed(stride))


def layout_of(tensor: Tensor) -> tuple[int, ...]:
    """The strides the tensor will come back with: its own if dense, else row-major."""
    if tensor.numel() and (tensor.is_contiguous() or is_dense(tensor.shape, tensor.stride())):
        return tuple(tensor.stride())
    return contiguous_stride(tensor.shape)


def flatten(tensor: Tensor) -> Tensor:
    """Elements in memory order, 1-D and contiguous: a view where the layout is dense, else a copy."""
    if tensor.layout is not torch.strided:
        raise CodecError(f"only strided tensors can be packed, not layout {tensor.layout}; use to_dense().")
    tensor = tensor.detach().resolve_conj().resolve_neg()
    if tensor.numel() == 0:
        return tensor.new_empty(0)
    if tensor.is_contiguous():
        return tensor.view(-1)
    if is_dense(tensor.shape, tensor.stride()):
        return tensor.as_strided((tensor.numel(),), (1,))
    return tensor.contiguous().view(-1)


def buffer_for(packed: Packed, out: Tensor | None) -> Tensor:
    """Where to decode to: the first ``numel`` elements of ``out``, or a new flat tensor."""
    if out is None:
        return torch.empty(packed.numel, dtype=packed.dtype, device=packed.device)
    if out.dtype != packed.dtype or out.dim() != 1 or not out.is_contiguous() or out.numel() < packed.numel:
        raise CodecError(
            f"out must be a flat contiguous {packed.dtype} tensor of at least {packed.numel} elements, "
            f"got {out.dtype} of shape {tuple(out.shape)}."
        )
    return out[: packed.numel]


def restore(flat: Tensor, packed: Packed) -> Tensor:
    """The flat elements seen with the packed tensor's shape and strides."""
    return flat.as_strided(packed.shape, packed.stride)


FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
SIGNED = (torch.int8, torch.int16, torch.int32, torch.int64)
INTEGERS = (*SIGNED, torch.uint8)
# No distance between elements reaches so far.
FARTHEST = 1 << 48


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


def require_scale(codec: str, scale: Tensor, inner: int) -> float:
    """The largest factor; OptionError unless there is one positive finite float32 factor a channel."""
    if scale.dtype != torch.float32 or scale.dim() != 1:
        raise OptionError(f"codec '{codec}' takes a 1-D float32 scale, got {scale.dim()}-D {scale.dtype}.")
    low, high = (float(each) for each in scale.aminmax()) if scale.numel() else (0.0, 0.0)
    if inner < 1 or not 0.0 < low <= high < math.inf:  # NaN is neither
        raise OptionError(f"codec '{codec}' needs inner >= 1 (got {inner}) and positive finite scales.")
    return high


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

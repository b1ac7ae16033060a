"""How a tensor lies in memory, as codecs want to know it, and reused buffers to decode into."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from squeezebox import codecs


@dataclass(slots=True, eq=False)
class _Buffer:
    data: torch.Tensor
    owner: Callable[[], object | None]

    def is_idle(self) -> bool:
        storage = self.data.untyped_storage()
        # One use is the buffer's own tensor, one the storage object made on the line above.
        return torch._C._storage_Use_Count(storage._cdata) <= 2


def _nobody() -> None:
    """The owner of a buffer that has none."""


class Arena:
    """Hands out flat CPU buffers and takes them back once nothing else refers to their storage.

    At most one idle buffer outlives a request, so that reuse does not raise the step's peak. A buffer whose
    contents were decoded for the same owner is handed out again as it is.
    """

    def __init__(self) -> None:
        self._buffers: list[_Buffer] = []

    def filled(
        self, owner: object, numel: int, dtype: torch.dtype, fill: Callable[[torch.Tensor], object]
    ) -> torch.Tensor:
        """A flat buffer that ``fill`` has filled for ``owner``, now or before; others that are idle go."""
        for found in self._buffers:
            if found.owner() is owner:
                self._buffers = [each for each in self._buffers if each is found or not each.is_idle()]
                return found.data.view(dtype)
        buffer = self._take(numel * dtype.itemsize)
        flat = buffer.data.view(dtype)
        fill(flat)
        buffer.owner = weakref.ref(owner)  # not before: it may be interrupted
        return flat

    def _take(self, nbytes: int) -> _Buffer:
        """A uint8 buffer of ``nbytes``, of no owner."""
        idle = [buffer for buffer in self._buffers if buffer.is_idle()]
        chosen = next((b for b in idle if b.data.numel() == nbytes), None)
        self._buffers = [b for b in self._buffers if b is chosen or b not in idle]
        idle.clear()
        if chosen is None:
            chosen = _Buffer(torch.empty(nbytes, dtype=torch.uint8, device="cpu"), _nobody)
            self._buffers.append(chosen)
        chosen.owner = _nobody
        torch.autograd.graph.increment_version(chosen.data)  # who saved a part of it sees that it changes
        return chosen

    def owners(self) -> Iterator[object]:
        """Those whose bytes some buffer holds."""
        return (owner for buffer in self._buffers if (owner := buffer.owner()) is not None)

    def trim(self) -> None:
        """Let go of the buffers that nobody uses."""
        self._buffers = [buffer for buffer in self._buffers if not buffer.is_idle()]

    def clear(self) -> None:
        """Forget every buffer; those still in use live on with their users."""
        self._buffers.clear()


_DITHER_ROWS = 4
_DITHER_RUN = 1024
_BLOCK = 1 << 18  # elements


def flattened(tensor: torch.Tensor, numel: int | None = None) -> torch.Tensor:
    """Its storage's first ``numel`` elements, or all."""
    if numel is None:
        numel = tensor.untyped_storage().nbytes() // tensor.element_size()
    flat = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return flat.set_(tensor.untyped_storage(), 0, (numel,), (1,))


def has_nan(flat: torch.Tensor) -> bool:
    """Whether any element is NaN, found without memory for as many flags."""
    return flat.numel() > 0 and bool(flat.aminmax()[0].isnan())


def why_no_interval(flat: torch.Tensor, lower: float, upper: float) -> str:
    """Why one bit an element would not tell what hardtanh's backward sees; '' where it does."""
    if not lower < upper:
        return f"nothing lies between its limits {lower:g} and {upper:g}"
    own = torch.tensor((lower, upper), dtype=torch.float32).to(flat.dtype).tolist()
    wide = torch.tensor((lower, upper), dtype=torch.float32).tolist()
    if flat.dtype.itemsize < 4 and own != wide:
        return f"its limits {lower:g} and {upper:g} are compared in float32 and are none of {flat.dtype}"
    if not flat.is_cuda and has_nan(flat):
        return "it has NaN among its values, whose gradient some of torch's loops stop and others let pass"
    return ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Scale:
    """What a bound is in units of: one positive ``factor`` for ``inner`` neighbours in memory, in turn."""

    factors: torch.Tensor
    inner: int

    def multiply(self, tensor: torch.Tensor) -> None:
        """In place, a tensor that lies in memory as the scaled one does."""
        self._runs(tensor).mul_(self.factors.view(-1, 1))

    def divide(self, tensor: torch.Tensor) -> None:
        """The inverse of :meth:`multiply`."""
        self._runs(tensor).div_(self.factors.view(-1, 1))

    def _runs(self, tensor: torch.Tensor) -> torch.Tensor:
        return flattened(tensor, tensor.numel()).view(-1, self.factors.numel(), self.inner)


def scale_of(numel: int, tensor: torch.Tensor, options: Mapping[str, Any]) -> Scale | None:
    """The standard deviations that a tensor was normalised by, where the codec can use them.

    Those of channels (``inverse_by_channel``), or of rows, one after another in memory (``inverse_by_row``):
    a bound for all rows alike would be lost on wide ones and be the end of narrow ones.
    """
    by_channel, by_row = options.get("inverse_by_channel"), options.get("inverse_by_row")
    inverse = by_channel if by_row is None else by_row
    whole = tensor.storage_offset() == 0 and tensor.numel() == numel
    if inverse is None or not whole or (tensor.dtype != torch.float32 and not tensor.is_cuda):
        return None
    if by_row is None:
        inner = inner_of(tensor)
    else:
        inner = tensor.numel() // by_row.numel() if tensor.is_contiguous() else 0
    if inner == 0:
        return None
    factors = inverse.to(torch.float32).reciprocal().flatten()
    # on a device asking would wait; blocks that it does not serve are kept exactly
    usable = factors.is_cuda or _are_positive(factors)
    return Scale(factors=factors, inner=inner) if usable else None


def _are_positive(factors: torch.Tensor) -> bool:
    """And finite, all of them."""
    low, high = factors.aminmax()
    return 0.0 < float(low) <= float(high) < math.inf  # NaN is neither


def inner_of(tensor: torch.Tensor) -> int:
    """Neighbours in memory that share a channel (dim 1); 0 where that is not a fixed number."""
    if tensor.is_contiguous():
        return int(tensor.stride(1))
    last = torch.channels_last if tensor.dim() == 4 else torch.channels_last_3d
    return 1 if tensor.dim() in (4, 5) and tensor.is_contiguous(memory_format=last) else 0


def lag_of(tensor: torch.Tensor) -> int:
    """Distance in memory to the element of the row above, which predicts one best; 0 without rows."""
    return int(tensor.stride(2)) if tensor.dim() == 4 else 0


def dither_of(tensor: torch.Tensor) -> int:
    """Elements that share a phase of their rounding: a few rows, which still predict one another."""
    return _DITHER_ROWS * lag_of(tensor) or _DITHER_RUN


def is_default(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    """Whether a new tensor of that shape has these strides."""
    return torch.empty(shape, device="meta").stride() == stride


def placeholder(
    shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """A tensor of which nobody reads the values: one element seen everywhere.

    Kernels choose their memory format by the strides, so other layouts than the default one get memory
    of their own.
    """
    if is_default(shape, stride):
        return torch.zeros((), dtype=dtype, device=device).expand(shape)
    return torch.empty_strided(shape, stride, dtype=dtype, device=device)


def give_sign(flat: torch.Tensor, packed: codecs.Packed) -> None:
    """Make exactly those elements positive that were, and the others zero where they were made positive."""
    tiny = torch.finfo(flat.dtype).tiny
    for start in range(0, flat.numel(), _BLOCK):
        part = flat[start : start + _BLOCK]
        positive = torch.empty(part.numel(), dtype=torch.bool, device=flat.device)
        bits = packed.payload[0][start // 8 : (start + _BLOCK) // 8]
        torch.ops.squeezebox.unpack_bits(bits, 0.0, 1.0, positive.view(torch.uint8))
        part.copy_(torch.where(positive, part.clamp(min=tiny), part.clamp(max=0.0)))

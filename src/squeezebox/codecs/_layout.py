"""Any tensor as a flat run of its elements in memory order, and back."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from squeezebox.codecs._packed import Packed
from squeezebox.schema import CodecError


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
    if tensor.numel() and is_dense(tensor.shape, tensor.stride()):
        return tuple(tensor.stride())
    return contiguous_stride(tensor.shape)


def flatten(tensor: Tensor) -> Tensor:
    """Elements in memory order, 1-D and contiguous: a view where the layout is dense, else a copy."""
    if tensor.layout is not torch.strided:
        raise CodecError(f"only strided tensors can be packed, not layout {tensor.layout}; use to_dense().")
    tensor = tensor.detach().resolve_conj().resolve_neg()
    if tensor.numel() == 0:
        return tensor.new_empty(0)
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

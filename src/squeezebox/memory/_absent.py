"""Tensors that are not in memory."""

from __future__ import annotations

import torch


class Absent(torch.Tensor):
    """A tensor whose elements are not in memory; it has a shape and no storage."""

    @staticmethod
    def __new__(cls: type, like: torch.Tensor, *_: object, **__: object) -> Absent:
        made: Absent = torch.Tensor._make_wrapper_subclass(
            cls, like.shape, strides=like.stride(), dtype=like.dtype, device=like.device
        )
        return made

    def __repr__(self, **_: object) -> str:  # type: ignore[override]
        return f"{type(self).__name__}(shape={tuple(self.shape)}, dtype={self.dtype})"

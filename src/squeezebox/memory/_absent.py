"""Tensors that are not in memory."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from squeezebox.schema import CaptureError


class Absent(torch.Tensor):
    """A tensor whose elements are not in memory; it has a shape and no storage."""

    @staticmethod
    def __new__(cls: type, like: torch.Tensor, *_: object, **__: object) -> Absent:
        made: Absent = torch.Tensor._make_wrapper_subclass(
            cls, like.shape, strides=like.stride(), dtype=like.dtype, device=like.device
        )
        return made

    def parts(self) -> Iterable[torch.Tensor]:
        """What is in memory of it, in another form."""
        return ()

    def _refuse(self, *_: object, **__: object) -> Any:
        raise CaptureError(
            "a gradient, a frozen weight or a tensor of optimizer state has no memory to point at: under a "
            "plan with states=True it is in a file, packed, or used up. Take .clone() of one in a file."
        )

    data_ptr = untyped_storage = storage = __dlpack__ = _refuse

    def __repr__(self, **_: object) -> str:  # type: ignore[override]
        return f"{type(self).__name__}(shape={tuple(self.shape)}, dtype={self.dtype})"

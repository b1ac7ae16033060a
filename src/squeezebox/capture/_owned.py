"""Tensors that somebody else holds, so that holding something smaller in their place gains nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from squeezebox.capture._entries import is_plain
from squeezebox.memory import Absent


class Owned:
    """Parameters, buffers, the caller's inputs, by storage.

    Args:
        has_storage: whether a tensor is its storage seen through strides. All others count as owned.
    """

    def __init__(self, has_storage: Callable[[torch.Tensor], bool] = is_plain) -> None:
        self._has_storage = has_storage
        self._storages: dict[int, StorageWeakRef] = {}

    def add(self, tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """Name more of them; those are returned that have a storage."""
        owned = [
            tensor
            for given in tensors
            for tensor in (given.parts() if isinstance(given, Absent) else (given,))
            if self._has_storage(tensor)
            or (type(tensor) is torch.nn.Parameter and self._has_storage(tensor.data))
        ]
        for tensor in owned:
            storage = tensor.untyped_storage()
            self._storages[storage._cdata] = StorageWeakRef(storage)
        return owned

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor is one of them, or a view of a parameter."""
        if not self._has_storage(tensor) or isinstance(tensor._base, torch.nn.Parameter):
            return True
        owner = self._storages.get(tensor.untyped_storage()._cdata)
        return owner is not None and not owner.expired()

    def clear(self) -> None:
        """Forget all."""
        self._storages.clear()

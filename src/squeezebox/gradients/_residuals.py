"""What the ranks are still owed of every parameter's gradient, because packing lost it."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from squeezebox.schema import FormatError

Names = tuple[str, ...]


class Residuals:
    """Error feedback: what one exchange lost, the next one gets on top (arXiv:1901.09847, algorithm 1).

    Residuals belong to parameters, whatever buckets these come in. Those of a bucket's parameters lie in one
    flat tensor, in the bucket's order. All are float32, or float64 where the gradient is.
    """

    def __init__(self, sizes: Mapping[str, int]) -> None:
        self._sizes = sizes
        self._flats: dict[Names, Tensor] = {}
        self._parts: dict[str, Tensor] = {}

    def of(self, names: Names, dtype: torch.dtype) -> Tensor:
        """The flat residual of these parameters; changes to it are kept."""
        flat = self._flats.get(names)
        if flat is None:
            flat = torch.zeros(sum(self._sizes[name] for name in names), dtype=wide(dtype), device="cpu")
            parts = dict(zip(names, flat.split([self._sizes[name] for name in names]), strict=True))
            for name, part in parts.items():
                if name in self._parts:
                    part.copy_(self._parts[name])
            stale = [each for each in self._flats if not parts.keys().isdisjoint(each)]
            for each in stale:
                del self._flats[each]
            self._parts |= parts
            self._flats[names] = flat
        return flat

    def take(self, names: Names, dtype: torch.dtype) -> Tensor | None:
        """What is owed of these parameters, which is owed no more; None if nothing is."""
        if self._parts.keys().isdisjoint(names):
            return None
        flat = self.of(names, dtype)
        del self._flats[names]
        for name in names:
            del self._parts[name]
        return flat

    def state(self) -> dict[str, Tensor]:
        """By parameter, copied."""
        return {name: part.clone() for name, part in self._parts.items()}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Go on from :meth:`state`.

        Raises:
            FormatError: there is no such parameter, or it has another size.
        """
        for name, part in state.items():
            if self._sizes.get(name) != part.numel():
                raise FormatError(
                    f"the state has {part.numel()} elements owed of '{name}', and the model has "
                    f"{self._sizes.get(name, 'no such parameter')}. Load the state of the same model."
                )
        self._flats.clear()
        self._parts = {name: part.clone() for name, part in state.items()}


def wide(dtype: torch.dtype) -> torch.dtype:
    """What a gradient of this dtype is summed and packed in."""
    return torch.float64 if dtype == torch.float64 else torch.float32

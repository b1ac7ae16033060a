"""Which weights the profiled step reads only as autocast's bfloat16."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from squeezebox.optim import SMALL_BYTES, SplitWeights, splittable
from squeezebox.steps import TrainingStep


class CastWeights:
    """The optimizer's weights of which a step makes nothing but a cast to bfloat16, and how they are held.

    Args:
        step: one whose plan may split weights, under autocast; else there are none.
    """

    def __init__(self, step: TrainingStep) -> None:
        self._step = step
        self._found: dict[str, torch.nn.Parameter] = {}
        self._split: SplitWeights | None = None
        self.seconds = 0.0  # that a step takes to restore and to split them all again

    @property
    def names(self) -> tuple[str, ...]:
        """Once they are found."""
        return tuple(self._found)

    @property
    def rest_bytes(self) -> int:
        """What they have beyond bfloat16 in memory now, by itself."""
        return sum(each.nbytes // 2 for each in self._found.values()) if self._split else 0

    @contextlib.contextmanager
    def looking(self) -> Iterator[None]:
        """Around a step: find them."""
        optimizer, model = self._step.optimizer, self._step.model
        if not (self._step.splits_weights and optimizer and torch.is_autocast_enabled("cpu")):
            yield
            return
        stepped = {id(each) for group in optimizer.param_groups for each in group["params"]}
        weights = splittable(model, SMALL_BYTES)
        readings = _Readings({name: each for name, each in weights.items() if id(each) in stepped})
        with readings:
            yield
        cast = readings.cast - readings.read
        self._found = {name: each for name, each in weights.items() if name in cast}

    def split(self) -> None:
        """Hold them as a plan will."""
        if self._split is None:
            begun = time.perf_counter()
            self._split = SplitWeights(self._found)
            with torch.no_grad():
                for each in self._found.values():
                    each.sum()  # which restores it
            self.seconds = time.perf_counter() - begun

    def close(self) -> None:
        """Hold them as before."""
        if self._split is not None:
            self._split.close()
            self._split = None


class _Readings(TorchDispatchMode):
    """Sees every operator on the weights, or on views of them."""

    def __init__(self, weights: Mapping[str, torch.nn.Parameter]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.cast: set[str] = set()
        self.read: set[str] = set()
        self._names = {each.untyped_storage()._cdata: name for name, each in weights.items()}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        casts = func is _aten._to_copy.default and kwargs == {"dtype": torch.bfloat16}
        for each in () if func in _SAME else tree_leaves((args, kwargs)):
            name = self._names.get(_storage_of(each)) if isinstance(each, torch.Tensor) else None
            if name is not None:
                (self.cast if casts else self.read).add(name)
        return func(*args, **kwargs)


def _storage_of(tensor: torch.Tensor) -> int:
    return (
        tensor.untyped_storage()._cdata if type(tensor) in _PLAIN and tensor.layout is torch.strided else -1
    )


_aten: Any = torch.ops.aten
_SAME = (_aten.detach.default, _aten.alias.default)  # who computes with these shows
_PLAIN = (torch.Tensor, torch.nn.Parameter)

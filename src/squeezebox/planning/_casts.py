"""Which weights the profiled step reads only as autocast's bfloat16."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from squeezebox.optim import SMALL_BYTES, splittable
from squeezebox.steps import TrainingStep


@contextlib.contextmanager
def found_cast(step: TrainingStep, found: dict[str, torch.nn.Parameter]) -> Iterator[None]:
    """Around a step: note the optimizer's weights of which nothing but a cast to bfloat16 is made."""
    if not (step.splits_weights and step.optimizer and torch.is_autocast_enabled("cpu")):
        yield
        return
    stepped = {id(each) for group in step.optimizer.param_groups for each in group["params"]}
    weights = splittable(step.model, SMALL_BYTES)
    readings = _Readings({name: each for name, each in weights.items() if id(each) in stepped})
    with readings:
        yield
    found.update({name: weights[name] for name in weights if name in readings.cast - readings.read})


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

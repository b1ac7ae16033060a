"""What operators compute and move, counted as they are called; on fake tensors, too."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from squeezebox.schema import Work

aten: Any = torch.ops.aten


def _attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any) -> int:
    """Scores and weighted values: (batch, heads, length, channels)."""
    return 2 * query.shape[:-1].numel() * key.shape[-2] * (query.shape[-1] + value.shape[-1])


def _attention_backward(
    grad: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any
) -> int:
    """Scores once more, and both products' gradients by both of their factors."""
    return int(2.5 * _attention(query, key, value))


def _recurrent(inputs: torch.Tensor, weight: torch.Tensor, hidden: torch.Tensor, *_: Any, **__: Any) -> int:
    """One layer and direction: at each of length x batch, both weights once."""
    return 2 * inputs.shape[:-1].numel() * (weight.numel() + hidden.numel())


def _recurrent_backward(*args: Any, **kwargs: Any) -> int:
    return 2 * _recurrent(*args, **kwargs)


# On a CPU, where torch's own counter knows none.
_OWN: Mapping[Any, Callable[..., int]] = {
    aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
    aten.mkldnn_rnn_layer: _recurrent,
    aten.mkldnn_rnn_layer_backward: _recurrent_backward,
}


class WorkCount(TorchDispatchMode):
    """Counts within the context; :meth:`work` gives what came together."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._counts: Counter[tuple[int, int]] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if func.namespace != "prim" and not func.is_view:
            moved = _nbytes((args, kwargs)) + _nbytes(out)
            if moved:
                self._counts[_flops(func, args, kwargs, out), moved] += 1
        return out

    def work(self) -> tuple[Work, ...]:
        """Operators that are alike, in the order of the first one of each."""
        return tuple(
            Work(flops=flops, moved_bytes=moved, times=times)
            for (flops, moved), times in self._counts.items()
        )


def _flops(func: Any, args: Any, kwargs: Any, out: Any) -> int:
    packet = func.overloadpacket
    if packet in _OWN:
        return _OWN[packet](*args, **kwargs)
    return int(flop_registry[packet](*args, **kwargs, out_val=out)) if packet in flop_registry else 0


def _nbytes(values: Any) -> int:
    """Of the elements of all tensors, each once; one that is expanded is as large as what it repeats."""
    tensors = {id(each): each for each in tree_leaves(values) if isinstance(each, torch.Tensor)}
    return sum(map(_extent, tensors.values()))


def _extent(tensor: torch.Tensor) -> int:
    if tensor.layout is not torch.strided:
        return 0
    sizes = (n for n, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride != 0)
    return math.prod(sizes) * tensor.element_size()

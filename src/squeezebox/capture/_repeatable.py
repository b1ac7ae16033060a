"""Operators that give the same again, and the states of random generators that this takes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

# By name: those whose result depends on nothing but their arguments,
_PURE = (
    "relu relu_ leaky_relu leaky_relu_ relu6 hardtanh hardtanh_ hardswish hardsigmoid elu selu celu softplus "
    "mish gelu silu sigmoid sigmoid_ logsigmoid tanh tanh_ softmax log_softmax glu threshold softsign "
    "layer_norm group_norm rms_norm batch_norm normalize "
    "add add_ __iadd__ __radd__ sub sub_ __isub__ __rsub__ rsub mul mul_ __imul__ __rmul__ div div_ "
    "__itruediv__ __rdiv__ __rtruediv__ floor_divide __floordiv__ remainder fmod neg pow __pow__ __rpow__ "
    "square sqrt rsqrt reciprocal exp expm1 log log1p log2 log10 sin cos tan tanh erf erfc erfinv abs sign "
    "floor ceil round trunc clamp clamp_ clip where maximum minimum masked_fill masked_fill_ tril triu "
    "addcmul addcdiv lerp atan2 logaddexp nan_to_num gt ge lt le eq ne __eq__ __ne__ greater less "
    "logical_and logical_or logical_not __invert__ __and__ __or__ isnan isfinite "
    "conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d linear matmul __matmul__ bmm "
    "baddbmm addmm mm einsum mv outer _grouped_mm max_pool1d max_pool2d max_pool3d avg_pool1d avg_pool2d "
    "avg_pool3d adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d interpolate pixel_shuffle "
    "pixel_unshuffle pad mean sum prod amax amin max min std var norm logsumexp cat stack concat contiguous "
    "reshape flatten clone to float half bfloat16 double int long bool type_as repeat repeat_interleave roll "
    "flip unfold __getitem__ index_select gather take_along_dim take topk sort argsort argmax argmin one_hot "
    "bincount nonzero searchsorted bucketize zeros ones full arange eye linspace"
)
# those whose order of sums a device leaves open, unless torch's algorithms are deterministic,
_SUMMING = (
    "cumsum cumsum_ cumprod index_add index_add_ scatter_add scatter_add_ scatter scatter_ index_copy "
    "index_copy_ index_fill index_fill_ segment_reduce"
)
# those that draw,
_RANDOM = (
    "dropout dropout1d dropout2d dropout3d alpha_dropout feature_alpha_dropout scaled_dot_product_attention "
    "gumbel_softmax randn rand randint randperm normal bernoulli poisson multinomial binomial"
)
# those that read no values of their first argument, and those that overwrite it.
_LIKE = "zeros_like ones_like full_like new_zeros new_ones new_full"
_RANDOM_LIKE = "randn_like rand_like randint_like"
_FILLING = "normal_ uniform_ bernoulli_ exponential_ log_normal_ cauchy_ geometric_ random_"
# Those that tell the program of values, from which sizes may follow.
_TELLING = "nonzero argwhere masked_select unique unique_consecutive tolist item __int__ __index__"


def _functions(names: str) -> frozenset[Any]:
    """Torch's own functions of these names, as a TorchFunctionMode sees them."""
    homes = (torch, F, torch.Tensor)
    found = (getattr(home, name, None) for home in homes for name in names.split())
    return frozenset(function for function in found if function is not None) - {torch.batch_norm}


_ORDERED = _functions(_SUMMING)
_FILLERS = _functions(f"{_FILLING} fill_ zero_")
_LIKES = _functions(f"{_LIKE} {_RANDOM_LIKE}")
_TELLERS = _functions(_TELLING)
_DRAWING = _functions(f"{_RANDOM} {_RANDOM_LIKE} {_FILLING}")
_REPEATABLE = _functions(_PURE) | _ORDERED | _DRAWING | _FILLERS | _LIKES


def is_repeatable(function: Callable[..., Any], device: torch.device) -> bool:
    """Whether the same arguments, and random state, give the same bits again."""
    steady = device.type == "cpu" or torch.are_deterministic_algorithms_enabled()
    return function in _REPEATABLE and (steady or function not in _ORDERED)


def draws(function: Callable[..., Any]) -> bool:
    """Whether it may take numbers from a random generator."""
    return function in _DRAWING


def reads_shape(function: Callable[..., Any]) -> bool:
    """Whether it reads no values of its first argument, and makes a new tensor."""
    return function in _LIKES


def reads_values(function: Callable[..., Any], args: Any) -> bool:
    """Whether sizes may follow from values that it reads: those of a mask, or what it gives the program."""
    if function is torch.where:
        return len(args) == 1
    if function is not torch.Tensor.__getitem__:
        return function in _TELLERS
    indices = args[1] if isinstance(args[1], tuple) else (args[1],)
    return any(isinstance(each, torch.Tensor) and each.dtype == torch.bool for each in indices)


def fills(function: Callable[..., Any]) -> bool:
    """Whether it overwrites its first argument, in place."""
    return function in _FILLERS


@dataclass(frozen=True, slots=True)
class Blank:
    """A tensor of which shape and dtype count, or one that is overwritten: memory filled with ``value``."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    value: float | None = None

    @classmethod
    def like(cls, tensor: torch.Tensor, device: torch.device | None = None) -> Blank:
        """One of the tensor's geometry."""
        return cls(tuple(tensor.shape), tensor.stride(), tensor.dtype, device or tensor.device)

    def make(self) -> torch.Tensor:
        """A new one."""
        made = torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=self.device)
        return made if self.value is None else made.fill_(self.value)


@dataclass(frozen=True, slots=True)
class Stream:
    """A generator of the caller's, as it was."""

    state: RandomState
    device: torch.device

    def make(self) -> torch.Generator:
        """Another in that state."""
        made = torch.Generator(self.device)
        made.set_state(self.state.whole())
        return made


class RandomState:
    """A generator's state. A CPU's is 5056 bytes in words of 64 bits, of which most have 32 that are 0."""

    __slots__ = ("_lower", "_upper", "_where")

    def __init__(self, state: torch.Tensor) -> None:
        words = state.numpy().view(np.uint32).reshape(-1, 2)
        self._where = np.flatnonzero(words[:, 1])
        self._lower, self._upper = words[:, 0].copy(), words[self._where, 1]

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return int(self._lower.nbytes + self._upper.nbytes + self._where.nbytes)

    def whole(self) -> torch.Tensor:
        """As the generator takes it."""
        words = np.zeros((len(self._lower), 2), np.uint32)
        words[:, 0] = self._lower
        words[self._where, 1] = self._upper
        return torch.from_numpy(words.reshape(-1).view(np.uint8))

"""Gradients of large linear layers' weights, of which never more than some rows are in memory."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from squeezebox.memory import CHUNK_BYTES, Absent, StoredTensor, is_view

_LEAST_BYTES = 4 * CHUNK_BYTES  # of a weight whose gradient is worth slices
_EVEN = 16  # rows: BLAS treats those beyond a multiple of its kernels' height apart, and may round otherwise


class ProductTensor(StoredTensor):
    """A linear layer's weight gradient as its two factors: each row is multiplied when it is read.

    Once somebody takes a view or changes an element, all of it is in memory.

    Args:
        like: the weight, of shape (out, in).
        left: of shape (out, n), the output's gradient transposed, with n samples.
        right: of shape (n, in), the layer's input.
    """

    def __init__(self, like: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
        self._like, self._left, self._right = like.detach(), left, right
        self._first, self._rows = 0, left.new_empty(0, right.shape[1])

    def parts(self) -> Iterable[torch.Tensor]:
        """The factors."""
        return (self._left, self._right)

    def load(self) -> torch.Tensor:
        """All of it, in one product."""
        return self._rows if len(self._rows) == len(self) else self._left @ self._right

    def store(self, value: torch.Tensor) -> None:
        """Have these elements from now on."""
        self._first, self._rows = 0, value.contiguous()

    @contextlib.contextmanager
    def lent(
        self, start: int, stop: int, *, changed: bool = False, filled: bool = True
    ) -> Iterator[torch.Tensor]:
        """Flat elements of it; what is changed in them is lost."""
        yield self._elements(start, stop)

    def _elements(self, start: int, stop: int) -> torch.Tensor:
        """Until those of other rows are asked for."""
        width = self.shape[1]
        first, end = start // width, -(-stop // width)
        if first < self._first or end > self._first + len(self._rows):
            self._rows = self._rows.new_empty(0, width)  # free before others are there
            count = max(end - first, slice_rows(self))
            self._first, self._rows = first, self._left[first : first + count] @ self._right
        return self._rows.view(-1)[start - self._first * width : stop - self._first * width]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        self = args[0] if args else None
        if not isinstance(self, ProductTensor) or func in _SAME or not is_view(func):
            return super().__torch_dispatch__(func, types, args, kwargs)
        if func is _TRANSPOSED and torch._C._current_graph_task_id() >= 0:  # on the way to the weight
            return ProductTensor(self._like.t(), self._right.t(), self._left.t())
        self.store(self.load())
        return func(self.load(), *args[1:], **(kwargs or {}))

    @property
    def is_equal_in_slices(self) -> bool:
        """Whether BLAS rounds some rows as it does in the whole product."""
        whole, size = self.load().view(-1), CHUNK_BYTES // self.element_size()
        return all(
            torch.equal(self._elements(start, min(start + size, len(whole))), whole[start : start + size])
            for start in range(0, len(whole), size)
        )


class Products:
    """Has backward give some linear layers' weights their gradients as :class:`ProductTensor`.

    Where a weight has other gradients too, they are added up in memory, as in plain PyTorch.

    Args:
        model: whose layers they are.
        names: of the weights, out of :func:`sliceable`.
        is_wanted: asked at each use in backward.
    """

    def __init__(
        self, model: nn.Module, names: Collection[str], is_wanted: Callable[[], bool] = lambda: True
    ) -> None:
        layers = _layers(model)
        self._hooks = [layers[name].register_forward_hook(_Hook(is_wanted)) for name in names]

    def close(self) -> None:
        """Gradients are plain tensors again."""
        for hook in self._hooks:
            hook.remove()


def slice_rows(weight: torch.Tensor) -> int:
    """Rows that are multiplied at a time: two pieces of an update, however they lie."""
    rows = 1 + math.ceil(2 * CHUNK_BYTES / (weight.shape[1] * weight.element_size()))
    return -(-rows // _EVEN) * _EVEN if rows > _EVEN else rows


def slice_bytes(weight: torch.Tensor) -> int:
    """Their size."""
    return slice_rows(weight) * weight.shape[1] * weight.element_size()


def sliceable(model: nn.Module) -> list[str]:
    """Names of the weights whose gradient may be read in slices."""
    return [
        name
        for name, layer in _layers(model).items()
        if layer.weight.requires_grad
        and layer.weight.nbytes >= max(_LEAST_BYTES, 2 * slice_bytes(layer.weight))
        and layer.weight.is_contiguous()
        and layer.weight.device.type == "cpu"
        and can_be_cut(layer.weight)
    ]


def can_be_cut(parameter: torch.Tensor) -> bool:
    """Whether torch rounds elements alike wherever they lie: in 16 bits not at the ends of its loops."""
    return parameter.element_size() >= 4


def _layers(model: nn.Module) -> Mapping[str, nn.Linear]:
    """Linear layers by their weights' names."""
    owners = {id(each.weight): each for each in model.modules() if type(each) is nn.Linear}
    return {name: owners[id(each)] for name, each in model.named_parameters() if id(each) in owners}


class _Hook:
    """After a layer's forward; in a copy of the layer, and in its pickle, nothing."""

    def __init__(self, is_wanted: Callable[[], bool]) -> None:
        self._is_wanted = is_wanted

    def __call__(self, module: nn.Linear, inputs: object, output: object) -> None:
        weight = module.weight
        if isinstance(output, torch.Tensor) and output.requires_grad and weight.requires_grad:
            output.register_hook(lambda gradient: _of_output(gradient, weight) if self._is_wanted() else None)

    def __reduce__(self) -> tuple[Callable[[], Callable[..., None]], tuple[()]]:
        return _without, ()


def _without() -> Callable[..., None]:
    return _nothing


def _nothing(module: nn.Module, inputs: object, output: object) -> None:
    pass


def _of_output(gradient: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    plain = type(gradient) is torch.Tensor and gradient.dtype == weight.dtype and not gradient.requires_grad
    return _OutputGradient(gradient, weight) if plain else gradient


class _OutputGradient(Absent):
    """A layer's output gradient on its way to the product that is its weight's, which is not made then."""

    def __init__(self, value: torch.Tensor, weight: torch.Tensor) -> None:
        self.value, self._weight = value, weight

    def parts(self) -> Iterable[torch.Tensor]:
        """The gradient itself."""
        return (self.value,)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        self = args[0]
        if isinstance(self, _OutputGradient) and func is _PRODUCT and self._is_weights_gradient(args[1]):
            return ProductTensor(self._weight, self.value, args[1])
        result = func(*tree_map(_value_of, args), **tree_map(_value_of, dict(kwargs or {})))
        return _OutputGradient(result, self._weight) if func in _VIEWS else result

    def _is_weights_gradient(self, other: torch.Tensor) -> bool:
        """Whether its product with that has the weight's shape, and is not the input's gradient."""
        shape = (len(self.value), other.shape[1])
        of_weight = other.untyped_storage().data_ptr() == self._weight.untyped_storage().data_ptr()
        return shape == self._weight.shape and not of_weight


def _value_of(value: Any) -> Any:
    return value.value if isinstance(value, _OutputGradient) else value


_aten: Any = torch.ops.aten
_TRANSPOSED, _PRODUCT = _aten.t.default, _aten.mm.default
_SAME = (_aten.detach.default, _aten.alias.default)
_VIEWS = (_TRANSPOSED, _aten.view.default, _aten._unsafe_view.default, _aten.detach.default)

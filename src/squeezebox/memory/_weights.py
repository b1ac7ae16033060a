"""Frozen weights in a file or in another form, brought to memory for each operator that needs them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.utils._pytree import tree_map

from squeezebox.memory._stored import Lender, Loans, StoredTensor, is_view, move, settle
from squeezebox.memory._tensor_file import TensorFile
from squeezebox.schema import CaptureError

# These choose between two kernels by whether a weight is an ordinary one, and their results differ in the
# last bits.
_CHOOSING = (torch.nn.MultiheadAttention, torch.nn.TransformerEncoderLayer)


class StoredLender(Lender):
    """One weight's elements, in a :class:`StoredTensor`."""

    def __init__(self, name: str, stored: StoredTensor) -> None:
        self.name, self.version = name, 0
        self._stored = stored
        self._back: torch.Tensor | None = None  # the elements, once the weight has them again

    @property
    def stand_in(self) -> torch.Tensor:
        """The stored tensor."""
        return self._stored if self._back is None else self._back

    def load(self) -> torch.Tensor:
        """The elements, read from the file or unpacked."""
        return self._stored.load() if self._back is None else self._back

    def take(self, value: torch.Tensor) -> None:
        """Store these elements; CaptureError for others than the weight's kind."""
        mine, other = self._stored, value.detach()
        if (mine.shape, mine.dtype, mine.device) != (other.shape, other.dtype, other.device):
            raise CaptureError(
                f"'{self.name}' is {mine.dtype} of shape {tuple(mine.shape)} in a file or packed under this "
                f"plan, and cannot become {other.dtype} of shape {tuple(other.shape)} on {other.device}. "
                "Call detach() on the session first, and make a new plan."
            )
        mine.store(other)
        self.version += 1

    def refuse(self, name: str) -> Any:
        """CaptureError: there is nothing in memory to point at, and nothing that could have a gradient."""
        instead = (
            "make the plan for the weights that you train"
            if name == "requires_grad_"
            else "take .clone() of it, whose elements are in memory"
        )
        raise CaptureError(
            f"{name}() was called on '{self.name}', which this plan holds in a file or packed. Call detach() "
            f"on the session first, or {instead}."
        )

    def lose(self) -> None:
        """CaptureError: what is stored has not got the change."""
        raise CaptureError(
            f"'{self.name}' was changed through a view, such as by weight[0].zero_(), or by what reads it. "
            "This plan holds it in a file or packed, which the change has not reached. Change the weight "
            "itself: weight.copy_(changed), under torch.no_grad()."
        )

    def changing(self) -> torch.Tensor:
        """The stored tensor, which takes what is done in place."""
        return self.stand_in

    def detached(self) -> torch.Tensor:
        """The stored tensor, which is read when somebody computes with it or saves it."""
        return self.stand_in

    def bring_back(self) -> torch.Tensor:
        """The elements, in memory from now on."""
        self._back = self._stored.load()
        return self._back


class Weights:
    """Frozen parameters of a model whose elements are stored elsewhere until :meth:`close`.

    Args:
        weights: by name; such as :func:`movable_weights` finds.
        home: where a weight of this name and these elements is from now on; there is nothing in it yet.
        file: in which some are, if any.

    Attributes:
        loans: what operators read at this moment, and backward will want again.
    """

    def __init__(
        self,
        weights: Mapping[str, torch.nn.Parameter],
        home: Callable[[str, torch.Tensor], StoredTensor],
        file: TensorFile | None = None,
    ) -> None:
        self.loans = Loans()
        self._file = file
        self._moved: list[tuple[torch.nn.Parameter, StoredLender]] = []
        with contextlib.ExitStack() as undone:  # by a full disk, say
            undone.callback(self.close)
            for name, weight in weights.items():
                stored = home(name, weight.data)
                stored.store(weight.data)
                lender = StoredLender(name, stored)
                weight.data = _nothing_like(weight.data)
                move(weight, lender, self.loans)
                self._moved.append((weight, lender))
            undone.pop_all()

    def close(self) -> None:
        """Give every parameter its elements back."""
        while self._moved:
            weight, lender = self._moved[-1]
            value = lender.bring_back()
            settle(weight)
            weight.data = value
            self._moved.pop()
        if self._file is not None:
            self._file.close()


class WholeTensor(StoredTensor):
    """A stored tensor that reads its elements into memory when somebody asks where they are, and keeps them.

    What is done in place goes to the stored tensor, but not what is done to a view.
    """

    def __init__(self, stored: StoredTensor) -> None:
        self._stored = stored
        self._value: torch.Tensor | None = None

    def load(self) -> torch.Tensor:
        """The elements."""
        return self._stored.load() if self._value is None else self._value

    def store(self, value: torch.Tensor) -> None:
        """Have the stored tensor take these."""
        self._stored.store(value)
        self._value = None

    def whole(self) -> torch.Tensor:
        """The elements, in memory for as long as this tensor is there."""
        self._value = self.load()
        return self._value

    def untyped_storage(self, *_: object, **__: object) -> Any:
        """Of the elements in memory."""
        return self.whole().untyped_storage()

    def data_ptr(self, *_: object, **__: object) -> Any:
        """Of the elements in memory."""
        return self.whole().data_ptr()

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if is_view(func) and func is not torch.ops.aten.detach.default:
            args, kwargs = tree_map(_whole, (args, dict(kwargs or {})))
            return func(*args, **kwargs)
        return super().__torch_dispatch__(func, types, args, kwargs)


def _whole(value: Any) -> Any:
    return value.whole() if isinstance(value, WholeTensor) else value


def show_whole(model: torch.nn.Module, state: dict[str, Any], prefix: str, _: object) -> None:
    """A hook for ``state_dict()``: stored weights are whole to those who need them in memory.

    Such are safetensors; one weight of several names is one tensor.
    """
    found: dict[int, WholeTensor] = {}
    for name, weight in model.named_parameters(remove_duplicate=False):
        value = state.get(prefix + name)
        if isinstance(value, StoredTensor) and not isinstance(value, torch.nn.Parameter):
            state[prefix + name] = found.setdefault(id(weight), WholeTensor(value))


def movable_weights(
    model: torch.nn.Module, least_bytes: int, *, trained: bool = False
) -> dict[str, torch.nn.Parameter]:
    """The model's frozen parameters that can be elsewhere, or its ``trained`` ones, from ``least_bytes`` on.

    Left out are those of subclasses, on devices, of other layouts, that share memory with others, and those
    of torch's own attention modules.
    """
    named = dict(model.named_parameters())
    fixed = set(_fixed(model))
    owners: dict[int, int] = {}
    for tensor in (*named.values(), *model.buffers()):
        if _is_ordinary(tensor.data):
            address = tensor.untyped_storage()._cdata
            owners[address] = owners.get(address, 0) + 1
    return {
        name: each
        for name, each in named.items()
        if type(each) is torch.nn.Parameter
        and each.requires_grad == trained
        and each.nbytes >= least_bytes
        and id(each) not in fixed
        and _is_ordinary(each.data)
        and each.is_floating_point()
        and each.untyped_storage().nbytes() == each.nbytes
        and owners[each.untyped_storage()._cdata] == 1
    }


def _is_ordinary(tensor: torch.Tensor) -> bool:
    return type(tensor) is torch.Tensor and tensor.layout is torch.strided and tensor.device.type == "cpu"


def _fixed(model: torch.nn.Module) -> Iterator[int]:
    for module in model.modules():
        if isinstance(module, _CHOOSING):
            yield from map(id, module.parameters())


def _nothing_like(value: torch.Tensor) -> torch.Tensor:
    """Of the same shape and a few bytes; what computes with it past torch's own functions shows."""
    return torch.full((), float("nan"), dtype=value.dtype).expand(value.shape)

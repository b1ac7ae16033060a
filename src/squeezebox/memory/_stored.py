"""Tensors and parameters whose elements are elsewhere until torch computes with them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves, tree_map

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


class StoredTensor(Absent):
    """A tensor held elsewhere, or in another form: every operator loads it, one in place stores it again."""

    def load(self) -> torch.Tensor:
        """The elements, in memory of their own."""
        raise NotImplementedError

    def store(self, value: torch.Tensor) -> None:
        """Take these elements."""
        raise NotImplementedError

    def lent(
        self, start: int, stop: int, *, changed: bool = True, filled: bool = True
    ) -> AbstractContextManager[torch.Tensor]:
        """Flat elements, ``filled`` as they are, in memory for a while; they are stored if ``changed``."""
        raise NotImplementedError

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        return self.load()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.load().__reduce_ex__(protocol)

    def numpy(self, *, force: bool = False) -> Any:
        """A copy of the elements, which cannot be written to: that would not reach the file."""
        found = self.load().numpy(force=force)
        found.flags.writeable = False
        return found

    def _set_data(self, value: torch.Tensor) -> None:
        self.store(value)

    data = property(lambda self: self, _set_data)

    def tolist(self) -> Any:
        """The elements as Python's numbers."""
        return self.load().tolist()

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        first = args[0] if args else None
        if isinstance(first, (list, tuple)) and len(first) > 1 and "foreach" in func.__name__:
            return _one_by_one(func, args, kwargs or {})
        if isinstance(first, StoredTensor) and func in _DETACH:
            return first
        return _loaded(func, args, kwargs or {})


_DETACH = (torch.ops.aten.detach.default, torch.ops.aten.alias.default)


def flat_in_memory(value: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """All elements in the order that memory of ``like``'s strides has them in."""
    if value.stride() != like.stride():
        own = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=like.device)
        value = own.copy_(value)
    return value.as_strided((like.numel(),), (1,))


def is_view(func: Any) -> bool:
    """Whether what an operator gives has the memory of what it gets."""
    given = (each.alias_info for each in func._schema.returns)
    return any(each is not None and not each.is_write for each in given)


def _one_by_one(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """An operator on lists, once for each of their members, so that no two are in memory at once."""
    count = len(args[0])

    def of(number: int, value: Any) -> Any:
        return (
            value[number : number + 1] if isinstance(value, (list, tuple)) and len(value) == count else value
        )

    found = [func(*(of(number, arg) for arg in args), **kwargs) for number in range(count)]
    return None if found[0] is None else [each for results in found for each in results]


def _loaded(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """The operator on the elements; those that it changes are stored again."""
    schema = func._schema
    if is_view(func):
        raise CaptureError(
            f"{func} would make a view of a tensor that is in a file or packed (optimizer state, a gradient "
            "or a weight, under a plan with states=True), and what is done to the view would not reach it. "
            "Take .clone() first."
        )
    there: dict[int, torch.Tensor] = {}

    def load(value: Any) -> Any:
        if isinstance(value, StoredTensor) and id(value) not in there:
            there[id(value)] = value.load()
        return there.get(id(value), value)

    result = func(*tree_map(load, args), **tree_map(load, dict(kwargs)))
    changed = [
        each
        for number, given in enumerate(schema.arguments)
        if given.alias_info is not None and given.alias_info.is_write
        for each in tree_leaves(args[number] if number < len(args) else kwargs.get(given.name))
        if isinstance(each, StoredTensor)
    ]
    for each in changed:
        each.store(there[id(each)])
    return changed[0] if changed and isinstance(result, torch.Tensor) else result


class Lender(ABC):
    """Where one weight's elements are, and how they come into memory.

    Attributes:
        name: the weight's, for messages.
        version: how often the elements were changed in place.
    """

    name: str
    version: int

    @property
    @abstractmethod
    def stand_in(self) -> torch.Tensor:
        """What tells the weight's shape, and what is changed in the weight's place."""

    @abstractmethod
    def load(self) -> torch.Tensor:
        """The elements, in memory of their own."""

    @abstractmethod
    def take(self, value: torch.Tensor) -> None:
        """Have these elements from now on, as ``parameter.data = value``."""

    @abstractmethod
    def refuse(self, name: str) -> Any:
        """Somebody asks for what only a parameter in memory has, such as its address."""

    @abstractmethod
    def changing(self) -> torch.Tensor:
        """The stand-in, which an operator is about to change."""

    @abstractmethod
    def lose(self) -> None:
        """What was lent was changed in memory, such as through a view, where it is lost."""

    @abstractmethod
    def detached(self) -> torch.Tensor:
        """The weight without its part in a graph, as ``state_dict()`` asks for."""


@dataclass(frozen=True, slots=True)
class _Loan:
    """Elements that were lent; ``mark`` has none, and counts the changes of all their views."""

    lender: Lender
    storage: StorageWeakRef
    mark: torch.Tensor | None
    version: int

    @property
    def is_changed(self) -> bool:
        return self.mark is not None and self.mark._version != self.version


class Loans:
    """The weights' elements that are in memory now, found by their storage."""

    def __init__(self) -> None:
        self._living: dict[int, _Loan] = {}

    def lend(self, lender: Lender) -> torch.Tensor:
        """The elements, in memory that is free again when nobody holds the tensor or a view of it.

        Raises:
            CaptureError: what was lent before was changed, which a weight in a file does not see.
        """
        self.check()
        value = lender.load()
        storage = value.untyped_storage()
        mark, version = (None, 0) if value.is_inference() else (value.detach(), value._version)
        if mark is not None:
            mark.data = torch.empty(0, dtype=value.dtype, device="cpu")
        self._living[storage._cdata] = _Loan(lender, StorageWeakRef(storage), mark, version)
        return value

    def lender_of(self, tensor: torch.Tensor) -> Lender | None:
        """Who has lent what the tensor sees; None if nobody has, or it sees the bytes as another dtype."""
        found = self._living.get(tensor.untyped_storage()._cdata) if self._living else None
        if found is None or found.storage.expired() or found.lender.stand_in.dtype != tensor.dtype:
            return None
        return found.lender

    def check(self) -> None:
        """Forget what is gone, and have the lender know where what was lent was changed."""
        changed = [each.lender for each in self._living.values() if each.is_changed]
        gone = [key for key, each in self._living.items() if each.is_changed or each.storage.expired()]
        for key in gone:
            del self._living[key]
        for lender in changed:
            lender.lose()


class MovedWeight(torch.nn.Parameter):
    """A parameter without elements of its own: each operator that reads it gets them from its lender.

    It is the object that it was before, of this class for as long as its elements are elsewhere. What an
    operator gets is a plain tensor that requires no gradient. An operator that works in place changes what
    the lender has. Copies and pickles are plain parameters.
    """

    lender: Lender
    loans: Loans

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        first = args[0] if args else next(iter(kwargs.values()), None)
        if func in _OWN:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if isinstance(first, MovedWeight) and func in _ANSWERED:
            return _ANSWERED[func](first, *args[1:], **kwargs)
        if isinstance(first, MovedWeight) and func in _DESCRIBING:
            return func(*tree_map(_described, args), **tree_map(_described, dict(kwargs)))
        changed = kwargs.get("out", first if _works_in_place(func) else None)
        weights = [each for each in tree_leaves(changed) if isinstance(each, MovedWeight)]
        if weights:
            return _changed(weights, func, args, kwargs)
        return func(*tree_map(_lent, args), **tree_map(_lent, dict(kwargs)))

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.nn.Parameter:
        if id(self) not in memo:
            memo[id(self)] = self._copy()
        copied: torch.nn.Parameter = memo[id(self)]
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._copy().__reduce_ex__(protocol)

    def _copy(self) -> torch.nn.Parameter:
        return torch.nn.Parameter(self.lender.load(), requires_grad=False)


def move(parameter: torch.nn.Parameter, lender: Lender, loans: Loans) -> None:
    """From now on the parameter's elements are the lender's; its ``data`` stays as it is."""
    parameter.__class__ = MovedWeight
    parameter.__dict__.update(lender=lender, loans=loans)


def settle(parameter: torch.nn.Parameter) -> None:
    """The parameter has elements of its own again: its ``data``."""
    parameter.__class__ = torch.nn.Parameter
    del parameter.__dict__["lender"], parameter.__dict__["loans"]


def _lent(value: Any) -> Any:
    return value.loans.lend(value.lender) if isinstance(value, MovedWeight) else value


def _described(value: Any) -> Any:
    return value.lender.stand_in if isinstance(value, MovedWeight) else value


def _changed(weights: list[MovedWeight], func: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
    """The operator on the stand-ins of these weights; they are what it returns."""
    instead = {id(each): each.lender.changing() for each in weights}

    def given(value: Any) -> Any:
        return instead[id(value)] if id(value) in instead else _lent(value)

    result = func(*tree_map(given, args), **tree_map(given, dict(kwargs)))
    for each in weights:
        each.lender.version += 1
    return next((each for each in weights if result is instead[id(each)]), result)


def _works_in_place(func: Any) -> bool:
    name = getattr(func, "__name__", "")
    return name in _IN_PLACE if name.startswith("__") else bool(name.endswith("_"))


_IN_PLACE = frozenset(
    "__setitem__ __iadd__ __isub__ __imul__ __itruediv__ __idiv__ __ifloordiv__ __imod__ __ipow__ __iand__ "
    "__ior__ __ixor__ __ilshift__ __irshift__".split()
)


def _requiring(weight: MovedWeight, flag: bool = True) -> Any:
    return weight.lender.refuse("requires_grad_") if flag else weight


def _asked(name: str) -> Callable[..., Any]:
    return lambda weight, *_, **__: weight.lender.refuse(name)


def _found(names: str, homes: Iterable[Any] = (torch.Tensor,)) -> frozenset[Any]:
    """Torch's functions of these names, and what reads the attributes of these names."""
    found = [getattr(home, name, None) for home in homes for name in names.split()]
    return frozenset(each if callable(each) else each.__get__ for each in found if each is not None)


_tensor: Any = torch.Tensor
_OWN = _found(
    "grad is_leaf grad_fn requires_grad retains_grad output_nr _backward_hooks _post_accumulate_grad_hooks "
    "register_hook register_post_accumulate_grad_hook _base _grad _grad_fn"
) | {
    each
    for name in ("grad", "_grad", "_backward_hooks", "_post_accumulate_grad_hooks")
    for each in (getattr(_tensor, name).__set__, getattr(_tensor, name).__delete__)
}
_DESCRIBING = _found(
    "shape size dim ndim numel nelement dtype device layout stride is_contiguous element_size itemsize "
    "nbytes storage_offset is_floating_point is_complex is_signed is_neg is_conj is_inference is_sparse "
    "is_quantized is_nested is_meta is_cpu is_cuda is_mkldnn is_xpu is_mps get_device __len__ names",
    (torch.Tensor, torch),
)
_ANSWERED: dict[Any, Callable[..., Any]] = {
    _tensor.data.__get__: lambda weight: weight.lender.detached(),
    _tensor.data.__set__: lambda weight, value: weight.lender.take(value),
    _tensor._version.__get__: lambda weight: weight.lender.version,
    _tensor.detach: lambda weight: weight.lender.detached(),
    _tensor.requires_grad.__set__: _requiring,
    _tensor.requires_grad_: _requiring,
}
_ANSWERED.update(
    (getattr(_tensor, name), _asked(name))
    for name in (
        "data_ptr untyped_storage storage _typed_storage share_memory_ set_ __dlpack__ numpy __array__"
    ).split()
)

"""Calls that wait until their result is read, so that the reader and they can be computed as one."""

from __future__ import annotations

import contextlib
import copy
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch.autograd.function import once_differentiable
from torch.utils._pytree import tree_leaves, tree_map_only

from squeezebox.memory import Absent
from squeezebox.schema import CaptureError

# What a deferred tensor answers itself.
_OF_TENSORS = "shape dtype device layout ndim requires_grad is_leaf itemsize grad_fn nbytes _version"
_FLAGS = "is_cuda is_cpu is_meta is_sparse is_nested is_quantized is_mkldnn output_nr"
_METHODS = (
    "size stride dim ndimension numel nelement is_floating_point is_complex is_inference is_neg is_conj "
    "element_size get_device"
)
METADATA: frozenset[Any] = frozenset(
    {
        *(getattr(torch.Tensor, name).__get__ for name in f"{_OF_TENSORS} {_FLAGS}".split()),
        *(getattr(torch.Tensor, name) for name in _METHODS.split()),
        *(torch.numel, torch.is_floating_point, torch.is_complex, torch.Tensor.__len__),
    }
)

_OWN = "squeezebox."


class Reader(Protocol):
    """What a rule does with a call that waits: ``read`` gives NotImplemented where its result is needed."""

    def read(self, call: Waiting, func: Any, args: Any, kwargs: Any) -> Any:
        """The result of ``func``, which reads the call's, by another way."""


class _Unread:
    """The reader of a call whose result is always needed itself."""

    def read(self, call: Waiting, func: Any, args: Any, kwargs: Any) -> Any:
        """No other way."""
        return NotImplemented


class Waiting:
    """A call that was not made: ``function(*args, **kwargs)``, and under what it was to run.

    Args:
        reader: of its result.
        function: with its arguments; deferred tensors among them are made before it.
        args: of the function.
        kwargs: of the function.
        shape: of the result.
        dtype: of the result.
        note: called with "fused" or "made" for each reading.
        state: what the reader wants to remember.
    """

    def __init__(
        self,
        reader: Reader,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        shape: Sequence[int],
        dtype: torch.dtype,
        note: Callable[[str], None],
        state: Any = None,
    ) -> None:
        self.function, self.args, self.kwargs = function, args, kwargs
        self.reader, self.note, self.state = reader, note, state
        self.readers = [(reader, note, state)]
        self.shape, self.dtype = tuple(shape), dtype
        self.inputs = [each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
        self.parents = [each.call for each in self.inputs if isinstance(each, Deferred)]
        self.children: weakref.WeakSet[Waiting] = weakref.WeakSet()
        for parent in self.parents:
            parent.children.add(self)
        self.device = self.inputs[0].device
        self.made: torch.Tensor | None = None
        self._made_version = 0
        self._given_versions = [each._version for each in self.inputs]
        self._grad, self._hooks = torch.is_grad_enabled(), saving_hooks()
        kind = self.device.type
        self.autocast = (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))

    @property
    def waits(self) -> bool:
        """Whether neither it nor what it reads was made."""
        return self.made is None and all(each.waits for each in self.parents)

    def reads_any_of(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether an input shares memory with one of them."""
        own = [each for each in self.inputs if not isinstance(each, Deferred)]
        shared = any(_storage(each) == _storage(other) for each in own for other in tensors)
        return shared or any(each.reads_any_of(tensors) for each in self.parents)

    def require_unchanged(self) -> None:
        """CaptureError where an input was changed in place since, or freed."""
        for each in self.parents:
            each.require_unchanged()
        if any(map(_is_freed, self.inputs)):
            raise CaptureError(
                f"the result of {self.function.__name__} is read after fully_shard has freed its weights. "
                "Shard that module with reshard_after_forward=False, or leave the rewrite out: "
                "squeezebox.rewrite(..., without=[...])."
            )
        if [each._version for each in self.inputs] != self._given_versions:
            raise CaptureError(
                f"the result of {self.function.__name__} is read after an input of it was changed in place, "
                "so a rewrite can no longer make it as the model would have. Read it before "
                "optimizer.step(), or leave the rewrite out: squeezebox.rewrite(..., without=[...])."
            )

    def become(self, result: torch.Tensor) -> None:
        """The reader changed it in place: those who read it from now on see that result."""
        self.made, self._made_version = result, result._version

    def make(self) -> torch.Tensor:
        """The result, as the model would have had it."""
        if self.made is None:
            self.require_unchanged()
            for parent in self.parents:
                parent.make()  # and with it its children, of which this is one
        if self.made is not None:
            return self.made
        self.note("made")
        with self._as_begun(), self.within_autocast():
            found: torch.Tensor = self.function(*made(self.args), **made(self.kwargs))
        self.become(found)
        for child in [*self.children]:  # before anybody changes in place what they read
            child.make()
        return found

    def read(self, func: Any, args: Any, kwargs: Any) -> Any:
        """What the first reader gives that gives any, if the call still waits."""
        for each in self.readers if self.waits and self._fits_here() else ():
            self.reader, self.note, self.state = each
            found = self.reader.read(self, func, args, kwargs)
            if found is not NotImplemented:
                return found
        return NotImplemented

    def _fits_here(self) -> bool:
        """Whether autograd takes a reader's call and this one for the same: one gradient, the same hooks.

        Under others' hooks, such as a checkpoint's, it would save here what a recomputation does not.
        """
        learns_more = torch.is_grad_enabled() and not self._grad
        return (
            not learns_more
            and not torch.is_inference_mode_enabled()
            and saving_hooks() in (None, self._hooks)
        )

    @contextlib.contextmanager
    def _as_begun(self) -> Iterator[None]:
        """With gradients, and hooks of saved tensors, as where the call began, if those are still there."""
        taken: list[Any] = []
        autograd = torch._C._autograd
        try:
            while (top := saving_hooks()) not in (None, self._hooks):
                taken.append(top)
                autograd._pop_saved_tensors_default_hooks()
            with torch.inference_mode(False), torch.set_grad_enabled(self._grad):
                yield
        finally:
            for pack, unpack in reversed(taken):
                autograd._push_saved_tensors_default_hooks(pack, unpack)

    @contextlib.contextmanager
    def within_autocast(self) -> Iterator[None]:
        """As it was around the call."""
        enabled, kind = self.autocast
        with torch.autocast(self.device.type, dtype=kind, enabled=enabled):
            yield

    def unseen(self) -> torch.Tensor:
        """The result for somebody whom function modes do not see; its gradient comes to :class:`_Place`."""
        found = self.make()
        if found._version != self._made_version:
            raise CaptureError(
                f"the result of {self.function.__name__} was changed in place and then read where torch's "
                "function modes do not see it (by a torch.autograd.Function, say); its gradient would be "
                "wrong. Leave this rewrite out: squeezebox.rewrite(..., without=[...])."
            )
        return found.detach()

    def gradients(self, gradient: torch.Tensor) -> list[torch.Tensor | None]:
        """Of the inputs, when the result's is known."""
        self.require_unchanged()
        alone = [made(each).detach().requires_grad_(each.requires_grad) for each in self.inputs]
        own = {id(each): copy for each, copy in zip(self.inputs, alone, strict=True)}
        args, kwargs = tree_map_only(torch.Tensor, lambda each: own[id(each)], (self.args, self.kwargs))
        with torch.enable_grad(), self.within_autocast():
            result = self.function(*args, **kwargs)
        wanted = [each for each in alone if each.requires_grad]
        found = iter(torch.autograd.grad(result, wanted, gradient, allow_unused=True))
        return [next(found) if each.requires_grad else None for each in alone]


class Deferred(Absent):
    """The result of a call that waits. It knows its shape and dtype; any other reading has the call made."""

    call: Waiting

    @staticmethod
    def of(call: Waiting) -> Deferred:
        """A tensor that stands for the call's result."""
        found: Deferred = _Place.apply(call, *call.inputs)  # type: ignore[no-untyped-call]
        found.call = call
        return found

    def _data(self) -> torch.Tensor:
        """The same without its gradient, which waits as well."""
        if not hasattr(self, "call"):
            return self
        if self.call.made is not None:
            return self.call.made.data
        shape, dtype = self.call.shape, self.call.dtype
        with torch.no_grad():
            call = Waiting(_Unread(), torch.Tensor.detach, (self,), {}, shape, dtype, lambda _: None)
            return Deferred.of(call)

    def _set_data(self, value: torch.Tensor) -> None:
        self.call.make().data = value

    data = property(_data, _set_data)

    def parts(self) -> tuple[torch.Tensor, ...]:
        """Nothing of it is in memory, or what was made."""
        found = self.call.made if hasattr(self, "call") else None
        return () if found is None else (found,)

    def untyped_storage(self) -> Any:  # type: ignore[override]
        """Of what it stands for."""
        return self.call.make().untyped_storage()

    def data_ptr(self) -> int:  # type: ignore[override]
        """Of what it stands for."""
        return self.call.make().data_ptr()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        return read(func, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        args, kwargs = tree_map_only(Deferred, lambda each: each.call.unseen(), (args, kwargs or {}))
        return func(*args, **kwargs)

    def __repr__(self, **_: object) -> str:  # type: ignore[override]
        return repr(self.call.make())

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        return copy.deepcopy(self.call.make(), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.call.make().__reduce_ex__(protocol)


def saving_hooks() -> Any:
    """Who gets what autograd saves now: the innermost pair of hooks; None for nobody, and for Squeezebox.

    A session takes whatever is saved; others, such as a checkpoint, may count on a certain order.
    """
    top = torch._C._autograd._top_saved_tensors_default_hooks(False)
    is_other = top is not None and not getattr(top[0], "__module__", "").startswith(_OWN)
    return top if is_other else None


def is_deferred(value: Any) -> bool:
    """Whether it is one."""
    return isinstance(value, Deferred)


def read(func: Any, args: Any, kwargs: Any) -> Any:
    """Call ``func`` on deferred tensors: by the way of the first one's reader, or after they are made."""
    found = fused(func, args, kwargs)
    if found is not NotImplemented:
        return found
    args, kwargs = made((args, kwargs))
    return func(*args, **kwargs)


def fused(func: Any, args: Any, kwargs: Any) -> Any:
    """What a deferred tensor's reader makes of the call; NotImplemented where they are needed themselves."""
    for each in filter(is_deferred, tree_leaves((args, kwargs))):
        found = each.call.read(func, args, kwargs)
        if found is not NotImplemented:
            return found
    return NotImplemented


def made(values: Any) -> Any:
    """The same with every deferred tensor made."""
    found: Any = tree_map_only(Deferred, lambda each: each.call.make(), values)
    return found


class _Place(torch.autograd.Function):
    """Makes a deferred tensor that autograd knows, for readers whom function modes do not see."""

    @staticmethod
    def forward(ctx: Any, call: Waiting, *inputs: torch.Tensor) -> torch.Tensor:
        ctx.call = call  # not saved as tensors: hooks would hold them once more
        place: torch.Tensor = torch.Tensor._make_wrapper_subclass(
            Deferred, call.shape, dtype=call.dtype, device=call.device
        )
        return place

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return (None, *ctx.call.gradients(gradient))


def _is_freed(tensor: torch.Tensor) -> bool:
    is_plain = type(tensor) in (torch.Tensor, torch.nn.Parameter)
    return is_plain and tensor.numel() > 0 and tensor.untyped_storage().size() == 0


def _storage(tensor: torch.Tensor) -> int:
    return 0 if isinstance(tensor, Absent) else tensor.untyped_storage()._cdata

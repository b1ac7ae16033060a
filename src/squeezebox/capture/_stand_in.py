"""Tensors that are not there yet: they know their shape, and are computed when somebody reads them."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.nn import functional
from torch.utils._pytree import tree_leaves, tree_map_only

from squeezebox.schema import CaptureError

# What a stand-in answers itself.
METADATA: frozenset[Any] = frozenset(
    {
        *(getattr(torch.Tensor, name).__get__ for name in ("shape", "dtype", "device", "layout", "ndim")),
        *(getattr(torch.Tensor, name).__get__ for name in ("requires_grad", "is_leaf", "itemsize")),
        *(getattr(torch.Tensor, name) for name in ("size", "dim", "ndimension", "numel", "nelement")),
        *(getattr(torch.Tensor, name) for name in ("is_floating_point", "is_complex", "element_size")),
        *(torch.numel, torch.is_floating_point, torch.is_complex, torch.Tensor.__len__),
    }
)


@dataclass(frozen=True, slots=True)
class Deferred:
    """A call that was not made: ``function(x, *arguments, **keywords)`` in the module ``module``."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    keywords: dict[str, Any]
    module: str

    @property
    def normalises(self) -> bool:
        """Whether it is a batch normalisation by the batch's own moments."""
        return self.function is functional.batch_norm and bool(self.keywords["training"])

    @property
    def in_place(self) -> bool:
        """Whether its result is its input."""
        return self.function.__name__.endswith("_") or bool(self.keywords.get("inplace"))

    def again(self) -> Deferred:
        """The same without a trace in the running statistics."""
        if not self.normalises:
            return self
        return replace(self, keywords={**self.keywords, "running_mean": None, "running_var": None})


@dataclass(slots=True, eq=False)
class Pending:
    """Calls that wait for the last one of their region; once ``done``, they were made.

    ``like`` is a meta tensor of their result's shape.
    """

    source: torch.Tensor
    like: torch.Tensor
    replay: Callable[[Deferred, torch.Tensor], torch.Tensor]
    calls: list[Deferred] = field(default_factory=list)
    readers: list[weakref.ref[StandIn]] = field(default_factory=list)
    done: bool = False
    read: bool = False  # somebody needed a stand-in's values

    def add(self, call: Deferred, *, is_pointwise: bool = False) -> bool:
        """Put the call off, unless it would fail.

        Of what keeps the shape, torch is not asked for it: for some, it would load its compiler first.
        """
        normalises = call.function is functional.batch_norm and _normalises(self.like, call.keywords)
        if is_pointwise or normalises:
            self.calls.append(call)
            return True
        arguments, keywords = tree_map_only(torch.Tensor, _shape, (call.arguments, call.keywords))
        try:
            with torch.no_grad():
                like = call.function(_shape(self.like), *arguments, **keywords)
        except (RuntimeError, TypeError, ValueError):  # for the call itself to say
            return False
        if not isinstance(like, torch.Tensor):
            return False
        self.like = like
        self.calls.append(call)
        return True

    def living(self) -> list[StandIn]:
        """The stand-ins that somebody still holds and nobody has read."""
        found = [reference() for reference in self.readers]
        return [stand_in for stand_in in found if stand_in is not None and stand_in.value is None]

    def evaluate(self, stand_in: StandIn) -> None:
        """Make the calls as they were written; if they were made in slices, some of them once more."""
        wanted = [stand_in] if self.done else self.living()
        calls = [call.again() for call in self.calls[: stand_in.length]] if self.done else self.calls
        self.done = self.read = True
        x = self.source
        with torch.enable_grad(), torch.autocast(x.device.type, enabled=False):
            for number, call in enumerate(calls, 1):
                x = self.replay(call, x)
                for one in wanted:
                    if one.length == number:
                        one.value = x


class StandIn(torch.Tensor):
    """The result of deferred calls. It knows its shape, dtype and the like; anything else evaluates it."""

    pending: Pending
    length: int  # how many of the calls it is the result of
    value: torch.Tensor | None

    @staticmethod
    def of(pending: Pending) -> StandIn:
        """For the calls so far."""
        values = tree_leaves((pending.calls[0].arguments, pending.calls[0].keywords))
        trained = (v for v in values if isinstance(v, torch.Tensor) and v.requires_grad)
        made: StandIn = _Place.apply(next(trained), pending.like)  # type: ignore[no-untyped-call]
        made.pending, made.length, made.value = pending, len(pending.calls), None
        pending.readers.append(weakref.ref(made))
        return made

    def evaluate(self) -> torch.Tensor:
        """The tensor itself."""
        if self.value is None:
            self.pending.evaluate(self)
        assert self.value is not None
        return self.value

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        args, kwargs = evaluated((args, kwargs or {}))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any, kwargs: Any) -> Any:  # type: ignore[override]
        raise CaptureError(_UNSEEN.format(f" ({func})"))


class _Place(torch.autograd.Function):
    """Makes a stand-in that requires gradients, and does not let any of them get lost."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        return torch.Tensor._make_wrapper_subclass(
            StandIn, like.shape, dtype=like.dtype, device=anchor.device
        )

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> None:
        raise CaptureError(_UNSEEN.format(""))


_UNSEEN = (
    "something that torch's function modes do not see{} read a tensor among the layers that the plan works "
    "in slices (a torch.autograd.Function or a full backward hook, say, that was not there when the plan was "
    "made), and its gradient would be lost. Make a new plan with squeezebox.plan(), now that it is there."
)


def _normalises(x: torch.Tensor, keywords: dict[str, Any]) -> bool:
    """Whether a batch normalisation can be made of it."""
    known = (keywords[name] for name in ("weight", "bias", "running_mean", "running_var"))
    fit = all(each is None or each.numel() == x.shape[1] for each in known)
    return fit and x.dim() > 1 and x.numel() > x.shape[1]


def evaluated(values: Any) -> Any:
    """The same arguments with every stand-in evaluated."""
    return tree_map_only(StandIn, lambda stand_in: stand_in.evaluate(), values)


def _shape(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(tensor, device="meta", requires_grad=False)

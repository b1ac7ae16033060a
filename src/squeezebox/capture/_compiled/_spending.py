"""Gradients that a compiled backward hands to somebody as soon as each is there, and not at its end."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Mapping

import torch

_LIBRARY = torch.library.Library("squeezebox", "FRAGMENT")  # noqa: TOR901
_numbers = itertools.count()
_known: weakref.WeakValueDictionary[int, Spending] = weakref.WeakValueDictionary()


class Spending:
    """Takes the gradients of some parameters; compiled graphs name it by its number.

    Args:
        taken_bytes: by the parameters meant, what using up a gradient takes besides.
        take: gets a parameter and its gradient, of the same layout, and may change the parameter.
    """

    def __init__(
        self,
        taken_bytes: Mapping[torch.nn.Parameter, int],
        take: Callable[[torch.nn.Parameter, torch.Tensor], None],
    ) -> None:
        self.parameters, self.taken_bytes = list(taken_bytes), list(taken_bytes.values())
        self.take = take
        self.number = next(_numbers)
        _known[self.number] = self


def _spend(parameter: torch.Tensor, gradient: torch.Tensor, number: int, place: int) -> None:
    spending = _known[number]
    # a graph may run for other modules than it was compiled for; what is nobody's is Inductor's own copy
    same = (each for each in spending.parameters if each.data_ptr() == parameter.data_ptr())
    own = next(same, spending.parameters[place])
    if gradient.stride() != own.stride():
        gradient = torch.empty_like(own, requires_grad=False).copy_(gradient)
    spending.take(own, gradient)


# It says that it changes the parameter: so Inductor runs it behind all that reads that.
_LIBRARY.define("spend_(Tensor(a!) parameter, Tensor gradient, int number, int place) -> ()")
_LIBRARY.impl("spend_", _spend, "CompositeExplicitAutograd")
torch.library.register_fake("squeezebox::spend_", lambda *_: None, lib=_LIBRARY)
SPEND = torch.ops.squeezebox.spend_.default

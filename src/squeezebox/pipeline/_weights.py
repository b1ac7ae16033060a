"""A rank's weights in as many versions as its schedule needs, and the gradients that batches leave.

A version is a buffer of its own, and the model's parameters point into the one that is being read: nothing
is copied to switch. The optimizer has parameters of its own, which point into the newest version. So its
steps in place do not touch what autograd has noted of the model's parameters: graphs in flight stay valid.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from squeezebox.schema import OptionError

_ALIGNED_BYTES = 64


class Flat:
    """Tensors shaped like some parameters, side by side in one tensor for each dtype.

    Each begins at a multiple of 64 bytes, as torch's own tensors do: some kernels add up in another order
    elsewhere. Such a tensor is filled up until ``multiple`` parts of it do too. It lies at the beginning of
    one of its dtype in ``room``, if that is given.
    """

    def __init__(
        self,
        parameters: Sequence[Tensor],
        multiple: int = 1,
        room: Mapping[torch.dtype, Tensor] | None = None,
    ) -> None:
        self.device = parameters[0].device if parameters else torch.device("cpu")
        self.parts = [
            torch.zeros(size, dtype=dtype, device=self.device) if room is None else room[dtype][:size]
            for dtype, size in sizes(parameters, multiple).items()
        ]
        rests = {part.dtype: part for part in self.parts}
        self.views: list[Tensor] = []
        for parameter in parameters:
            rest, count = rests[parameter.dtype], parameter.numel()
            strides = torch.empty_like(parameter, device="meta").stride()  # its layout, made dense
            self.views.append(rest[:count].as_strided(parameter.shape, strides))
            rests[parameter.dtype] = rest[aligned(parameter) :]

    def copy(self) -> Flat:
        """Another one with the same values."""
        made = Flat(self.views)
        made.copy_(self)
        return made

    def copy_(self, other: Flat) -> None:
        """Take over another one's values."""
        for own, others in zip(self.parts, other.parts, strict=True):
            own.copy_(others)

    def zero_(self) -> None:
        """Set all to zero."""
        for part in self.parts:
            part.zero_()


def sizes(parameters: Sequence[Tensor], multiple: int = 1) -> dict[torch.dtype, int]:
    """Elements of each dtype, filled up."""
    found: dict[torch.dtype, int] = {}
    for parameter in parameters:
        found[parameter.dtype] = found.get(parameter.dtype, 0) + aligned(parameter)
    steps = {dtype: multiple * _ALIGNED_BYTES // dtype.itemsize for dtype in found}
    return {dtype: -(-size // steps[dtype]) * steps[dtype] for dtype, size in found.items()}


def aligned(parameter: Tensor) -> int:
    """Elements from where one begins to where the next one may."""
    step = _ALIGNED_BYTES // parameter.dtype.itemsize
    return -(-parameter.numel() // step) * step


class Weights:
    """The parameters of a rank's stages: their versions, and the optimizer's own view of the newest one.

    ``names`` are the model's, by a parameter's id; ``value_of`` has a parameter's first values.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        names: Mapping[int, str],
        value_of: Callable[[Tensor], Tensor],
    ) -> None:
        self.parameters = list(parameters)
        self.names = [names[id(parameter)] for parameter in self.parameters]
        first = Flat(self.parameters)
        for parameter, view in zip(self.parameters, first.views, strict=True):
            view.copy_(value_of(parameter))
            parameter.data = view  # one after the other, so that nothing is there twice
        self.versions = {0: first}
        self._free: list[Flat] = []
        self._selected: Flat | None = None
        self.owned = [nn.Parameter(view) for view in first.views]
        self.select(0)

    @property
    def newest(self) -> int:
        """How many updates the newest version has seen."""
        return max(self.versions)

    def select(self, version: int, stage: int = 0, *, backward: bool = False) -> None:
        """Let the model read this version, at any stage, forwards and backwards."""
        flat = self.versions[version]
        if flat is not self._selected:
            self._selected = flat
            torch.clear_autocast_cache()  # it knows a parameter, not its values
            for parameter, view in zip(self.parameters, flat.views, strict=True):
                parameter.data = view

    def accumulate_into(self, gradients: Flat) -> None:
        """Let backward add up its gradients there."""
        for parameter, view in zip(self.parameters, gradients.views, strict=True):
            parameter.grad = view

    def leave(self) -> None:
        """All stages' weights stay as they are."""

    def update(self, gradients: Flat, step: Callable[[], Any], oldest: int) -> Flat | None:
        """Make the next version out of the newest one by an optimizer's step.

        Args:
            gradients: what the step reads.
            step: the optimizer's.
            oldest: the oldest version that is still to be read; those before it make room.

        Returns:
            The version before, if it is still to be read, else None: the step was done in its place.
        """
        newest = self.newest
        for version in [each for each in self.versions if each < min(oldest, newest)]:
            self._free.append(self.versions.pop(version))
        before = self.versions[newest]
        after = before
        if oldest <= newest:
            after = self._free.pop() if self._free else Flat(self.parameters)
            after.copy_(before)
        else:
            del self.versions[newest]
        self.versions[newest + 1] = after
        for own, view, gradient in zip(self.owned, after.views, gradients.views, strict=True):
            own.data, own.grad = view, gradient
        step()
        for own in self.owned:
            own.grad = None
        torch.clear_autocast_cache()
        return before if after is not before else None

    def restore(self, versions: dict[int, Flat]) -> None:
        """Take over these versions, in the place of all there are."""
        self.versions, self._free = versions, []
        for own, view in zip(self.owned, versions[self.newest].views, strict=True):
            own.data = view
        self.select(self.newest)

    def hand_over(self, optimizer: torch.optim.Optimizer) -> None:
        """Let an optimizer of the whole model step this rank's parameters, and no others.

        Its groups stay, with their settings, so that schedulers of learning rates go on working; what state
        it has already goes with the parameters.

        Raises:
            OptionError: it does not have the parameters of this rank's stages.
        """
        owned = {id(old): own for old, own in zip(self.parameters, self.owned, strict=True)}
        found = 0
        for group in optimizer.param_groups:
            old = [parameter for parameter in group["params"] if id(parameter) in owned]
            group["params"] = [owned[id(parameter)] for parameter in old]
            found += len(old)
        if not found and self.parameters:
            raise OptionError(
                f"the optimizer has none of the {len(self.parameters)} parameters of this rank's stages. "
                "Make it with the parameters of the same model object that the runner gets."
            )
        state = optimizer.state
        for parameter in list(state):
            kept = state.pop(parameter)
            if id(parameter) in owned:
                state[owned[id(parameter)]] = kept


def require_known(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer of more than the model.

    Raises:
        OptionError: says how many parameters are not the model's.
    """
    known = {id(parameter) for parameter in model.parameters()}
    given = [each for group in optimizer.param_groups for each in group["params"]]
    others = [tuple(each.shape) for each in given if id(each) not in known]
    if others and len(others) < len(given):
        raise OptionError(
            f"{len(others)} of the optimizer's {len(given)} parameters are not the model's, the first one of "
            f"{others[0]}, and a pipeline trains the model's alone. Put a loss's own parameters into the "
            "model, or leave them out."
        )


def stand_in(tensor: Tensor, device: torch.device) -> Tensor:
    """Of a tensor's shape without its memory, and NaN."""
    value = float("nan") if tensor.is_floating_point() else 0
    return torch.full((), value, dtype=tensor.dtype, device=device).expand(tensor.shape)


def is_stand_in(tensor: Tensor) -> bool:
    """Whether it is one of :func:`stand_in`, as far as that can be seen."""
    is_single = tensor.untyped_storage().nbytes() == tensor.element_size()
    return is_single and tensor.is_floating_point() and bool(tensor.detach().isnan().any())


def forget(model: nn.Module, held: Iterable[Tensor]) -> None:
    """Free all but what a rank holds: other parameters keep their shape, and are NaN."""
    kept = {id(parameter) for parameter in held}
    for parameter in model.parameters():
        if id(parameter) not in kept:
            parameter.data = stand_in(parameter, parameter.device)

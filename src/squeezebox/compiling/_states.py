"""The optimizer's part of a compiled step: each parameter updated within backward, its state elsewhere."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator

import torch

from squeezebox.capture import CompiledStep, Spending
from squeezebox.memory import DiskFolder
from squeezebox.optim import Updates
from squeezebox.planning import States, state_costs
from squeezebox.profiling import transient_bytes
from squeezebox.schema import UnsupportedModelError
from squeezebox.steps import (
    TrainingStep,
    device_of,
    held_by,
    names_of,
    nbytes_of,
    tensors_in,
    ungraded,
)

_ROOMS = 4  # shares of the states that may be in memory, of which one is chosen
_TIMED = 3
_SAMPLED = 256  # elements of a gradient
_WRONG = 0.3  # of their norm: what another order of the same sums never makes


class Updating:
    """What a budget knows of the optimizer.

    Args:
        example: with the optimizer, and the folder that states may be moved to.
        step: compiled plainly.
        update_noise: of the updates, or None.
        moves: whether states may be in a file.
        exact: whether gradients are those of ``step``. Elsewhere their noise is for the caller to measure.
    """

    def __init__(
        self,
        example: TrainingStep,
        step: CompiledStep,
        *,
        update_noise: float | None,
        moves: bool,
        exact: bool = True,
    ) -> None:
        assert example.optimizer is not None
        self._example, self._optimizer, self._exact = example, example.optimizer, exact
        device = device_of(example.model)
        codes = [] if update_noise is None else state_costs(self._optimizer, update_noise, device)
        self._transient_bytes, seconds, self._expected = _plainly(example, step)
        self.states = States(example, seconds, codes, moves=moves)
        self._rehearsed = dict[torch.nn.Parameter, torch.Tensor]()
        self._whole: dict[torch.nn.Parameter, torch.Tensor] | None = None
        self._spending = Spending(self.states.taken_bytes, self._rehearse)

    def plain_peak(self, peak_bytes: int) -> int:
        """Of a whole plain step, where forward and backward have that peak without states."""
        own = nbytes_of([*held_by(self._example.model), *tensors_in(self._example.sample)])
        behind = own + self.states.gradient_bytes + self._transient_bytes
        return self.states.nbytes + max(peak_bytes, behind)

    def rooms(self) -> list[int]:
        """Bytes that the states may take, the most first."""
        least = self.states.least_bytes
        return [least + (self.states.nbytes - least) * share // _ROOMS for share in range(_ROOMS, -1, -1)]

    def seconds(self, room: int) -> float:
        """What moving and packing take where the states have so much room."""
        found = self.states.within(room)
        return float("inf") if found is None else found[0].seconds

    def spending(self, compiled: Callable[..., CompiledStep]) -> Callable[..., CompiledStep]:
        """As the argument, with gradients that are used up in backward."""
        return functools.partial(compiled, spending=self._spending)

    @contextlib.contextmanager
    def rehearsing(self) -> Iterator[None]:
        """Around a step that uses gradients up, and finds every parameter as it was afterwards.

        Raises:
            UnsupportedModelError: a gradient was not complete, or was computed from an updated parameter.
        """
        try:
            yield
        except RuntimeError as error:
            if "modified by an inplace operation" in str(error):
                raise _shared() from error
            raise
        finally:
            found = dict(self._rehearsed)
            self._rehearsed.clear()
            for parameter in found:
                parameter.detach().neg_()
        names = names_of(self._example.model)
        for parameter, gradient in found.items():
            own = f"the gradient of '{names[id(parameter)]}'"
            if parameter.grad is not None:
                raise UnsupportedModelError(
                    f"{own} has a second part, from outside of the model, such as a penalty in the loss, and "
                    "states=True uses it up within the compiled backward. Compute that part within the "
                    "model's forward, or leave states=True out."
                )
            expected = self._expected[parameter]
            if self._exact and (gradient - expected).norm() > _WRONG * expected.norm():
                raise UnsupportedModelError(
                    f"{own} is another one with states=True than without, on the same sample: the model "
                    f"draws what cannot be drawn again, or torch {torch.__version__} reads a parameter after "
                    "its update. Leave states=True out."
                )

    def gradients(self, step: CompiledStep) -> list[torch.Tensor]:
        """Of the model's parameters on the example, also those that backward uses up; nothing of it stays."""
        whole = self._whole = dict[torch.nn.Parameter, torch.Tensor]()
        try:
            with self._example.restored(), self.rehearsing():
                self._example.model.zero_grad(set_to_none=True)
                return self._example.gradients(step, whole)
        finally:
            self._whole = None

    def begin(self, step: CompiledStep, room: int) -> int:
        """Update in backward from now on, with the states in so much room; gives what they take."""
        found = self.states.within(room)
        assert found is not None
        plan, held_bytes = found
        folder = self._example.folder
        updates = Updates(
            self._example.model,
            self._optimizer,
            in_backward=True,
            states=plan.states,
            packed=plan.packed,
            gradients=(),
            folder=folder if plan.states and isinstance(folder, DiskFolder) else None,
        )
        step.update_by(updates, plan)
        return held_bytes

    def _rehearse(self, parameter: torch.nn.Parameter, gradient: torch.Tensor) -> None:
        """Take what the update will; what reads the parameter after this will give itself away."""
        if parameter in self._rehearsed:
            raise _shared()
        torch.empty(self.states.taken_bytes[parameter], dtype=torch.uint8, device=parameter.device)
        self._rehearsed[parameter] = _sample(gradient)
        if self._whole is not None:
            self._whole[parameter] = gradient.detach().clone()
        parameter.detach().neg_()


def _shared() -> UnsupportedModelError:
    return UnsupportedModelError(
        "the model compiles to several graphs, of which two compute parts of one parameter's gradient, and "
        "states=True uses up the first part. Mend the graph break between them, or leave states=True out."
    )


def _sample(gradient: torch.Tensor) -> torch.Tensor:
    flat = gradient.detach().reshape(-1)
    return flat[:: max(1, len(flat) // _SAMPLED)].clone()


def _plainly(
    example: TrainingStep, step: CompiledStep
) -> tuple[int, float, dict[torch.nn.Parameter, torch.Tensor]]:
    """Bytes that the optimizer's own step takes besides, seconds of forward and backward, and gradients."""
    found = []
    for _ in range(_TIMED):
        with example.restored():
            example.model.zero_grad(set_to_none=True)
            begun = time.perf_counter()
            loss = example.loss(step)
            with ungraded(loss, example.model):
                loss.backward()
            found.append(time.perf_counter() - begun)
            gradients = {each: each.grad for each in example.model.parameters() if each.grad is not None}
            needed = transient_bytes(gradients.values(), example.optimizer)
            samples = {parameter: _sample(gradient) for parameter, gradient in gradients.items()}
    return needed, min(found), samples

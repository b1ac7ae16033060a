"""A batch on its way into the pipeline, parted into microbatches."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from squeezebox.schema import OptionError, PipelinePlan


class Feed:
    """Inputs where a rank has the first stage, targets where it has the last, by microbatch."""

    def __init__(self, plan: PipelinePlan, *, is_first: bool, is_last: bool) -> None:
        self._plan, self._is_first, self._is_last = plan, is_first, is_last
        self.inputs: dict[int, tuple[Tensor, ...]] = {}
        self.targets: dict[int, Tensor] = {}

    def take(self, batch: int, inputs: Any, target: Any) -> None:
        """Part batch number ``batch``.

        Raises:
            OptionError: it has another size than the plan's.
        """
        first = batch * self._plan.microbatches
        if self._is_first:
            inputs = inputs if isinstance(inputs, tuple) else (inputs,)
            self._check(inputs)
            microbatches = zip(*(self._parted(tensor, "inputs") for tensor in inputs), strict=True)
            self.inputs.update(enumerate(microbatches, first))
        if self._is_last and target is not None:
            self.targets.update(enumerate(self._parted(target, "target"), first))

    def _check(self, inputs: tuple[Any, ...]) -> None:
        """Refuse inputs of other forms than the plan's, if it names any."""
        wanted = [(form.shape, form.dtype) for form in self._plan.inputs]
        found = [
            (tuple(each.shape[1:]), str(each.dtype).removeprefix("torch."))
            for each in inputs
            if isinstance(each, Tensor)
        ]
        if wanted and found != wanted:
            raise OptionError(
                f"inputs: samples are {found}, and the plan is for {wanted}. Pass such, or make a plan for "
                "these."
            )

    def _parted(self, tensor: Any, what: str) -> tuple[Tensor, ...]:
        plan = self._plan
        size = plan.microbatch * plan.microbatches
        if not isinstance(tensor, Tensor) or tensor.dim() == 0 or len(tensor) != size:
            shape = tuple(tensor.shape) if isinstance(tensor, Tensor) else type(tensor).__name__
            raise OptionError(
                f"{what}: {shape}, and the plan's batch is {plan.microbatches} microbatches of "
                f"{plan.microbatch} samples, {size} along the first dimension, in each pipeline. Pass that "
                "number (leave out a last, smaller batch), or make a plan for this batch."
            )
        return tuple(tensor.split(plan.microbatch))

"""What stands for a gradient that backward has used up."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from squeezebox.memory import Absent
from squeezebox.schema import CaptureError


class SpentGradient(Absent):
    """The gradient of a parameter that was updated in backward: what asks for it is refused by name."""

    def __init__(self, like: torch.Tensor, name: str) -> None:
        self.parameter = name

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        first = args[0]
        spent = next(
            each
            for each in (*(first if isinstance(first, (list, tuple)) else ()), *args)
            if isinstance(each, SpentGradient)
        )
        if func is torch.ops.aten.detach.default:
            return spent
        raise CaptureError(
            f"{func} asks for the gradient of '{spent.parameter}', which backward used up: under this plan "
            "it updates every parameter as soon as its gradient is there. Clipping, GradScaler, an average "
            "over ranks, gradients that add up and zero_grad(set_to_none=False) need it. Make the plan with "
            "clip=True where you clip or scale, with accumulate= where you add up, or without states=True. "
            "Begin from saved weights: these have been updated."
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        return None

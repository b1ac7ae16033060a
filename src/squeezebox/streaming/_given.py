"""What a step may be called with, and images as a model takes them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from squeezebox.schema import OptionError, UnsupportedModelError
from squeezebox.streaming._files import from_file
from squeezebox.streaming._prepared import Scaled, form_of


def require_modes() -> None:
    """Raise an error under inference mode or torch.func, whose gradients would be others."""
    if torch.is_inference_mode_enabled():
        raise OptionError("a streamed step computes gradients; leave torch.inference_mode out.")
    if torch._C._functorch.peek_interpreter_stack() is not None:
        raise UnsupportedModelError("a streamed step computes gradients; call it outside torch.func.")


def uncast(device: torch.device) -> torch.autocast:
    """Without torch.autocast, for a graph that has its casts."""
    return torch.autocast(device.type, enabled=False)


def require_image(image: Any) -> None:
    """Raise OptionError where the image has fewer than three dimensions, or an empty one."""
    shape = tuple(getattr(image, "shape", ()))
    if len(shape) < 3 or 0 in shape:
        raise OptionError(
            f"the image is a {type(image).__name__} of shape {shape}; give a tensor or an array of "
            "[N, C, H, W] or [C, H, W], none of them zero."
        )


def scaled(image: Tensor, model: nn.Module) -> Tensor:
    """Bytes between 0 and 1 in the model's precision; others as they are."""
    return image.to(_precision(model)) / 255 if image.dtype == torch.uint8 else image


def _precision(model: nn.Module) -> torch.dtype:
    floating = (parameter.dtype for parameter in model.parameters() if parameter.is_floating_point())
    return next(floating, torch.float32)


def derivable(image: Any, model: nn.Module, prepare: object) -> Any:
    """The image as floating point numbers, by which there is a gradient.

    Raises:
        OptionError: it has integers, and what ``prepare`` makes of them has no derivative by them.
    """
    require_image(image)
    dtype = form_of(image).dtype
    if dtype.is_floating_point:
        return image
    if dtype == torch.uint8 and prepare is None:
        return Scaled(from_file(image), _precision(model))
    raise OptionError(f"the image is of {dtype}, by which there is no gradient; give floating point numbers.")

"""What is around a forward: hooks of somebody else, transforms, tracers."""

from __future__ import annotations

import torch
from torch.autograd import forward_ad

from squeezebox.capture._overwrites import Overwrites
from squeezebox.schema import UnsupportedModelError


def foreign_hooks() -> bool:
    """Whether saved-tensor hooks of somebody else are active on this thread."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return hooks is not None and not isinstance(getattr(hooks[0], "__self__", None), Overwrites)


def why_left_alone() -> str:
    """Why a forward's saved tensors are not ours to hold; '' where they are."""
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return "torch.func transformed it"
    if forward_ad._current_level >= 0:
        return "forward-mode AD ran through it"
    if foreign_hooks():
        return "other saved-tensor hooks were active around it"
    enabled = torch._C._autograd._saved_tensors_hooks_is_enabled()  # type: ignore[attr-defined]
    return "" if enabled else "saved-tensor hooks were disabled around it"


def refuse_transforms() -> None:
    """UnsupportedModelError where no step of training can be run.

    Raises:
        UnsupportedModelError: inside torch.func's transforms, or where saved-tensor hooks are disabled.
    """
    if torch._C._functorch.peek_interpreter_stack() is not None:
        raise UnsupportedModelError(
            "this was called inside a transform of torch.func (grad, vmap, jvp or their kin), in which no "
            "backward can be run; call it outside."
        )
    if not torch._C._autograd._saved_tensors_hooks_is_enabled():  # type: ignore[attr-defined]
        raise UnsupportedModelError(
            "this was called where saved-tensor hooks are disabled, without which nobody sees what a step "
            "saves; call it outside torch.autograd.graph.disable_saved_tensors_hooks."
        )


def is_traced() -> bool:
    """Whether a tracer records the forward, for which the model is to be as it is without a session."""
    modes = torch._C._TorchDispatchModeKey
    return bool(torch._C._is_tracing() or torch._C._get_dispatch_mode(modes.PROXY) is not None)

"""Hooks on the modules: which module is running, and where a forward pass starts and ends."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from squeezebox.capture._recorder import Recorder
from squeezebox.schema import UnsupportedModelError

Start = Callable[[Any], None]
Finish = Callable[[bool], None]


class Installation:
    """Forward hooks on every module of a model; :meth:`remove` leaves nothing behind.

    ``start(inputs)`` is called before the model's own forward, ``finish(failed)`` after it, also when
    it raises.
    """

    def __init__(
        self, model: torch.nn.Module, recorder: Recorder, start: Start, finish: Finish
    ) -> None:
        self._hooks: list[Any] = []
        path = recorder.path
        for name, module in model.named_modules():
            if module is model:
                continue
            self._hooks.append(module.register_forward_pre_hook(_push(path, name)))
            self._hooks.append(module.register_forward_hook(_pop(path), always_call=True))
        self._hooks.append(
            model.register_forward_pre_hook(
                lambda _, args, kwargs: start((args, kwargs)), with_kwargs=True, prepend=True
            )
        )
        self._hooks.append(
            model.register_forward_hook(lambda module, args, out: finish(out is None), always_call=True)
        )

    def remove(self) -> None:
        """Take every hook off; safe to call twice."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()


def _push(path: list[str], name: str) -> Callable[..., None]:
    def hook(module: torch.nn.Module, args: Any) -> None:
        path.append(name)

    return hook


def _pop(path: list[str]) -> Callable[..., None]:
    def hook(module: torch.nn.Module, args: Any, output: Any) -> None:
        if path:
            path.pop()

    return hook


def check_supported(model: torch.nn.Module) -> None:
    """Refuse models whose capture would do harm.

    Raises:
        UnsupportedModelError: parameters on two devices, or a part compiled by torch.compile.
    """
    devices = sorted({str(parameter.device) for parameter in model.parameters()})
    if len(devices) > 1:
        raise UnsupportedModelError(
            f"the model's parameters are on {len(devices)} devices ({', '.join(devices)}); one model is "
            "captured on one device. Move it with model.to(device), or attach to each part by itself."
        )
    for name, module in model.named_modules():
        compiled = getattr(module, "_compiled_call_impl", None) is not None
        if compiled or type(module).__name__ == "OptimizedModule":
            raise UnsupportedModelError(
                f"module '{name or type(module).__name__}' is compiled by torch.compile: saved-tensor hooks "
                "written in Python would unpack everything before its backward starts and raise the peak. "
                "Attach to the eager model instead."
            )


def in_backward() -> bool:
    """Whether this thread is running a backward pass (a checkpoint's recomputation, say)."""
    return int(torch._C._current_graph_task_id()) != -1


def foreign_hooks() -> bool:
    """Whether saved-tensor hooks of somebody else are active on this thread."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False) is not None

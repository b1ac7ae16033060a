"""Around the modules: which module is running, and where a forward pass starts and ends."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import MethodType
from typing import Any

import torch
from torch.overrides import _get_current_function_mode_stack

from squeezebox.capture._recorder import Recorder
from squeezebox.schema import UnsupportedModelError

Start = Callable[[Any], None]
Finish = Callable[[bool], None]


class Installation:
    """Hooks on a model's modules and a frame around its forward; :meth:`remove` leaves nothing behind.

    ``start(inputs)`` is called before the model's own forward, ``finish(failed)`` after it, also when
    it raises anything: torch's own forward hooks would not be called on KeyboardInterrupt.
    """

    def __init__(self, model: torch.nn.Module, recorder: Recorder, start: Start, finish: Finish) -> None:
        self._hooks: list[Any] = []
        path = recorder.path
        for name, module in model.named_modules():
            if module is model:
                continue
            self._hooks.append(module.register_forward_pre_hook(_push(path, name)))
            self._hooks.append(module.register_forward_hook(_pop(path), always_call=True))
        self._model = model
        self._previous = model.__dict__.get("forward")
        self._installed = True
        self._framed = MethodType(self._frame(start, finish), model)
        model.__dict__["forward"] = self._framed

    def remove(self) -> None:
        """Take every hook and the frame off; safe to call twice."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._installed = False
        if self._model.__dict__.get("forward") is not self._framed:
            return
        del self._model.__dict__["forward"]
        if self._previous is not None:
            self._model.__dict__["forward"] = self._previous

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """In here the model's forward runs bare."""
        self._installed = False
        try:
            yield
        finally:
            self._installed = True

    def _frame(self, start: Start, finish: Finish) -> Callable[..., Any]:
        """The model's forward between ``start`` and ``finish``; a deep copy of it runs its own bare."""

        def forward(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
            own = MethodType(type(module).forward, module)
            if module is not self._model:
                return own(*args, **kwargs)
            bare = self._previous or own
            if not self._installed:
                return bare(*args, **kwargs)
            failed = True
            try:
                start((args, kwargs))
                out = bare(*args, **kwargs)
                failed = False
            finally:
                finish(failed)
            return out

        return forward


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
    part = compiled_part(model)
    if part is not None:
        raise UnsupportedModelError(
            f"module '{part}' is compiled by torch.compile: saved-tensor hooks written in Python would "
            "unpack everything before its backward starts and raise the peak. Attach to the eager model "
            "instead, or compile it with squeezebox.compile()."
        )


def compiled_part(model: torch.nn.Module) -> str | None:
    """Name of the first module that torch.compile has compiled."""
    for name, module in model.named_modules():
        compiled = getattr(module, "_compiled_call_impl", None) is not None
        if compiled or type(module).__name__ == "OptimizedModule":
            return name or type(module).__name__
    return None


def is_innermost(recorder: Recorder) -> bool:
    """Whether nobody has entered a function mode or saved-tensor hooks since the recorder was entered."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
    mode = _get_current_function_mode_stack()[-1:]
    return bool(mode == [recorder] and hooks is not None and hooks[0] is recorder._pack_hook)


def foreign_hooks() -> bool:
    """Whether saved-tensor hooks of somebody else are active on this thread."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False) is not None

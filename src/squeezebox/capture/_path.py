"""Which module is running, followed by torch's hooks for all modules: none is put on the model's own."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook


class ModulePath:
    """Names of the model's modules whose forwards are running on this thread, while it is entered.

    Without a model, every module that no other one calls is one, and its own name is its class's.
    """

    def __init__(self, model: torch.nn.Module | None) -> None:
        self._names: weakref.WeakKeyDictionary[torch.nn.Module, str] = weakref.WeakKeyDictionary()
        self._adopts = model is None
        if model is not None:
            self._name(model)
        self._running: list[str] = []
        self._hooks = contextlib.ExitStack()
        self._thread = 0

    @property
    def current(self) -> str:
        """Of the innermost module; '' for the model itself."""
        return self._running[-1] if self._running else ""

    def __enter__(self) -> ModulePath:
        self._thread = threading.get_ident()
        self._hooks.callback(self._running.clear)  # a forward may be broken off
        before = register_module_forward_pre_hook(self._begin)
        self._hooks.callback(before.remove)
        after = register_module_forward_hook(self._end, always_call=True)
        self._hooks.callback(after.remove)
        return self

    def __exit__(self, *error: object) -> None:
        self._hooks.close()

    @contextlib.contextmanager
    def within(self, name: str) -> Iterator[None]:
        """As if this module were running."""
        self._running.append(name)
        try:
            yield
        finally:
            self._running.pop()

    def _name(self, model: torch.nn.Module) -> None:
        self._names.update((module, name) for name, module in model.named_modules() if module is not model)

    def _begin(self, module: torch.nn.Module, args: Any) -> None:
        if self._adopts and not self._running and module not in self._names:
            self._name(module)
            self._names[module] = type(module).__name__
        if self._is_ours(module):
            self._running.append(self._names[module])

    def _end(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        if self._running and self._is_ours(module):
            self._running.pop()

    def _is_ours(self, module: torch.nn.Module) -> bool:
        return threading.get_ident() == self._thread and module in self._names
